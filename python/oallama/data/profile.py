"""A machine's measured times: data, file format and look-ups. Nothing here measures.

A profile answers "how long does this take on that device" from medians recorded by the profiler; where the exact point
was not measured it says how the answer was derived (`Estimate.source`). Times are seconds, sizes bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from ..base.jsonfile import read_json_object, write_text_atomic
from ..errors import OallamaError
from .curves import Estimate, estimate_at, linear_from_zero, log_log, piecewise_linear
from .entries import (
    KINDS,
    OTHER,
    REALISATIONS,
    AttentionTime,
    ChainTime,
    Concurrency,
    DeviceInfo,
    LinkTime,
    Note,
    OperatorTime,
    OtherLoad,
    Overlap,
    ShapeTime,
    SwitchTime,
    form_at,
    is_tiled,
    kind_of,
)
from .shapes import Shape, attention_distance, attention_work, distance, n_active, work
from .shipped import HERE, find
from .validation import check_profile, entries

SCHEMA = "oallama.profile/1"
REMEDY = "record one with `oallama profile MODEL.gguf`"
RECORDED = HERE / "recorded"
# Where the times of a profile come from.
SOURCES = ("measured", "datasheet")


Timed = TypeVar("Timed", OperatorTime, AttentionTime, ChainTime, ShapeTime, LinkTime, SwitchTime)
Curves = dict[tuple[str, str, str], dict[Shape, list[tuple[int, float]]]]  # by device, op and type


def _shape(ne: Sequence[int], n_used: int) -> Shape:
    k, m, n_expert = (*ne, 1, 1, 1)[:3]
    return k, m, max(1, n_expert), max(1, n_used)


@dataclass(frozen=True)
class Profile:
    """All times of one machine, with the fingerprint (machine, threads, drivers, engine) they hold for.

    source: "measured", or "datasheet" when they were computed from one (datasheet.py). notes: of measurements that are
    missing, or not as good as the others. loads: what else the machine did; none in older files.
    """

    created: str
    fingerprint: Mapping[str, Any]
    devices: tuple[DeviceInfo, ...]
    operators: tuple[OperatorTime, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    links: tuple[LinkTime, ...] = ()
    switches: tuple[SwitchTime, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    concurrency: tuple[Concurrency, ...] = ()
    chains: tuple[ChainTime, ...] = ()
    shapes: tuple[ShapeTime, ...] = ()
    schema: str = field(default=SCHEMA)
    source: str = "measured"
    notes: tuple[Note, ...] = ()
    loads: tuple[OtherLoad, ...] = ()

    # ---- look-ups -------------------------------------------------------------------------------------------------

    def device(self, name: str) -> DeviceInfo:
        """The device called `name`. Raises OallamaError listing those there are."""
        for device in self.devices:
            if device.name == name:
                return device
        have = ", ".join(d.name for d in self.devices) or "none"
        raise OallamaError(f"the profile has no device {name!r} (it has {have}); {self._how_to_add(name)}")

    def op_time(
        self,
        device: str,
        op: str,
        type: str,
        ne: Sequence[int],
        n_tokens: int,
        n_used: int = 1,
        realisation: str = "",
    ) -> Estimate:
        """Seconds of one mul_mat / mul_mat_id with a weight of shape `ne` = (k, m[, n_expert]) for `n_tokens` tokens.

        Exact point: "measured". Between measured token counts of the same shape: "interpolated". Otherwise the
        nearest measured shape of the same type, "scaled" by the weight values touched (bytes when few tokens, flops
        when many: both are proportional to k*m at equal tokens). `realisation` is preferred where it was measured;
        what is tiled is plain where our kernels compute none. Raises OallamaError when the type was not measured.
        """
        shape = _shape(ne, n_used)
        named = form_at(realisation, n_tokens, *shape[2:])
        if named == "tiled" and (device, op, type) not in self._thin and not is_tiled(n_tokens, *shape[2:]):
            named = "plain"
        curves = self._curves[named].get((device, op, type), {})
        if shape in curves:
            return estimate_at(curves[shape], n_tokens)
        if curves:
            nearest = min(curves, key=lambda s: (distance(s, shape), s))
            estimate = estimate_at(curves[nearest], n_tokens)
            return Estimate(estimate.seconds * work(shape, n_tokens) / work(nearest, n_tokens), "scaled")
        dense = self._curves[""].get((device, "MUL_MAT", type), {})
        if op == "MUL_MAT_ID" and dense:
            # Each active expert is a dense product over its share of the rows.
            k, m, _, used = shape
            active = n_active(shape, n_tokens)
            rows = max(1, round(n_tokens * used / active))
            one = self.op_time(device, "MUL_MAT", type, (k, m), rows, realisation=realisation)
            return Estimate(one.seconds * active, "scaled")
        have = ", ".join(sorted({t for d, o, t in self._curves[""] if (d, o) == (device, op)})) or "none"
        raise OallamaError(
            f"the profile has no {op} of type {type} on {device} (wanted for a weight of {'x'.join(map(str, ne))}; it "
            f"has types {have}); {self._how_to_add(device)}"
        )

    def realisations(self, device: str, op: str, type: str, ne: Sequence[int], n_used: int = 1) -> tuple[str, ...]:
        """The realisations of a weight of this very shape that were measured; () where there is no choice."""
        shape, key = _shape(ne, n_used), (device, op, type)
        return tuple(r for r in REALISATIONS if r and shape in self._realised[r].get(key, {}))

    def attention_time(
        self,
        device: str,
        shape: tuple[int, int, int, int],
        n_tokens: int,
        depth: int,
        type_k: str = "f16",
        type_v: str = "f16",
        flash: bool = True,
        kernel: str = "ggml",
    ) -> Estimate:
        """Seconds of one layer's attention; `shape` = (n_head, n_head_kv, head_dim_k, head_dim_v).

        Linear in `depth` between measured depths and down from the first two, log-log in `n_tokens`; another shape,
        cache type or form (fused or not) is scaled by the number of K and V values multiplied. A kernel that has
        no times of this shape there is ggml's. Raises OallamaError when no attention was measured on the device.
        """
        wanted = (tuple(shape), type_k, type_v, flash)
        known = kernel if (device, kernel, *wanted) in self._attention else "ggml"
        tables = {key[2:]: v for key, v in self._attention.items() if key[:2] == (device, known)}
        if not tables:
            n_head, n_head_kv, head_dim_k, head_dim_v = shape
            raise OallamaError(
                f"the profile has no attention on {device} (wanted: {n_head} heads on {n_head_kv}, K {head_dim_k} and "
                f"V {head_dim_v} wide, cache {type_k}/{type_v}); {self._how_to_add(device)}"
            )
        nearest = min(tables, key=lambda key: attention_distance(key, wanted))
        tokens = {n: linear_from_zero(points, depth) for n, points in tables[nearest].items()}
        exact = nearest == wanted and dict(tables[nearest].get(n_tokens, ())).get(depth) is not None
        seconds = log_log(sorted(tokens.items()), n_tokens) * attention_work(wanted[0]) / attention_work(nearest[0])
        return Estimate(seconds, "measured" if exact else "interpolated" if nearest == wanted else "scaled")

    def fuses(self, device: str, shape: tuple[int, int, int, int], type_k: str = "f16", type_v: str = "f16") -> bool:
        """Whether the device has fused attention for these heads and types: not, if only the other was measured."""
        heads = (device, "ggml", tuple(shape), type_k, type_v)
        forms = [flash for flash in (True, False) if (*heads, flash) in self._attention]
        return forms != [False]

    def attends(self, device: str, shape: tuple[int, int, int, int], type_k: str = "f16", type_v: str = "f16") -> bool:
        """Whether our kernels were measured there for these heads and types."""
        return (device, "oallama", tuple(shape), type_k, type_v, True) in self._attention

    def link_time(self, device: str, direction: str, nbytes: int, memory: str = "pageable") -> float:
        """Seconds to copy `nbytes` from ("d2h") or to ("h2d") `device`.

        Piecewise linear between measured sizes; smaller copies cost the smallest measured one (latency), larger ones
        continue at the last measured bandwidth. The other kind of host memory answers when `memory` was not measured.
        """
        points = self._links.get((device, direction, memory))
        if points is None:
            other = "pinned" if memory == "pageable" else "pageable"
            points = self._links.get((device, direction, other))
        if points is None:
            raise OallamaError(f"the profile has no {direction} link of {device}; {self._how_to_add(device)}")
        return piecewise_linear(points, nbytes)

    def switch_time(self, device: str) -> float | None:
        """Seconds one device change in a graph costs beyond its copies; None when it was not measured."""
        return next((s.median_s for s in self.switches if s.device == device), None)

    def overlap(self, device: str) -> float:
        """Share of the shorter of copies to the device and its computing that hides behind the longer; 0 unmeasured."""
        return next((o.share for o in self.overlaps if o.device == device), 0.0)

    def concurrent(self, device: str) -> float:
        """Share of the shorter of the device's computing and the host's that hides behind the longer; 0 unmeasured."""
        return next((c.share for c in self.concurrency if c.device == device), 0.0)

    def other_op_time(self, device: str, n_tokens: int, width: int) -> float | None:
        """Seconds of one small (non-target) operator on rows of `width` values (n_embd); the nearest width answers.

        None when the profile has no OTHER entry for the device.
        """
        curves = {
            shape[0]: points
            for (d, op, _), shapes in self._curves[""].items()
            if (d, op) == (device, OTHER)
            for shape, points in shapes.items()
        }
        if not curves:
            return None
        nearest = min(curves, key=lambda k: (abs(math.log(k / width)), k))
        return estimate_at(curves[nearest], n_tokens).seconds

    def chain_time(self, device: str, kind: str, type: str, ne: tuple[int, int], n_tokens: int) -> float | None:
        """Seconds of a chain of operators in one graph (see ChainTime), log-log between measured token counts.

        None outside of them and for what was not measured: the chain is then priced by its operators.
        """
        points = self._chains.get((device, kind, type, tuple(ne)), [])
        if not points or not points[0][0] <= n_tokens <= points[-1][0]:
            return None
        return estimate_at(points, n_tokens).seconds

    def shape_time(self, device: str, key: str) -> float | None:
        """Seconds of the operator with this `OpShape.key`; None for what was not measured: a small operator, then."""
        return self._shapes.get((device, key))

    def is_stale(self, fingerprint: Mapping[str, Any]) -> list[str]:
        """What differs from `fingerprint`, one readable line each; empty when the profile still holds."""
        keys = sorted({*self.fingerprint, *fingerprint})
        return [
            f"{key}: profile has {self.fingerprint.get(key, 'nothing')}, this machine {fingerprint.get(key, 'nothing')}"
            for key in keys
            if self.fingerprint.get(key) != fingerprint.get(key)
        ]

    def remarks(self, devices: Collection[str]) -> list[str]:
        """The notes on these devices as readable lines, equal ones together.

        >>> profile.remarks(["CUDA0"])
        ['CUDA0: not measured, it needs 3072 MiB of memory, 2048 MiB can be used (attention n=512 depth=16384 unfused)']
        """
        tasks: dict[tuple[str, str], list[str]] = defaultdict(list)
        for note in self.notes:
            if note.device in devices:
                tasks[note.device, note.text].append(note.task)
        return [f"{device}: {text} ({_some(names)})" for (device, text), names in tasks.items()]

    def _how_to_add(self, device: str) -> str:
        """The command that adds what a look-up missed."""
        if self.source == "datasheet":
            return "compute it for this model with `oallama profile MODEL.gguf --datasheet NAME -o PROFILE.json`"
        if failed := self.remarks([device]):
            return "the profiler noted: " + "; ".join(failed)
        return f"measure it with `oallama profile MODEL.gguf --device {device}`"

    def scaled(self, ratios: Mapping[str, float]) -> Profile:
        """The same profile with every time of a device multiplied by its ratio; devices not named keep theirs."""
        return self.corrected({f"{device} {kind}": ratio for device, ratio in ratios.items() for kind in KINDS})

    def corrected(self, factors: Mapping[str, float]) -> Profile:
        """The same profile with times multiplied by kind of work: {"CPU matrices": 1.2}; kinds as in KINDS."""

        def times(entries: tuple[Timed, ...]) -> tuple[Timed, ...]:
            return tuple(
                replace(e, median_s=e.median_s * factors.get(f"{e.device} {kind_of(e)}", 1.0)) for e in entries
            )

        return replace(
            self,
            operators=times(self.operators),
            attention=times(self.attention),
            chains=times(self.chains),
            shapes=times(self.shapes),
            links=times(self.links),
            switches=times(self.switches),
        )

    # ---- indexes (built once, at the first look-up) ---------------------------------------------------------------

    @cached_property
    def _realised(self) -> dict[str, Curves]:
        index: dict[str, dict[tuple[str, str, str], dict[Shape, dict[int, float]]]]
        index = {r: defaultdict(lambda: defaultdict(dict)) for r in REALISATIONS}
        for e in self.operators:
            index[e.realisation][e.device, e.op, e.type][_shape(e.ne, e.n_used)][e.n_tokens] = e.median_s
        return {
            r: {key: {s: sorted(c.items()) for s, c in shapes.items()} for key, shapes in found.items()}
            for r, found in index.items()
        }

    @cached_property
    def _thin(self) -> frozenset[tuple[str, str, str]]:
        """(device, operator, type) whose tiled weights were measured with few tokens."""
        tiled = [e for e in self.operators if e.realisation == "tiled"]
        few = [e for e in tiled if not is_tiled(e.n_tokens, *_shape(e.ne, e.n_used)[2:])]
        return frozenset((e.device, e.op, e.type) for e in few)

    @cached_property
    def _curves(self) -> dict[str, Curves]:
        """By the realisation preferred; "" is what llama.cpp takes without accelerators: repacked where it can be."""
        plain = ("repacked", "", "plain")
        usual = tuple(reversed(plain))
        orders = {"": usual, "plain": plain, "repacked": usual, "tiled": (*plain, "tiled")}
        return {name: _merged(self._realised, order) for name, order in orders.items()}

    @cached_property
    def _attention(self) -> dict[tuple[str, str, Shape, str, str, bool], dict[int, list[tuple[int, float]]]]:
        index: dict[tuple[str, str, Shape, str, str, bool], dict[int, dict[int, float]]]
        index = defaultdict(lambda: defaultdict(dict))
        for e in self.attention:
            shape = (e.n_head, e.n_head_kv, e.head_dim_k, e.head_dim_v)
            index[e.device, e.kernel, shape, e.type_k, e.type_v, e.flash][e.n_tokens][e.depth] = e.median_s
        return {key: {n: sorted(p.items()) for n, p in tables.items()} for key, tables in index.items()}

    @cached_property
    def _chains(self) -> dict[tuple[str, str, str, tuple[int, ...]], list[tuple[int, float]]]:
        index: dict[tuple[str, str, str, tuple[int, ...]], dict[int, float]] = defaultdict(dict)
        for e in self.chains:
            index[e.device, e.kind, e.type, tuple(e.ne)][e.n_tokens] = e.median_s
        return {key: sorted(points.items()) for key, points in index.items()}

    @cached_property
    def _shapes(self) -> dict[tuple[str, str], float]:
        return {(e.device, e.shape): e.median_s for e in self.shapes}

    @cached_property
    def _links(self) -> dict[tuple[str, str, str], list[tuple[int, float]]]:
        index: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
        for e in self.links:
            index[e.device, e.direction, e.memory][e.bytes] = e.median_s
        return {key: sorted(points.items()) for key, points in index.items()}

    # ---- file -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile aside, then rename. Raises OallamaError when the path cannot be written."""
        write_text_atomic(path, json.dumps(asdict(self), indent=1) + "\n", "profile")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile: a path, or the name of a recorded one that comes with oallama (`RECORDED`).

        Raises OallamaError when it is missing, corrupt or of another version, and for what no machine can have: a
        device listed twice or not at all, a time that is not above zero and finite (a device change may cost nothing),
        a size below one.
        """
        path = find(path, RECORDED, "recorded profile")
        content = read_json_object(path, "profile", REMEDY)
        if content.get("schema") != SCHEMA:
            raise OallamaError(f"profile {path} has schema {content.get('schema')!r}, expected {SCHEMA!r}; {REMEDY}")
        try:
            profile = cls(
                created=content["created"],
                fingerprint=dict(content["fingerprint"]),
                devices=entries(DeviceInfo, "devices", content["devices"]),
                operators=entries(OperatorTime, "operators", content.get("operators", ())),
                attention=entries(AttentionTime, "attention", content.get("attention", ())),
                links=entries(LinkTime, "links", content.get("links", ())),
                switches=entries(SwitchTime, "switches", content.get("switches", ())),
                overlaps=entries(Overlap, "overlaps", content.get("overlaps", ())),
                concurrency=entries(Concurrency, "concurrency", content.get("concurrency", ())),
                chains=entries(ChainTime, "chains", content.get("chains", ())),
                shapes=entries(ShapeTime, "shapes", content.get("shapes", ())),
                source=content.get("source", "measured"),
                notes=entries(Note, "notes", content.get("notes", ())),
                loads=entries(OtherLoad, "loads", content.get("loads", ())),
            )
            if profile.source not in SOURCES:
                raise ValueError(f"source is {profile.source!r}, expected one of {', '.join(SOURCES)}")
            check_profile(profile)
        except (KeyError, TypeError, ValueError) as e:
            raise OallamaError(f"profile {path} is not a valid {SCHEMA} ({e}); correct the entry or {REMEDY}") from None
        return profile


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _merged(realised: Mapping[str, Curves], order: Sequence[str]) -> Curves:
    """One curve per shape, of the last realisation in `order` that has it."""
    merged: Curves = defaultdict(dict)
    for realisation in order:
        for key, shapes in realised[realisation].items():
            merged[key].update(shapes)
    return dict(merged)
