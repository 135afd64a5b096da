"""How far a profile is off for each kind of operator: its times beside those of a loaded model's own graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..data.operators import OUTPUT, TARGET_OPS, TOKEN_EMBEDDING, OperatorGraph
from ..data.predicted import error_percent
from ..tracing.operator_times import TimedOperator
from .cost import CostModel
from .operator_kinds import SMALL, OperatorKind, operator_kinds, shape_of

_FUSED, _UNFUSED = "attention fused", "attention unfused"


@dataclass(frozen=True)
class InPlace:
    """A kind of operator on one device in one pass: seconds of all of them by the profile, and in the model's graph."""

    kind: str
    type: str
    device: str
    number: int
    predicted_s: float | None
    measured_s: float

    @property
    def error_percent(self) -> float | None:
        """Positive: the profile says too much. None for what was not profiled."""
        return error_percent(self.predicted_s, self.measured_s)


def compare_in_place(
    costs: CostModel, timed: Sequence[TimedOperator], n_tokens: int, depth: int, decode: bool
) -> list[InPlace]:
    """Every kind and device that was timed, in the order of `operator_kinds`.

    timed: of one pass over `n_tokens` tokens, the last of which saw `depth` positions.
    """
    kinds = {_key(kind): kind for kind in operator_kinds(costs, n_tokens, decode, (depth,))}
    found: dict[tuple[tuple[str, str, tuple[int, ...]], str], list[float]] = defaultdict(list)
    for operator in timed:
        found[_kind(costs.graph, operator), operator.device].append(operator.seconds)
    order = [*kinds]
    return [
        InPlace(key[0], key[1], device, len(seconds), _predicted(kinds.get(key), device, len(seconds)), sum(seconds))
        for (key, device), seconds in sorted(
            found.items(), key=lambda item: order.index(item[0][0]) if item[0][0] in kinds else len(order)
        )
    ]


def _predicted(kind: OperatorKind | None, device: str, number: int) -> float | None:
    """Of as many operators as ran there. Attention is one operator a layer, however many were timed for it."""
    if kind is None or device not in kind.seconds:
        return None
    share = number / kind.number if kind.type else 1.0
    return kind.seconds[device] * share


def _key(kind: OperatorKind) -> tuple[str, str, tuple[int, ...]]:
    return kind.kind.partition(",")[0], kind.type, kind.ne


def _kind(graph: OperatorGraph, operator: TimedOperator) -> tuple[str, str, tuple[int, ...]]:
    name = OUTPUT if graph.tied_output and operator.operand == TOKEN_EMBEDDING else operator.operand
    multiplies = operator.op in TARGET_OPS
    if multiplies and name in graph.tensor:
        tensor = graph.tensor[name]
        return tensor.kind, tensor.type, shape_of(tensor)
    if operator.op == "FLASH_ATTN_EXT":
        return _FUSED, "", ()
    return (_UNFUSED if multiplies or operator.op == "SOFT_MAX" else SMALL), "", ()
