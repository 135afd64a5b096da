"""Every operator of a stage with its seconds: what weave plans and pipelines are made from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..data.operators import Operator
from .cost import CostModel

# Rows of a weight, and of a batch's attention, that ggml-cpu computes at once, at most.
WEIGHT_ROWS, ATTENTION_ROWS = 16, 64


@dataclass(frozen=True)
class OperatorCost:
    """An operator of a stage on a device. kind: of its weight, "attention", or ggml's name of it.

    n_groups: of rows that ggml-cpu computes one after another, of the weight or of attention's tokens and heads.
    multiply_adds: of all of them; 0 where nothing is multiplied with a weight or a cache.
    """

    op: Operator
    kind: str
    seconds: float
    n_groups: int
    multiply_adds: int


def operator_costs(costs: CostModel, n_tokens: int, depth: int, *, decode: bool, device: int = 0) -> list[OperatorCost]:
    """Every operator of a stage on one device, in execution order.

    depth: positions in the cache before it. decode: n_tokens sequences get a token each, else one gets them all.
    What an accelerator computes in one piece has its seconds at the last of its operators, and none before.
    """
    at = costs.stage(n_tokens, decode)
    found = []
    for op in at.graph.operators:
        il = int(at.graph.attention_layer[op.index])
        if op.is_target:
            weight, tokens = costs.graph.tensor[op.weight or ""], int(at.tokens[op.index])
            work = weight.ne[0] * weight.ne[1] * tokens * op.n_used
            made = OperatorCost(op, weight.kind, float(at.seconds[device, op.index]), weight.ne[1] // WEIGHT_ROWS, work)
        elif il >= 0 and (shape := costs.graph.attention[il]) is not None:
            one, times = (1, n_tokens) if decode else (n_tokens, 1)
            seconds = times * float(costs.attention_s(shape, one, depth + one)[device])
            rows = n_tokens * shape.n_head
            work = rows * (depth + one) * (shape.head_dim_k + shape.head_dim_v)
            groups = rows // ATTENTION_ROWS if one >= ATTENTION_ROWS else rows
            made = OperatorCost(op, "attention", seconds, groups, work)
        else:
            made = OperatorCost(op, op.op.lower(), float(at.other[device, op.index]), 1, 0)
        found.append(made)
    for fusion in at.fusions if device else ():
        for ops, gain in zip(fusion.ops.tolist(), fusion.gain[:, device].tolist(), strict=True):
            together = max(0.0, gain + sum(found[i].seconds for i in ops))
            for i in ops:
                found[i] = replace(found[i], seconds=together if i == ops[-1] else 0.0)
    return found
