"""TTFT and TPOT of a placement: the whole graph followed in execution order, one stage after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..data.plan import HOST
from ..data.workload import Workload
from .block import Block, Floats, StageSeconds, Still
from .cost import CostModel
from .divided import DividedCosts, Extra
from .stage import Division, Homes, Ids, Mask

# Placements that are predicted at once; their arrays are a row each.
_ROWS = 32


@dataclass(frozen=True)
class _Stage:
    """Placements in one stage, at no depth yet.

    caches: (placements, layers) whether the cached rows are copied. divided: per placement, what its divided weights
    add; streamed copies do not hide behind it. None: there are none.
    """

    block: Block
    ids: Ids
    still: Still
    caches: Mask | None
    divided: list[Extra] | None

    def at(self, costs: CostModel, depth: int) -> StageSeconds:
        found = self.block.at_depth(costs, self.still, self.ids, depth, stream_caches=self.caches)
        if self.divided is None:
            return found
        targets, transfers, switches = np.array([(e.targets, e.transfers, e.switches) for e in self.divided]).T
        return replace(
            found,
            targets=found.targets + targets,
            transfers=found.transfers + transfers,
            switches=found.switches + switches,
        )


class Predictor:
    """Predicts seconds of placements under one cost model; caches what does not depend on the placement."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._blocks: dict[tuple[int, bool, bool], Block] = {}
        self._divided: dict[Division, DividedCosts] = {}
        # Of the placements that were asked for last: what does not depend on the depth.
        self._last: tuple[Homes, ...] = ()
        self._stages: dict[tuple[int, bool, bool], _Stage] = {}

    def stage(self, homes: Homes, n_tokens: int, depth: int, logits: bool = True, decode: bool = False) -> StageSeconds:
        """Seconds of one forward pass over `n_tokens` tokens, the last of which sees `depth` positions.

        Copying logits to the host counts. `logits` is False for all but the last micro-batch of a prompt.
        """
        return self._of((homes,), n_tokens, logits, decode).at(self.costs, depth)

    def tables(self, division: Division) -> DividedCosts:
        """Of weights that are divided in this way."""
        if division not in self._divided:
            self._divided[division] = DividedCosts(self.costs, division)
        return self._divided[division]

    def _of(self, placements: tuple[Homes, ...], n_tokens: int, logits: bool, decode: bool) -> _Stage:
        if len(placements) != len(self._last) or any(a is not b for a, b in zip(placements, self._last, strict=True)):
            self._last, self._stages = placements, {}
        key = (n_tokens, logits, decode)
        if key not in self._stages:
            self._stages[key] = self._make(placements, self._block(*key))
        return self._stages[key]

    def _make(self, placements: tuple[Homes, ...], block: Block) -> _Stage:
        at, graph, costs = block.at, block.at.graph, self.costs
        targets = graph.target[block.target]
        shape = (len(placements), len(graph.operators))
        ids, lives = np.zeros(shape, dtype=np.int8), np.zeros(shape, dtype=np.int8)
        divided, streamed = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        host = np.zeros((len(placements), len(block.target)))
        for row, homes in enumerate(placements):
            ids[row] = lives[row] = graph.assign(homes, at.tokens, costs.uploader)
            lives[row, block.target] = homes.targets[targets]
            lives[row, block.small] = homes.small[graph.small[block.small]]
            divided[row, block.target] = homes.divided(targets, at.tokens[block.target], costs.uploader)
            streamed[row, block.target] = homes.streamed(targets, at.tokens[block.target])
            host[row] = at.host[costs.realised(homes)[targets], block.target]
        uploaded = (ids > 0) & (lives == 0) & ~divided & ~streamed
        still = block.still(costs, ids, uploaded, None, streamed=streamed if streamed.any() else None, host=host)
        copies = any(homes.stream_caches for homes in placements)
        caches = np.array([(homes.layers == 0) & homes.stream_caches for homes in placements]) if copies else None
        extra = [
            self.tables(homes.division).of(homes, at, row) if row.any() else Extra(0.0, 0.0, 0.0)
            for homes, row in zip(placements, divided, strict=True)
        ]
        return _Stage(block, ids, still, caches, extra if divided.any() else None)

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
        return float(self.requests((homes,), workload)[0])

    def requests(self, placements: Sequence[Homes], workload: Workload) -> Floats:
        """(placements,) seconds of `request` for each of them, many at once."""
        parts = [tuple(placements[i : i + _ROWS]) for i in range(0, len(placements), _ROWS)]
        return np.concatenate([np.zeros(0), *(self._requests(part, workload) for part in parts)])

    def _requests(self, placements: tuple[Homes, ...], workload: Workload) -> Floats:
        chunks = workload.chunks(self.costs.context.n_ubatch)
        seconds = np.zeros(len(placements))
        for i, (n, depth) in enumerate(chunks):
            seconds += self._of(placements, n, i == len(chunks) - 1, False).at(self.costs, depth).total
        steps = max(0, workload.n_generate - 1)
        step = self._of(placements, workload.n_parallel, True, True).at(self.costs, workload.middle)
        return seconds + steps * step.total

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
