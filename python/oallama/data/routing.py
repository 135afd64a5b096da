"""Which experts a model's routers chose for each token of a text: data, what follows from it, and its file.

The file is numpy's compressed archive (.npz): `about` is JSON in UTF-8, and each stage has `ids`, `hits` and `unions`.
It holds for the model whose routers have the same weights, quantised in any way, on any machine.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.jsonfile import parse_json_object, write_bytes_atomic
from ..errors import OallamaError
from .expert_hits import POLICIES, Ints, counts, hit_rates, uniform_union, union_sizes, union_widths

SCHEMA = "oallama.routing/1"
STAGES = ("prefill", "decode")
JUDGED = 8192  # tokens of a stage that policies are judged on at most, its first
NONE = 0xFFFF  # in place of an expert where a layer uses fewer than others
_REMEDY = "record one with `oallama profile MODEL.gguf --routing`"
# What numpy, zipfile and zlib raise for damaged bytes.
_DAMAGES = (
    OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, RuntimeError, NotImplementedError, MemoryError,
    OverflowError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class Routers:
    """What a model's routing is known by. sha256: of the routers' names, shapes and first bytes."""

    arch: str
    n_experts: int
    sha256: str


@dataclass(frozen=True)
class StageRouting:
    """A trace of one stage.

    Attributes:
        ids: uint16 [layers, tokens, used]: the router's first choice first; NONE behind a layer's last one.
        hits: float32 [policies, layers, experts]: the share of uses that 1, 2, .. experts or slots hit, in the order
            of POLICIES and as expert_hits.py defines them, judged on the first JUDGED tokens.
        unions: float32 [layers, widths]: distinct experts of 1, 2, 4, .. tokens beside each other.
    """

    ids: NDArray[np.uint16]
    hits: NDArray[np.float32]
    unions: NDArray[np.float32]

    @classmethod
    def judge(cls, ids: NDArray[np.uint16], n_experts: int) -> StageRouting:
        """What follows from `ids`."""
        n_layers, n_tokens = ids.shape[:2]
        hits = np.zeros((len(POLICIES), n_layers, n_experts), dtype=np.float32)
        unions = np.zeros((n_layers, len(union_widths(n_tokens))), dtype=np.float32)
        used = used_by_layer(ids)
        for n_used in set(used.tolist()):
            alike = used == n_used  # layers
            own = ids[alike, :, :n_used]
            unions[alike] = union_sizes(own, n_experts)
            for number, policy in enumerate(POLICIES):
                hits[number, alike] = hit_rates(own[:, :JUDGED], n_experts, policy)
        return cls(ids, hits, unions)

    @property
    def n_tokens(self) -> int:
        return int(self.ids.shape[1])

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens that `unions` are of."""
        return union_widths(self.n_tokens)

    @property
    def judged(self) -> int:
        """Tokens that the policies were judged on: half of them learned from, half counted."""
        return min(self.n_tokens, JUDGED)


def used_by_layer(ids: NDArray[np.uint16]) -> Ints:
    """[layers]: experts that each layer uses for a token."""
    used: Ints = (ids[:, 0] != NONE).sum(axis=1)
    return used


@dataclass(frozen=True)
class RoutingTrace:
    """The routing of one model on one text.

    Attributes:
        created: when, ISO 8601 in UTC. model: the file's name. text: what was read, in words.
        routers: of the model. layers: the numbers of the layers that have experts. n_ubatch: the micro-batch.
        stages: "prefill", the text; "decode", tokens generated behind parts of it.
    """

    created: str
    model: str
    text: str
    routers: Routers
    layers: tuple[int, ...]
    n_ubatch: int
    stages: Mapping[str, StageRouting]

    @property
    def n_experts(self) -> int:
        return self.routers.n_experts

    @cached_property
    def n_used(self) -> tuple[int, ...]:
        """Experts that each layer uses for a token."""
        return tuple(used_by_layer(self.stages[STAGES[0]].ids).tolist())

    def counts(self, stage: str) -> Ints:
        """[layers, experts]: how often each expert was used in a stage."""
        found = self.stages[stage].ids.reshape(len(self.layers), -1)
        return np.stack([counts(row[row != NONE].reshape(1, -1), self.n_experts)[0] for row in found])

    def hit_rate(self, stage: str, policy: str, k: int) -> NDArray[np.float32]:
        """[layers]: the share of uses that hit with k experts or slots a layer.

        Raises OallamaError for a k that the model has not.
        """
        if not 1 <= k <= self.n_experts:
            raise OallamaError(f"{k} of a layer's experts: the model has {self.n_experts}, expected 1 to as many")
        rates: NDArray[np.float32] = self.stages[stage].hits[POLICIES.index(policy), :, k - 1]
        return rates

    def uniform_union(self, n_tokens: int) -> float:
        """Distinct experts of n tokens in the mean over the layers, if every choice were random."""
        return float(np.mean([uniform_union(self.n_experts, used, n_tokens) for used in self.n_used]))

    def check_model(self, routers: Routers, source: str | os.PathLike[str], model: str | os.PathLike[str]) -> None:
        """Raises OallamaError, which names both files, where the trace is of another model."""
        if self.routers != routers:
            raise OallamaError(
                f"the routing trace {source} is of another model than {model}: it is of {self.model} "
                f"({_described(self.routers)}), expected {_described(routers)}; {_REMEDY}"
            )

    # ---- file -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file aside, then rename. Raises OallamaError when it cannot be written."""
        about = {
            "schema": SCHEMA,
            "created": self.created,
            "model": self.model,
            "text": self.text,
            "routers": asdict(self.routers),
            "layers": self.layers,
            "n_ubatch": self.n_ubatch,
            "policies": POLICIES,
        }
        arrays = {f"{name}_{part}": getattr(stage, part) for name, stage in self.stages.items() for part in _PARTS}
        content = io.BytesIO()
        np.savez_compressed(content, about=np.frombuffer(json.dumps(about).encode(), dtype=np.uint8), **arrays)
        write_bytes_atomic(path, content.getvalue(), "routing trace")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingTrace:
        """Read the file. Raises OallamaError, which names it, for one that is missing, damaged or of another kind."""
        if not Path(path).is_file():
            raise OallamaError(f"routing trace {path} does not exist; {_REMEDY}")
        try:
            with np.load(path, allow_pickle=False) as archive:
                about = parse_json_object(archive["about"].tobytes().decode(), f"routing trace {path}", _REMEDY)
                if about.get("schema") != SCHEMA:
                    raise OallamaError(
                        f"routing trace {path} has schema {about.get('schema')!r}, expected {SCHEMA!r}; {_REMEDY}"
                    )
                return _checked(about, {name: StageRouting(*_arrays(archive, name)) for name in STAGES})
        except OallamaError:
            raise
        except _DAMAGES as error:
            raise OallamaError(f"routing trace {path} is cut off or damaged ({error}); {_REMEDY}") from None


