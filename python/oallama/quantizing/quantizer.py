"""Resolves a recipe to one type per tensor and writes the model, through llama.cpp's own quantiser.

What is written is known before: the bytes, and where llama.cpp takes another type than the recipe asks for.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..engine import model_file
from ..errors import OallamaError
from ..modelmaker.gguf_header import padded
from ..modelmaker.partial_file import complete_or_absent
from . import program
from .program import Row
from .recipe import KEEP, MIXES, Recipe
from .types import FLOATS, NEED_IMATRIX, n_bytes

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, the tensor that was written last

# A type that no input has, for asking what can be quantised at all.
_PROBE = "IQ4_NL"
# llama.cpp's file type by the type of most bytes: it names the file, and what no type was given for.
_FILE_TYPES = {
    **{"q2_K": "Q2_K", "q3_K": "Q3_K_S", "q4_K": "Q4_K_S", "q5_K": "Q5_K_S", "q6_K": "Q6_K", "q8_0": "Q8_0"},
    **{"q4_0": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1", "iq4_nl": "IQ4_NL", "iq4_xs": "IQ4_XS"},
    "iq3_s": "IQ3_S",
}
_ANY = "Q8_0"
# Read by rows or multiplied last: llama.cpp takes these without an importance matrix (tensor_requires_imatrix).
_OUTER = ("token_embd.weight", "per_layer_token_embd.weight", "output.weight")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the input and what becomes of it.

    ne: ggml's order. source: its type in the input; written: in the output. quantisable: no norm, router or the like.
    wanted: the type that the recipe says; fell_back: rows are no whole blocks of it, and llama.cpp took another one.
    """

    name: str
    ne: tuple[int, ...]
    source: str
    wanted: str
    written: str
    fell_back: bool
    quantisable: bool

    @property
    def n_values(self) -> int:
        return math.prod(self.ne)

    @property
    def nbytes(self) -> int:
        return n_bytes(self.written, self.ne)


