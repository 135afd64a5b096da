"""What each kind of operator takes on every device, and what a byte of it saves there: Table 1 and Figures 2 and 3 of
the OATO paper (docs/sources.md, 1), from a profile.

A kind is all operators with weights of one name, type and shape, attention of one form at one depth (fused also by our
kernels, where they were measured), or all small operators together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from ..data.entries import padded_rows
from ..data.operators import AttentionShape, TensorInfo
from ..profiling.roofline import CACHE_BYTES
from .cost import CostModel, StageCosts
from .oato import normalised

SMALL, IN_ONE_PIECE = "small operators", "less in one piece"
DEPTHS = (1024, 4096, 16384)
# Name, whether fused, kernel on CPUs.
_FORMS = (("fused", True, "ggml"), ("oallama", True, "oallama"), ("unfused", False, "ggml"))


@dataclass(frozen=True)
class OperatorKind:
    """All operators of one kind in one pass.

    kind: of the weights ("ffn_up"), "attention fused, 1024" (positions; "oallama" for fused by our kernels, on devices
    that lack them by the device's own; "unfused"), "small operators", or "less in one piece":
    what devices save that compute chains of operators at once, as negative seconds. type, ne: of the weights; "" and ()
    of other kinds. nbytes: of all weights, or of what all layers have in their KV caches. seconds: by device, of all of
    them together; devices on which it was not measured are left out. saved: seconds per 1e9 bytes moved to the first
    accelerator. affinity: OATO's, 0 to 1, before transfers are counted. None: there is nothing to move, or to move to.
    """

    kind: str
    type: str
    ne: tuple[int, ...]
    number: int
    nbytes: int
    seconds: Mapping[str, float]
    saved: float | None = None
    affinity: float | None = None


def operator_kinds(
    costs: CostModel, n_tokens: int, decode: bool = False, depths: Sequence[int] = DEPTHS
) -> list[OperatorKind]:
    """Every kind of operator of one pass: weights in the order of the model, attention, then the small ones.

    n_tokens: of a prompt's micro-batch, or with `decode` the sequences that get a token each. depths: positions that
    attention sees, the pass included; those outside of the context are left out, and without any it is the context.
    """
    at = costs.stage(n_tokens, decode)
    possible = [depth for depth in depths if n_tokens <= depth <= costs.context.n_ctx] or [costs.context.n_ctx]
    found = _targets(costs, at)
    for form, depth in product(_FORMS, possible):
        found += _attention(costs, at, *form, depth)
    rest = [op.index for op in at.graph.operators if not op.is_target and at.graph.attention_layer[op.index] < 0]
    seconds = _by_device(costs, at.other[:, rest].sum(axis=1).tolist())
    found.append(OperatorKind(SMALL, "", (), len(rest), 0, seconds))
    if at.fusions:
        gains = np.sum([fusion.gain.sum(axis=0) for fusion in at.fusions], axis=0)
        chains = sum(len(fusion.ops) for fusion in at.fusions)
        found.append(OperatorKind(IN_ONE_PIECE, "", (), chains, 0, _by_device(costs, gains.tolist())))
    return found


def _targets(costs: CostModel, at: StageCosts) -> list[OperatorKind]:
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for op in at.graph.operators:
        if op.is_target:
            tensor = costs.graph.tensor[op.weight or ""]
            groups[tensor.kind, tensor.type, shape_of(tensor)].append(op.index)
    kinds = []
    for (kind, type, ne), ops in groups.items():
        weights = {at.graph.operators[i].weight or "" for i in ops}  # one may be read twice
        nbytes = sum(costs.graph.tensor[name].nbytes for name in weights)
        seconds = _by_device(costs, at.seconds[:, ops].sum(axis=1).tolist())
        kinds.append(OperatorKind(kind, type, ne, len(ops), nbytes, seconds, _saved(costs, seconds, nbytes)))
    if len(costs.names) < 2:
        return kinds
    affinities = normalised(np.array([kind.saved for kind in kinds]))
    return [replace(kind, affinity=g) for kind, g in zip(kinds, affinities.tolist(), strict=True)]


def _attention(costs: CostModel, at: StageCosts, form: str, flash: bool, kernel: str, depth: int) -> list[OperatorKind]:
    """Of all layers; nothing where no device has times of this form and kernel."""
    shapes = [shape for shape in costs.graph.attention if shape is not None]
    one, times = (1, at.n_tokens) if at.graph.tier == costs.decode_tier else (at.n_tokens, 1)
    types = costs.context.type_k, costs.context.type_v
    known = {
        (e.device, AttentionShape(e.n_head, e.n_head_kv, e.head_dim_k, e.head_dim_v))
        for e in costs.profile.attention
        if (e.flash, e.type_k, e.type_v) == (flash, *types)
    }
    devices = [name for name in costs.names if all((name, shape) in known for shape in shapes)]
    of_kernel = {e.device for e in costs.profile.attention if e.kernel == kernel and e.flash == flash}
    if not shapes or not of_kernel & {*devices}:
        return []
    rows = depth if flash else padded_rows(depth)
    seconds = {
        name: times
        * sum(costs.profile.attention_time(name, s, one, rows, *types, flash, kernel).seconds for s in shapes)
        for name in devices
    }
    k, v = (CACHE_BYTES[type] for type in types)
    values = sum(s.n_head_kv * (s.head_dim_k * k + s.head_dim_v * v) for s in shapes)
    nbytes = round(times * depth * values)
    return [
        OperatorKind(f"attention {form}, {depth}", "", (), len(shapes), nbytes, seconds, _saved(costs, seconds, nbytes))
    ]


def _saved(costs: CostModel, seconds: Mapping[str, float], nbytes: int) -> float | None:
    if len(costs.names) < 2 or any(name not in seconds for name in costs.names[:2]):
        return None
    host, first = costs.names[:2]
    return 1e9 * (seconds[host] - seconds[first]) / nbytes


def _by_device(costs: CostModel, seconds: Sequence[float]) -> dict[str, float]:
    return dict(zip(costs.names, seconds, strict=True))


def shape_of(tensor: TensorInfo) -> tuple[int, ...]:
    """(k, m) of a matrix, (k, m, n) of n of them."""
    return tensor.ne[:3] if len(tensor.ne) > 2 and tensor.ne[2] > 1 else tensor.ne[:2]
