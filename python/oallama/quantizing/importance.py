"""How much every group of tensors matters: the KL divergence of the model with that group alone in another type.

Groups are quantised one at a time, all else as in the input, and each is measured in the engine on a text. What the
sum over groups says about all of them together is an approximation (docs/types.md says how good a one).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..data.operators import kind_of, layer_of
from ..errors import OallamaError
from ..modelmaker.gguf_header import padded
from .divergence import Divergence, Reference
from .quantizer import Resolved, Tensor, resolve, write
from .recipe import KEEP, Recipe, rules_of
from .types import fits, n_bytes, type_named

GROUPINGS = ("tensor", "third", "kind")
# From 2 to 16 bits; the last two serve rows that are no multiples of 256.
DEFAULT_TYPES = ("q2_K", "q3_K", "iq4_xs", "q4_0", "q4_K", "q5_K", "q6_K", "q8_0", "f16", "iq4_nl", "q5_0")
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that get one type together."""

    name: str
    tensors: tuple[Tensor, ...]

    def nbytes(self, type: str) -> int:
        """Bytes of the group in the file, padding included."""
        return sum(padded(n_bytes(type, t.ne)) for t in self.tensors)

    def fits(self, type: str) -> bool:
        return all(fits(type, t.ne) for t in self.tensors)


@dataclass(frozen=True)
class Importance:
    """kld, nbytes: [groups, types]; kld is infinite where the group's rows are no whole blocks of the type."""

    groups: tuple[TensorGroup, ...]
    types: tuple[str, ...]
    kld: NDArray[np.float64]
    nbytes: NDArray[np.int64]

    def tensor_types(self, choice: Sequence[int] | NDArray[np.intp]) -> dict[str, str]:
        """Types by tensor for an index of `types` by group."""
        return {t.name: self.types[i] for group, i in zip(self.groups, choice, strict=True) for t in group.tensors}

    def expected(self, types: Mapping[str, str]) -> float:
        """The sum of what the groups' types cost alone; nan when the types were not measured for all of them."""
        total = 0.0
        for i, group in enumerate(self.groups):
            of_group = {types[t.name] for t in group.tensors}
            if len(of_group) > 1 or not of_group <= set(self.types):
                return float("nan")
            total += float(self.kld[i, self.types.index(of_group.pop())])
        return total


@dataclass
class Laboratory:
    """Writes variants of a model and measures them against it; each set of types once.

    folder: for variants, which are removed again; default: a temporary one. imatrix: as for `quantize`.

    Raises OallamaError when nothing in the model can be quantised.
    """

    source: str | os.PathLike[str]
    reference: Reference
    folder: Path | None = None
    imatrix: str | os.PathLike[str] | None = None
    requantize: bool = False
    tensors: tuple[Tensor, ...] = field(init=False)
    base_bytes: int = field(init=False)
    _resolved: Resolved = field(init=False, repr=False)
    _measured: dict[tuple[str, ...], Divergence] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self._resolved = found = resolve(self.source, Recipe("as it is", KEEP))
        self.tensors = tuple(t for t in found.tensors if t.quantisable)
        if not self.tensors:
            raise OallamaError(f"{self.source} has no tensor that can be quantised")
        # Of the file without the tensors that are quantised.
        self.base_bytes = found.file_bytes - sum(padded(t.nbytes) for t in self.tensors)

    def file_bytes(self, types: Mapping[str, str]) -> int:
        """Of the file with these types, to some hundreds."""
        return self.base_bytes + sum(padded(n_bytes(types[t.name], t.ne)) for t in self.tensors)

    def recipe(self, name: str, types: Mapping[str, str]) -> Recipe:
        return Recipe(name, *rules_of({t.name: types[t.name] for t in self.tensors}))

    def uniform(self, type: str) -> dict[str, str] | None:
        """Every tensor in one type; None where that cannot be."""
        return {t.name: type for t in self.tensors} if all(fits(type, t.ne) for t in self.tensors) else None

    def write(self, types: Mapping[str, str], target: Path) -> None:
        """Write the variant with these types, which name every tensor that can be quantised.

        Its types are known to fit, so that nothing is asked of llama.cpp before.
        """
        tensors = tuple(
            replace(t, wanted=types[t.name], written=types[t.name]) if t.name in types else t
            for t in self._resolved.tensors
        )
        found = replace(self._resolved, recipe=self.recipe("variant", types), tensors=tensors)
        write(found, target, imatrix=self.imatrix, requantize=self.requantize)

    def measure(self, types: Mapping[str, str]) -> Divergence:
        """The divergence of the variant with these types."""
        key = tuple(types[t.name] for t in self.tensors)
        if key not in self._measured:
            with tempfile.TemporaryDirectory(prefix="oallama-", dir=self.folder) as folder:
                variant = Path(folder) / "variant.gguf"
                self.write(types, variant)
                self._measured[key] = self.reference.compare(variant)
        return self._measured[key]


def make_groups(tensors: Sequence[Tensor], grouping: str = "third") -> tuple[TensorGroup, ...]:
    """Groups of tensors: "tensor", each alone; "third", of one kind in a third of the layers; "kind", in all layers.

    Raises OallamaError for another grouping.
    """
    if grouping not in GROUPINGS:
        raise OallamaError(f"unknown grouping {grouping!r}; expected one of {', '.join(GROUPINGS)}")
    n_layer = 1 + max((il for t in tensors if (il := layer_of(t.name)) is not None), default=0)
    found: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        il, kind = layer_of(tensor.name), kind_of(tensor.name)
        if grouping == "tensor" or il is None:
            name = tensor.name
        else:
            name = kind if grouping == "kind" else f"{kind} {3 * il // n_layer + 1}/3"
        found.setdefault(name, []).append(tensor)
    return tuple(TensorGroup(name, tuple(group)) for name, group in found.items())


def measure_importance(
    lab: Laboratory, types: Sequence[str] = DEFAULT_TYPES, grouping: str = "third", progress: Progress | None = None
) -> Importance:
    """Measure every group in every type. Raises OallamaError for unknown types, and what measuring raises."""
    types = tuple(dict.fromkeys(map(type_named, types)))
    groups = make_groups(lab.tensors, grouping)
    shape = len(groups), len(types)
    kld, nbytes = np.full(shape, np.inf), np.zeros(shape, np.int64)
    work = [(g, t) for g, group in enumerate(groups) for t, type in enumerate(types) if group.fits(type)]
    source = {t.name: t.source for t in lab.tensors}
    for done, (g, t) in enumerate(work):
        group, type = groups[g], types[t]
        if progress:
            progress(done, len(work), f"{group.name} {type}")
        alone = {**source, **{tensor.name: type for tensor in group.tensors}}
        kld[g, t] = 0.0 if alone == source else lab.measure(alone).kld
        nbytes[g, t] = group.nbytes(type)
    if without := [group.name for g, group in enumerate(groups) if not np.isfinite(kld[g]).any()]:
        raise OallamaError(f"rows of {without[0]} are whole blocks of none of {', '.join(types)}; add a smaller block")
    return Importance(groups, types, kld, nbytes)
