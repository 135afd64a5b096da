"""Divided weights: which may be divided, in what steps, and what computing them on both sides takes.

A weight that is divided lives on the host; its first values (rows, or columns of a feed-forward's last matrix) also
live on the first accelerator, and both compute their part of its operators at once (csrc/segments/segments.h). A
`DividedGroup` is what shares one fraction: the matrices of one feed-forward, or the output matrix alone.

In `Homes` a divided group counts as resident on the accelerator, where its result arrives, with

    seconds = a + b - concurrency * min(a, b) + moving the input to the host and the host's result back
    a = fraction * seconds on the accelerator        b = (1 - fraction) * seconds on the host

A mixture's feed-forward may be divided by experts instead: the accelerator has the most used ones, or those of its
slots. Then the fraction is what they compute, which differs from token to token: the mean of the seconds counts
(expert_use.py). Experts that enter slots are copied beside the computing: what takes longer than it does counts, and
of the rest what the profile says that copies do not hide. What the host reads of a mapped file for them counts in full.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..data.operators import OUTPUT, Operator
from ..data.plan import is_divided_by_columns
from .cost import CostModel, Floats, StageCosts
from .expert_use import ExpertUse
from .stage import STREAMER, Division, Homes, Ints, Mask

# What the engine can compute on both sides between the first matrices of a feed-forward and its last.
_BETWEEN = frozenset({"GLU", "UNARY", "SQR", "SCALE", "CLAMP", "ADD", "ADD_ID", "MUL", "DIV"})
_OUTPUT_STEP = 32  # rows
_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class DividedGroup:
    """Targets (positions in CostModel.targets) that are divided together.

    width: values along the divided axis. step: a part on the accelerator is a multiple of it (quantisation blocks).
    nbytes: of all of its weights. n_used: experts that a token chooses, where values are experts; else 0. layer: its
    number, -1 for the output matrix.
    """

    targets: tuple[int, ...]
    width: int
    step: int
    nbytes: int
    n_used: int = 0
    layer: int = -1

    def values(self, share: float) -> int:
        """Values of a share, rounded down to a step: one step at least, all but one at most."""
        return min(max(1, int(share * self.width / self.step)) * self.step, self.width - self.step)


@dataclass(frozen=True)
class Extra:
    """Seconds that computing in two parts adds to computing on the accelerator."""

    targets: float
    transfers: float
    switches: float


def groups(costs: CostModel, by_experts: bool = False) -> tuple[DividedGroup, ...]:
    """Every feed-forward that the engine can divide, in the order of the layers, then the output matrix.

    by_experts: a mixture's by its experts.

    Left out are those with other operators between their matrices (the engine keeps them whole), or whose matrices do
    not have one inner width, and an output matrix that is the token embedding, too.
    """
    graph = costs.graph
    position = {name: i for i, name in enumerate(costs.targets)}
    found = []
    operators = graph.operators(costs.decode_tier)
    for op in operators:
        if not op.is_target or op.weight is None:
            continue
        tensor = graph.tensor[op.weight]
        if is_divided_by_columns(op.weight):
            names = _first_matrices(op, operators)
            if names and by_experts and op.op == "MUL_MAT_ID":
                found.append(_group(costs, (*names, op.weight), position, tensor.ne[2], 1, op.n_used))
            elif names and all(graph.tensor[n].ne[1] == tensor.ne[0] for n in names):
                block = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type.upper()]][0]
                found.append(_group(costs, (*names, op.weight), position, tensor.ne[0], int(block)))
        elif op.weight == OUTPUT and not graph.tied_output:
            found.append(_group(costs, (OUTPUT,), position, tensor.ne[1], _OUTPUT_STEP))
    return tuple(group for group in found if group.width > group.step)


def _group(
    costs: CostModel, names: Sequence[str], position: dict[str, int], width: int, step: int, n_used: int = 0
) -> DividedGroup:
    targets = tuple(position[name] for name in names)
    block = _BLOCK.match(names[0])
    nbytes = sum(int(costs.nbytes[t]) for t in targets)
    return DividedGroup(targets, width, step, nbytes, n_used, int(block[1]) if block else -1)


def _first_matrices(down: Operator, operators: Sequence[Operator]) -> tuple[str, ...]:
    """Names of the matrices whose results, through operators on single values, are all that `down` multiplies with."""
    names: list[str] = []
    # The second operand of MUL_MAT_ID is followed by the choice of experts, which both sides read.
    waiting = [operators[p] for p in down.producers[:1]]
    while waiting:
        op = waiting.pop()
        if op.is_target and op.weight and not is_divided_by_columns(op.weight):
            names.append(op.weight)
        elif op.op in _BETWEEN:
            # The bias of an expert is chosen by what ADD_ID's last producer says, too.
            waiting += [operators[p] for p in (op.producers[:1] if op.op == "ADD_ID" else op.producers)]
        elif op.op != "GET_ROWS":  # the scale of an expert
            return ()
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class _Whole:
    """Seconds of each group as a whole in one stage: (groups,) arrays.

    ops, group: its operators and which group each belongs to. first: a group's first operator, -1 where none of it
    runs. down: its input to the host. up: its result to the accelerator.
    """

    ops: Ints
    group: Ints
    first: Ints
    device: Floats
    down: Floats
    up: Floats
    is_output: Mask
    reading: Sequence[tuple[float, float]]


class DividedCosts:
    """What divided groups add to the seconds of a stage. of_target: group of each target that is in one."""

    def __init__(self, costs: CostModel, division: Division = "values") -> None:
        self.costs, self.division = costs, division
        self.groups = groups(costs, by_experts=division in ("experts", "slots"))
        self.of_target = {t: g for g, group in enumerate(self.groups) for t in group.targets}
        self._lead = np.array([group.targets[0] for group in self.groups], dtype=np.intp)
        self._width = np.array([group.width for group in self.groups], dtype=np.float64)
        self._stages: dict[tuple[int, int], _Whole] = {}

    def of(self, homes: Homes, at: StageCosts, divided: Mask) -> Extra:
        """Of one forward pass; `divided`: per operator, whether it computes its weight in two parts."""
        assert homes.split is not None
        whole, costs = self._whole(at), self.costs
        active = (whole.first >= 0) & divided[whole.first]
        share = homes.split[self._lead] / self._width
        host = at.host[costs.realised(homes)[at.graph.target[whole.ops]], whole.ops]
        on_host = np.bincount(whole.group, host, len(self.groups)).astype(np.float64)
        targets = self._longer(whole.device, on_host, share)
        for g, group in enumerate(self.groups):
            if group.n_used and active[g]:
                targets[g] = self._longer_by_experts(at, g, on_host[g], share[g : g + 1])[0]
        moved = self._moved(whole, share)
        return Extra(float(targets[active].sum()), float(moved[active].sum()), self._switches * int(active.sum()))

    def extra(self, at: StageCosts, group: int, share: Floats) -> Floats:
        """Seconds that shares of a group on the accelerator add to the whole group there, with `at`'s host seconds."""
        whole = self._whole(at)
        host = float(at.seconds[0, whole.ops[whole.group == group]].sum())
        if self.groups[group].n_used:
            targets = self._longer_by_experts(at, group, host, share)
        else:
            targets = self._longer(whole.device[group], host, share)
        return targets + self._moved(whole, share, group) + self._switches

    def first(self, at: StageCosts, group: int) -> int:
        """The group's first operator in a stage, -1 where none of it runs."""
        return int(self._whole(at).first[group])

    def balanced(self, at: StageCosts, group: int) -> float:
        """The share at which both sides take equally long; 0 where nothing of the group runs."""
        whole = self._whole(at)
        host, device = float(at.seconds[0, whole.ops[whole.group == group]].sum()), float(whole.device[group])
        share = host / (host + device) if host + device > 0 else 0.0
        if not self.groups[group].n_used:
            return share
        return self._use(group).fewest(share, self._slots) / self.groups[group].width

    @property
    def concurrency(self) -> float:
        return self.costs.profile.concurrent(self.costs.names[STREAMER])

    @property
    def _switches(self) -> float:
        switch = self.costs.switch
        return float(switch[STREAMER, 0] + switch[0, STREAMER])

    def _longer(self, device: Floats, host: Floats | float, share: Floats, host_share: Floats | None = None) -> Floats:
        """Seconds that computing in two parts adds to `device`, the accelerator's for the whole."""
        a, b = share * device, (1 - share if host_share is None else host_share) * host
        hidden = self.concurrency * np.minimum(a, b)
        return np.asarray(a + b - hidden - device)

    def kind(self, group: int) -> int:
        """Groups of one kind, and of equal weights, take equally long for equal shares."""
        use = self.costs.expert_use
        return use.kind_of.get(self.groups[group].layer, 0) if use and self.groups[group].n_used else 0

    def _use(self, group: int) -> ExpertUse:
        assert self.costs.expert_use is not None
        return self.costs.expert_use.of_layer(self.groups[group].layer)

    @property
    def _slots(self) -> bool:
        return self.division == "slots"

    def _longer_by_experts(self, at: StageCosts, g: int, host: float, share: Floats) -> Floats:
        """As `_longer`, the mean over what experts on the accelerator compute; share: of all experts."""
        decode, whole, group = at.graph.tier == self.costs.decode_tier, self._whole(at), self.groups[g]
        device, zeros = float(whole.device[g]), self._multiplies_zeros
        k = np.rint(share * group.width).astype(np.intp)
        use = self._use(g)
        of = use.computed(k, at.n_tokens, decode, self._slots, zeros, whole.reading[g])
        found = (of.likely * self._longer(np.array(device), host, of.device, of.host)).sum(axis=1)
        if not decode:
            return found
        uploads = use.held(self._slots).uploads[k] * at.n_tokens
        copy, read = self._upload_s(group.nbytes / group.width)
        copies = uploads * copy
        hidden = self.costs.overlap * np.minimum(copies, device + found)
        return np.asarray(found + copies - hidden + uploads * read)

    def _upload_s(self, nbytes: float) -> tuple[float, float]:
        """Seconds that the link and the host take for an expert that enters a slot.

        The host reads those of a mapped file into pinned memory. That takes a CPU from the threads that compute, who
        wait for each other, so nothing hides it.
        """
        copy = self.costs.link_s(STREAMER, "h2d", nbytes)
        return copy, max(0.0, self.costs.link_s(STREAMER, "h2d", nbytes, self.costs.uploaded_from) - copy)

    @property
    def _multiplies_zeros(self) -> bool:
        """Whether the accelerator multiplies with the expert of zeros: our kernels behind RPC alone skip it."""
        return not self.costs.profile.device(self.costs.names[STREAMER]).backend.startswith("RPC")

    def _moved(self, whole: _Whole, share: Floats, group: int | slice = slice(None)) -> Floats:
        """Seconds of the copies: of the output matrix the host's rows alone come back."""
        back = np.where(whole.is_output[group], 1 - share, 1.0)
        return np.asarray(whole.down[group] + whole.up[group] * back)

    def _whole(self, at: StageCosts) -> _Whole:
        key = (at.n_tokens, at.graph.tier)
        if key not in self._stages:
            n = len(self.groups)
            first: Ints = np.full(n, -1, dtype=np.intp)
            device, down, up = (np.zeros(n) for _ in range(3))
            ops = [op for op, t in enumerate(at.graph.target.tolist()) if t in self.of_target]
            group = [self.of_target[int(at.graph.target[op])] for op in ops]
            for op, g in zip(ops, group, strict=True):
                if first[g] < 0:
                    first[g] = op
                    producers = at.graph.operators[op].producers
                    down[g] = at.move[STREAMER, 0, producers[0]] if producers else 0.0
                device[g] += at.seconds[STREAMER, op]
                up[g] = at.move[0, STREAMER, op]
                if n_used := self.groups[g].n_used:  # the sum over a token's experts; choices and weights go, too
                    up[g] = self.costs.move_s(0, STREAMER, at.graph.bytes_out(at.n_tokens)[op] / n_used)
                    if op == first[g]:
                        down[g] += 2 * self.costs.move_s(STREAMER, 0, 4 * n_used * at.n_tokens)
            is_output = at.graph.is_output[first] & (first >= 0)
            reading = [self._reading(at, group, op) for group, op in zip(self.groups, first.tolist(), strict=True)]
            self._stages[key] = _Whole(np.array(ops), np.array(group), first, device, down, up, is_output, reading)
        return self._stages[key]

    def _reading(self, at: StageCosts, group: DividedGroup, first: int) -> tuple[float, float]:
        """Of a group's first matrix, which stands for all."""
        if first < 0 or not group.n_used:
            return 0.0, 0.0
        costs, op, tokens = self.costs, at.graph.operators[first], int(at.tokens[first])
        tensor = costs.graph.tensor[op.weight or ""]
        device, host = (
            costs.times.reading(costs.names[d], op.op, tensor, tokens, op.n_used, costs.realisation(d, tensor))
            for d in (STREAMER, 0)
        )
        return device, host


