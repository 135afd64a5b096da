"""TTFT and TPOT of a placement: the whole graph followed in execution order, one stage after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..data.plan import HOST
from ..data.workload import Workload
from .block import Block, StageSeconds
from .cost import CostModel
from .divided import DividedCosts
from .stage import Homes


class Predictor:
    """Predicts seconds of placements under one cost model; caches what does not depend on the placement."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._blocks: dict[tuple[int, bool, bool], Block] = {}
        self._divided = DividedCosts(costs)

    def stage(self, homes: Homes, n_tokens: int, depth: int, logits: bool = True, decode: bool = False) -> StageSeconds:
        """Seconds of one forward pass over `n_tokens` tokens, the last of which sees `depth` positions.

        Copying logits to the host counts. `logits` is False for all but the last micro-batch of a prompt.
        """
        block = self._block(n_tokens, logits, decode)
        at, graph = block.at, block.at.graph
        ids = graph.assign(homes, at.tokens, self.costs.uploader)
        lives = ids.copy()
        lives[block.target] = homes.targets[graph.target[block.target]]
        lives[block.small] = homes.small[graph.small[block.small]]
        divided = np.zeros(len(ids), dtype=bool)
        divided[block.target] = homes.divided(graph.target[block.target], at.tokens[block.target], self.costs.uploader)
        uploaded = (ids > 0) & (lives == 0) & ~divided
        streamed = np.zeros(len(ids), dtype=bool)
        streamed[block.target] = homes.streamed(graph.target[block.target], at.tokens[block.target])
        realised = self.costs.realised(homes)[graph.target[block.target]]
        caches = (homes.layers == 0)[None, :] if homes.stream_caches else None
        seconds = block.seconds(
            self.costs,
            ids[None, :],
            (uploaded & ~streamed)[None, :],
            depth,
            None,
            streamed=streamed[None, :] if streamed.any() else None,
            stream_caches=caches,
            host=at.host[realised, block.target],
        )
        if not divided.any():
            return seconds
        extra = self._divided.of(homes, at, divided)
        return replace(
            seconds,
            targets=seconds.targets + extra.targets,
            transfers=seconds.transfers + extra.transfers,
            switches=seconds.switches + extra.switches,
        )

    def _block(self, n_tokens: int, logits: bool, decode: bool) -> Block:
        key = (n_tokens, logits, decode)
        if key not in self._blocks:
            at = self.costs.stage(n_tokens, decode)
            self._blocks[key] = Block(at, 0, len(at.graph.operators), logits)
        return self._blocks[key]

    def ttft(self, homes: Homes, n_prompt: int, depth: int = 0) -> float:
        """Seconds to the first token of an `n_prompt`-token prompt behind `depth` tokens, in micro-batches."""
        chunks = Workload(n_prompt, 1, depth).chunks(self.costs.context.n_ubatch)
        last = len(chunks) - 1
        return sum(float(self.stage(homes, n, after, logits=i == last).total[0]) for i, (n, after) in enumerate(chunks))

    def tpot(self, homes: Homes, depth: int, n_parallel: int = 1) -> float:
        """Seconds per output token (of each of `n_parallel` sequences) with `depth` tokens in the KV cache."""
        return float(self.stage(homes, n_parallel, depth, decode=True).total[0])

    def request(self, homes: Homes, workload: Workload) -> float:
        """Seconds of one request: TTFT plus TPOT, at the middle of the answer, for every token after the first."""
        ttft = self.ttft(homes, workload.n_prompt, workload.depth)
        return ttft + max(0, workload.n_generate - 1) * self.tpot(homes, workload.middle, workload.n_parallel)

    def notes(self) -> tuple[str, ...]:
        """What the predictions leave out or derive, for the reader of a plan."""
        costs, sources = self.costs, self.costs.sources
        notes = []
        if costs.profile.source != "measured":
            notes.append(f"the times are computed from a {costs.profile.source}, not measured")
        if derived := sources["interpolated"] + sources["scaled"]:
            notes.append(
                f"{derived} of the {sources.total()} operator times used were not measured at their token count or "
                f"shape ({sources['interpolated']} interpolated, {sources['scaled']} scaled)"
            )
        if any(costs.profile.other_op_time(name, 1, costs.width) is None for name in costs.names):
            notes.append("small operators (norms, additions, rope) are neglected: the profile has no time for them")
        if any(name != HOST and costs.profile.switch_time(name) is None for name in costs.names):
            notes.append("the cost of a device change beyond its copies is neglected: the profile has none")
        notes += costs.profile.remarks(costs.names)
        return tuple(notes)
