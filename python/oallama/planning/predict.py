"""TTFT and TPOT of a placement: the whole graph followed in execution order, one stage after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from ..errors import OallamaError
from .cost import CostModel, StageCosts, Workload
from .operators import AttentionShape
from .stage import Ids, Placement

# Bytes per value of the KV cache types llama.cpp offers (block bytes / block values).
_CACHE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32,
    "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip


@dataclass(frozen=True)
class StageSeconds:
    """Where the seconds of one stage go. `other` are the small operators, 0 when the profile has no time for them."""

    targets: float
    attention: float
    transfers: float
    switches: float
    other: float

    @property
    def total(self) -> float:
        return self.targets + self.attention + self.transfers + self.switches + self.other


class Predictor:
    """Predicts seconds of placements under one cost model; caches what does not depend on the placement."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.width = costs.graph.operators(costs.decode_tier)[0].ne[0]  # n_embd: the first operator embeds the tokens
        self._attention_s = cache(self._attention_seconds)

    def stage(self, placement: Placement, n_tokens: int, depth: int, logits: bool = True) -> StageSeconds:
        """Seconds of one forward pass over `n_tokens` tokens, the last of which sees `depth` positions.

        A result is copied once to a device that reads it, however many operators do. Copying logits to the host counts.
        `logits` is False for all but the last micro-batch of a prompt.
        """
        costs, at = self.costs, self.costs.stage(n_tokens)
        graph = at.graph
        ids = graph.assign(placement, at.tokens)
        runs = ~graph.is_output if not logits else np.ones(len(ids), dtype=bool)

        lives = np.zeros(len(ids), dtype=np.int8)
        is_target = graph.target >= 0
        lives[is_target] = placement.targets[graph.target[is_target]]
        moved = (ids > 0) & (lives == 0)
        seconds = np.where(ids > 0, np.where(moved, at.upload, at.device), at.host)
        targets = float(seconds[is_target & runs].sum())

        crossing = (ids[graph.producer] != ids[graph.consumer]) & runs[graph.consumer]
        copies = np.unique(graph.producer[crossing] * 2 + ids[graph.consumer[crossing]])
        transfers = float(np.where(copies % 2 == 1, at.to_device[copies // 2], at.to_host[copies // 2]).sum())
        transfers += float(at.to_host[graph.is_output & runs & (ids > 0)].sum())
        transfers += self._small_uploads(placement, at, ids)

        changes = int((np.diff(ids[runs]) != 0).sum())
        attention = 0.0
        for op in np.flatnonzero(graph.attention_layer >= 0):
            layer = int(graph.attention_layer[op])
            shape = costs.graph.attention[layer]
            if shape is not None:
                attention += self._attention_s(bool(ids[op]), shape, n_tokens, max(depth, 1))
                if ids[op] != placement.layers[layer]:
                    transfers += costs.link_s("h2d" if ids[op] else "d2h", self._cache_bytes(shape, depth))
        return StageSeconds(targets, attention, transfers, changes * costs.switch_s, self._others(at, ids))

    def ttft(self, placement: Placement, n_prompt: int) -> float:
        """Seconds to the first token of an `n_prompt`-token prompt, prefilled in micro-batches."""
        chunks = Workload(n_prompt, 1).chunks(self.costs.context.n_ubatch)
        last = len(chunks) - 1
        return sum(self.stage(placement, n, depth, logits=i == last).total for i, (n, depth) in enumerate(chunks))

    def tpot(self, placement: Placement, depth: int) -> float:
        """Seconds per output token with `depth` tokens in the KV cache."""
        return self.stage(placement, 1, depth).total

    def request(self, placement: Placement, workload: Workload) -> float:
        """Seconds of one request: TTFT plus TPOT, at the middle of the answer, for every token after the first."""
        middle = workload.n_prompt + workload.n_generate // 2
        return self.ttft(placement, workload.n_prompt) + max(0, workload.n_generate - 1) * self.tpot(placement, middle)

    def notes(self) -> tuple[str, ...]:
        """What the predictions leave out or derive, for the reader of a plan."""
        costs, sources = self.costs, self.costs.sources
        notes = []
        if derived := sources["interpolated"] + sources["scaled"]:
            notes.append(
                f"{derived} of the {sources.total()} operator times used were not measured at their token count or "
                f"shape ({sources['interpolated']} interpolated, {sources['scaled']} scaled)"
            )
        used = [name for name in (costs.device_name, costs.host_name) if name]
        if any(costs.profile.other_op_time(name, 1, self.width) is None for name in used):
            notes.append("small operators (norms, additions, rope) are neglected: the profile has no time for them")
        if costs.device_name and costs.profile.switch_time(costs.device_name) is None:
            notes.append("the cost of a device change beyond its copies is neglected: the profile has none")
        return tuple(notes)

    def _attention_seconds(self, on_device: bool, shape: AttentionShape, n_tokens: int, depth: int) -> float:
        costs = self.costs
        name = costs.device_name if on_device else costs.host_name
        if name is None:
            raise OallamaError("this placement uses a device, but the costs were made without one")
        types = costs.context.type_k, costs.context.type_v
        return costs.profile.attention_time(name, shape, n_tokens, depth, *types).seconds

    def _cache_bytes(self, shape: AttentionShape, depth: int) -> float:
        context = self.costs.context
        per_k, per_v = (_CACHE_BYTES.get(kind, 2.0) for kind in (context.type_k, context.type_v))
        return depth * shape.n_head_kv * (shape.head_dim_k * per_k + shape.head_dim_v * per_v)

    def _small_uploads(self, placement: Placement, at: StageCosts, ids: Ids) -> float:
        """Small weights on the host whose operator the scheduler sent to the device (large batches only)."""
        small = at.graph.small
        moved = (small >= 0) & (ids > 0)
        moved[moved] = placement.small[small[moved]] == 0
        return float(at.small_upload[small[moved]].sum())

    def _others(self, at: StageCosts, ids: Ids) -> float:
        is_other = (at.graph.target < 0) & (at.graph.attention_layer < 0)
        seconds = 0.0
        for side, name in enumerate((self.costs.host_name, self.costs.device_name)):
            if name and (count := int((is_other & (ids == side)).sum())):
                seconds += count * (self.costs.profile.other_op_time(name, at.n_tokens, self.width) or 0.0)
        return seconds