@dataclass(frozen=True)
class Resolved:
    """A recipe for one model, as it will be written."""

    source: Path
    recipe: Recipe
    tensors: tuple[Tensor, ...]

    @property
    def types(self) -> dict[str, str]:
        """The type of every tensor in the file."""
        return {t.name: t.written for t in self.tensors}

    @property
    def fallbacks(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if t.fell_back)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights without padding."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file, to some hundreds: what is not weights is as long as in the input.

        Of an input in several files that is not known and left out.
        """
        before = sum(padded(n_bytes(t.source, t.ne)) for t in self.tensors)
        return max(0, self.source.stat().st_size - before) + sum(padded(t.nbytes) for t in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.weights_bytes / sum(t.n_values for t in self.tensors)

    def describe(self) -> str:
        """How many tensors have which type, the most frequent first."""
        counts = Counter(t.written for t in self.tensors if t.quantisable)
        return ", ".join(f"{n} {type}" for type, n in counts.most_common())


def resolve(
    source: str | os.PathLike[str],
    recipe: Recipe,
    *,
    imatrix: str | os.PathLike[str] | None = None,
    requantize: bool = False,
) -> Resolved:
    """What `recipe` makes of a model, without writing anything.

    Args:
        source: a GGUF file; of a model in several files the first.
        imatrix: importance matrix of llama-imatrix; the smallest types need one.
        requantize: whether tensors that are quantised already may be quantised again, which costs quality.
    Raises:
        OallamaError: for a file that is no model, a rule that fits no tensor which can be quantised, tensors that are
            quantised already, and a type that needs an importance matrix.
    """
    source, weights = model_file.check_gguf(Path(source)), _existing(imatrix)
    mix = recipe.base in MIXES
    can = {row.name for row in program.dry_run(source, _PROBE, {}) if row.ruled_out or row.written != row.source}
    asked = program.dry_run(source, recipe.base if mix else _ANY, None, weights if mix else None)
    wanted = {row.name: _wanted(recipe, row) for row in asked}
    _check_rules(source, recipe, can, wanted)
    types = _given_types(recipe, wanted)
    rows = asked if types is None else program.dry_run(source, _ANY, types)
    tensors = tuple(
        Tensor(r.name, r.ne, r.source, wanted[r.name], r.written, r.ruled_out is not None, r.name in can) for r in rows
    )
    again = [t for t in tensors if t.source not in FLOATS and t.written != t.source]
    if again and not requantize:
        raise OallamaError(
            f"{source} is quantised already ({again[0].name} is {again[0].source}), and to do it again costs quality: "
            "take the F16 or BF16 file, or allow it with --requantize (requantize=True)"
        )
    found = Resolved(source, recipe, tensors)
    if weights is None:
        _check_needs_no_imatrix(found)
    return found


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    recipe: Recipe,
    *,
    imatrix: str | os.PathLike[str] | None = None,
    requantize: bool = False,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> Resolved:
    """Write `source` in the types of `recipe` to `target`, which appears under its name only when it is complete.

    Args:
        imatrix, requantize: as in `resolve`.
        n_threads: 0 takes all CPUs this process may use.
        progress: called after every tensor.
    Raises:
        OallamaError: what `resolve` raises; target is the source; it cannot be written; the disk is full.

    Example:
        quantize("model-f16.gguf", "model-844.gguf", named("8/4/4"))
    """
    target = Path(target)
    found = resolve(source, recipe, imatrix=imatrix, requantize=requantize)
    if target.exists() and target.samefile(found.source):
        raise OallamaError(f"{target} is the input itself; name another file to write")
    write(found, target, imatrix=imatrix, requantize=requantize, n_threads=n_threads, progress=progress)
    return found


def write(
    found: Resolved,
    target: Path,
    *,
    imatrix: str | os.PathLike[str] | None = None,
    requantize: bool = False,
    n_threads: int = 0,
    progress: Progress | None = None,
) -> None:
    """The second half of `quantize`: write what was resolved."""
    size = {t.name: t.nbytes for t in found.tensors}
    done, total = 0, found.weights_bytes

    def count(name: str) -> None:
        nonlocal done
        done += size[name]
        if progress:
            progress(done, total, name)

    base = found.recipe.base
    with complete_or_absent(target, found.file_bytes) as file:
        program.write(
            found.source,
            Path(file.name),  # the program opens it by its name, which it has only while it is incomplete
            base if base in MIXES else _file_type(found),
            _given_types(found.recipe, {t.name: t.wanted for t in found.tensors}),
            imatrix=_existing(imatrix),
            requantize=requantize,
            n_threads=n_threads,
            done=count,
        )


def _existing(imatrix: str | os.PathLike[str] | None) -> Path | None:
    if imatrix is not None and not Path(imatrix).is_file():
        raise OallamaError(f"no such importance matrix: {imatrix}")
    return None if imatrix is None else Path(imatrix)


def _wanted(recipe: Recipe, row: Row) -> str:
    """The type that the recipe says, before llama.cpp has its say; row: by the recipe's mix, if it has one."""
    if rule := recipe.rule_for(row.name):
        return rule.type
    if recipe.base in MIXES:
        return row.ruled_out or row.written
    return row.source if recipe.base == KEEP else recipe.base


def _given_types(recipe: Recipe, wanted: Mapping[str, str]) -> dict[str, str] | None:
    """The types to name one by one; None where a mix alone decides."""
    return None if recipe.base in MIXES and not recipe.rules else dict(wanted)


def _file_type(found: Resolved) -> str:
    sizes: Counter[str] = Counter()
    for tensor in found.tensors:
        sizes[tensor.written] += tensor.nbytes
    return next((_FILE_TYPES[type] for type, _ in sizes.most_common() if type in _FILE_TYPES), _ANY)


def _check_rules(source: Path, recipe: Recipe, can: set[str], names: Mapping[str, str]) -> None:
    """Raises OallamaError for a rule whose pattern is found in no tensor that can be quantised."""
    for rule in recipe.rules:
        hits = [name for name in names if re.search(rule.pattern, name)]
        if any(name in can for name in hits):
            continue
        some = ", ".join(sorted(can)[:6])
        what = f"only {hits[0]}, which is not quantised" if hits else "no tensor"
        there = f"tensors are called {some}, ..." if can else "nothing in it can be quantised"
        raise OallamaError(f"the pattern {rule.pattern!r} fits {what}, of {source}; {there}")


def _check_needs_no_imatrix(found: Resolved) -> None:
    for t in found.tensors:
        small = t.written in NEED_IMATRIX or (found.recipe.base == "Q2_K_S" and t.written == "q2_K")
        if small and t.written != t.source and t.name not in _OUTER:
            raise OallamaError(
                f"{t.written}, of {t.name}, needs an importance matrix: make one with llama-imatrix and give it with "
                "--imatrix FILE (imatrix=), or take a larger type"
            )