_PARTS = ("ids", "hits", "unions")
_TYPES = (np.uint16, np.float32, np.float32)


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a file is an archive, as traces are, and no text."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _described(routers: Routers) -> str:
    return f"{routers.arch}, {routers.n_experts} experts, routers {routers.sha256[:12]}"


def _arrays(archive: Mapping[str, NDArray[Any]], stage: str) -> list[NDArray[Any]]:
    found = [archive[f"{stage}_{part}"] for part in _PARTS]
    for part, array, wanted in zip(_PARTS, found, _TYPES, strict=True):
        if array.dtype != wanted:
            raise ValueError(f"{stage}_{part} is of type {array.dtype}, expected {np.dtype(wanted)}")
    return found


def _checked(about: Mapping[str, Any], stages: Mapping[str, StageRouting]) -> RoutingTrace:
    """Raises ValueError for contents that no recording can give."""
    trace = RoutingTrace(
        created=str(about["created"]),
        model=str(about["model"]),
        text=str(about["text"]),
        routers=Routers(**about["routers"]),
        layers=tuple(map(int, about["layers"])),
        n_ubatch=int(about["n_ubatch"]),
        stages=stages,
    )
    if tuple(about["policies"]) != POLICIES:
        raise ValueError(f"it has the policies {about['policies']}, expected {list(POLICIES)}")
    for name, stage in stages.items():
        _check_stage(name, stage, trace)
    prefill, decode = (used_by_layer(stages[name].ids) for name in STAGES)
    if not np.array_equal(prefill, decode):
        raise ValueError("its stages use different numbers of experts")
    return trace


def _check_stage(name: str, stage: StageRouting, trace: RoutingTrace) -> None:
    n_layers, n_experts = len(trace.layers), trace.n_experts
    if stage.ids.ndim != 3 or len(stage.ids) != n_layers or not all(stage.ids.shape):
        raise ValueError(f"{name}_ids has the shape {stage.ids.shape}, expected ({n_layers}, tokens, used)")
    expected = {"hits": (len(POLICIES), n_layers, n_experts), "unions": (n_layers, len(stage.widths))}
    for part, shape in expected.items():
        if getattr(stage, part).shape != shape:
            raise ValueError(f"{name}_{part} has the shape {getattr(stage, part).shape}, expected {shape}")
    used, ranks = used_by_layer(stage.ids), np.arange(stage.ids.shape[2])
    chosen = np.broadcast_to((ranks < used[:, None])[:, None, :], stage.ids.shape)
    if not used.all() or ((stage.ids < n_experts) != chosen).any() or ((stage.ids == NONE) == chosen).any():
        raise ValueError(f"{name}_ids has experts that a model of {n_experts} has not")
    _check_numbers(f"{name}_hits", stage.hits, 0, 1)
    _check_numbers(f"{name}_unions", stage.unions, 1, n_experts)


def _check_numbers(what: str, numbers: Sequence[Any] | NDArray[Any], least: float, most: float) -> None:
    within = (np.asarray(numbers) >= least) & (np.asarray(numbers) <= most + 1e-6)
    if not within.all():
        raise ValueError(f"{what} has numbers that are not from {least} to {most}")