def topped_up(tables: DividedCosts, homes: Homes, at: StageCosts, room: int) -> tuple[Homes, int]:
    """The homes with larger parts on the accelerator, as far as `room` bytes go and that takes less time.

    at: the stage that counts. Returns the bytes taken, too.
    """
    if homes.split is None:
        return homes, 0
    split = homes.split.copy()
    inside = [g for g, group in enumerate(tables.groups) if split[group.targets[0]]]
    divided, counts = [tables.groups[g] for g in inside], [int(split[tables.groups[g].targets[0]]) for g in inside]
    most = [tables.groups[g].values(tables.balanced(at, g)) for g in inside]
    raised = top_up(divided, counts, most, room)
    for group, count in zip(divided, raised, strict=True):
        split[list(group.targets)] = count
    taken = sum(bytes_of(g, n) - bytes_of(g, old) for g, n, old in zip(divided, raised, counts, strict=True))
    return replace(homes, split=split), taken


def shares_of(tables: DividedCosts, homes: Homes) -> list[float]:
    """The different shares of divided groups on the accelerator, rounded."""
    if homes.split is None:
        return []
    return sorted({round(int(homes.split[g.targets[0]]) / g.width, 3) for g in tables.groups} - {0.0})


def top_up(groups: Sequence[DividedGroup], counts: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Counts of divided groups raised, evenly, up to `most` of each, by what `room` bytes hold.

    Then the first ones get a step more than the others, until the last step that fits.
    """
    found = list(counts)
    missing = sum(bytes_of(g, m) - bytes_of(g, n) for g, n, m in zip(groups, counts, most, strict=True) if m > n)
    if missing <= 0:
        return found
    part = min(1.0, room / missing)
    for i, (group, count, end) in enumerate(zip(groups, counts, most, strict=True)):
        found[i] = count + int(part * max(0, end - count) / group.step) * group.step
        room -= bytes_of(group, found[i]) - bytes_of(group, count)
    for i, (group, end) in enumerate(zip(groups, most, strict=True)):
        more = bytes_of(group, found[i] + group.step) - bytes_of(group, found[i])
        if found[i] + group.step <= end and more <= room:
            found[i] += group.step
            room -= more
    return found


def bytes_of(group: DividedGroup, count: int) -> int:
    """Bytes of `count` of a group's values; experts have one of zeros beside them."""
    return -(-group.nbytes * (count + bool(group.n_used)) // group.width)
