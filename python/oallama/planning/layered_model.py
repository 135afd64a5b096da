"""A model as a layered graph: every way to run each layer, with its seconds and bytes, for the exact solver.

The graph is cut before the first pinned operator of every layer (its norm, as a rule), so each ends with the
unpinned operators that carry the residual on. Where these run follows from the last pinned operator before the cut and
the first one after it: the state of a cut is that pair of devices. A layer's seconds depend on its own homes and on
the states of its two cuts alone, so the sum over layers is the predictor's request time, to the last digit.

Homes within a layer: one per target, one for the KV cache (attention runs there), one for its small weights. A
target may also live on the host and in part on the first accelerator (divided.py): in a way it then counts as there,
where its result arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ..data.workload import Workload
from ..solving.layered import Instance, LayerClass
from .block import Block
from .cost import CostModel, Floats
from .divided import DividedCosts, bytes_of
from .layers import Layer, NotLayered, Step, cuts_of, layers_of, steps_of
from .stage import OFFLOAD_MIN_TOKENS, STREAMER, Division, Homes, Ids, Ints, Mask, spread

# More ways than this per layer take too long to price: targets that read the same input then share a home.
MOST_WAYS = 3000
# Shares of a divided group that are tried, beside the one at which both sides take equally long.
SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)


@dataclass(frozen=True)
class Ways:
    """Homes of a layer, one row per way: (ways, targets), (ways,) of the small weights, (ways,) of the KV cache.

    split: (ways, targets) values on the first accelerator of targets that live on the host, too; 0: the home says all.
    """

    targets: Ids
    small: Ids
    cache: Ids
    split: Ints


class LayeredModel:
    """The layers of one model, its ways per layer class, and the solver's instance.

    upload: per target, whether it is uploaded, or streamed when `price` is given, when it lives on the host. price: the
    weight of copies against everything else in a micro-batch that streams (Block.seconds), which makes the objective a
    lower bound instead of the predicted request. kv_bytes: bytes of the KV cache by layer, counted against the capacity
    (zeros where it comes on top of the budget). divides: whether weights may be divided, and how.
    Raises NotLayered for graphs with more than a residual between layers.
    """

    def __init__(
        self,
        costs: CostModel,
        workload: Workload,
        upload: Mask,
        kv_bytes: Sequence[int],
        price: float | None = None,
        divides: Division = "",
    ) -> None:
        self.costs, self.upload, self.kv_bytes, self.price = costs, upload, kv_bytes, price
        self.divided, self._divides = DividedCosts(costs, divides or "values"), bool(divides)
        # What is moved in prefill lies on the host for the sake of decode.
        nothing, always = np.zeros(len(upload), dtype=bool), upload.astype(np.intp)
        realised = costs.realised_as(nothing, always) if price is not None else costs.realised_as(upload, None)
        self.steps = [replace(s, at=s.at.on_host(realised)) for s in steps_of(costs, workload)]
        # Where host weights go in large batches, and how many tokens those have at least.
        sizes = [n for n, _ in workload.chunks(costs.context.n_ubatch)] or [costs.context.n_ubatch]
        self.mover = costs.uploader if price is None else STREAMER
        self.moved_from = OFFLOAD_MIN_TOKENS if price is None else min(sizes)
        self._cuts = [cuts_of(step.at, costs.graph.n_layer) for step in self.steps]
        self.layers = layers_of(self.steps[0].at, self._cuts[0], costs)
        if any(layers_of(s.at, c, costs) != self.layers for s, c in zip(self.steps, self._cuts, strict=True)):
            raise NotLayered("prefill and decode read the weights in different layers")
        # In the state of a cut, a host weight that is moved counts as a device of its own.
        self._state_devices = len(costs.names) + bool(self.mover and upload.any())

    # ---- the solver's instance ------------------------------------------------------------------------------------

    @cached_property
    def classes(self) -> tuple[tuple[Ways, NDArray[np.intp], LayerClass], ...]:
        """Per class: its ways, which way each of the solver's arcs is, and the arcs."""
        return tuple(self._make_class(self._class_of.index(c)) for c in range(max(self._class_of) + 1))

    def instance(self, capacity: Sequence[int]) -> Instance:
        """The choice of a way per layer within `capacity` bytes of each accelerator."""
        first = np.arange(self._state_devices)
        start = tuple(self._state(np.zeros_like(first), first).tolist())
        limits = np.array(capacity, dtype=np.int64).reshape(-1)
        return Instance(tuple(c for _, _, c in self.classes), self._class_of, limits, start)

    def homes(self, arcs: Sequence[int], rest: Homes) -> Homes:
        """The homes of a solution (one arc per layer); `rest` gives weights outside of all layers."""
        targets, small, caches = rest.targets.copy(), rest.small.copy(), rest.layers.copy()
        split: Ints = np.zeros(len(targets), dtype=np.intp)
        for layer, cls, arc in zip(self.layers, self._class_of, arcs, strict=True):
            ways, of_arc, _ = self.classes[cls]
            way = of_arc[arc]
            split[list(layer.targets)] = ways.split[way]
            targets[list(layer.targets)] = np.where(ways.split[way] > 0, 0, ways.targets[way])
            small[list(layer.small)] = ways.small[way]
            caches[layer.kv_layer] = ways.cache[way] if layer.kv_layer >= 0 else ways.small[way]
        caches[self.costs.graph.n_layer : -1] = caches[-1]  # MTP heads that are not loaded: as -ngl would have it
        moved = self.upload & (targets == 0)
        nothing, parts = np.zeros(len(small), dtype=bool), split if split.any() else None
        if self.price is None:
            return Homes(targets, moved, small, nothing, caches, split=parts, division=self.divided.division)
        stream = np.where(moved, self.moved_from, 0).astype(np.intp)
        still = np.zeros_like(moved)
        return Homes(targets, still, small, nothing, caches, stream, split=parts, division=self.divided.division)

    # ---- classes --------------------------------------------------------------------------------------------------

    @cached_property
    def _class_of(self) -> tuple[int, ...]:
        """Class of every layer: layers of equal tensors, sizes and neighbours are one class."""
        keys = [self._key(i) for i in range(len(self.layers))]
        numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        return tuple(numbers[key] for key in keys)

    def _key(self, i: int) -> tuple[object, ...]:
        graph, layer = self.costs.graph, self.layers[i]
        weights = tuple(
            (t.kind, t.type, t.ne, bool(self.upload[at]))
            for at in layer.targets
            for t in (graph.tensor[self.costs.targets[at]],)
        )
        shape = graph.attention[layer.kv_layer] if layer.kv_layer >= 0 else None
        cache = self.kv_bytes[layer.kv_layer] if layer.kv_layer >= 0 else 0
        structure = tuple(
            (
                step.at.graph.structure[start:end],
                tuple(fusion.ending(start, end) for fusion in step.at.fusions),
                step.at.other[:, start:end].tobytes(),
            )
            for step, cuts in zip(self.steps, self._cuts, strict=True)
            for start, end in (cuts[i : i + 2],)
        )
        kinds = tuple(self.divided.kind(g) for g in self.divisible(layer))
        # The first layer also pays for the embedding before it, the last for what follows.
        return (weights, shape, cache, structure, kinds, i == 0, i == len(self.layers) - 1)

    def _ways(self, layer: Layer) -> Ways:
        devices = range(len(self.costs.names))
        groups = [[i] for i in range(len(layer.targets))]
        if len(devices) ** (len(groups) + 2) > MOST_WAYS:
            groups = self._grouped(layer)
        cache = devices if layer.kv_layer >= 0 else (0,)
        rows = np.array(list(product(*(devices for _ in groups), devices, cache)), dtype=np.int8)
        targets = np.zeros((len(rows), len(layer.targets)), dtype=np.int8)
        for column, members in enumerate(groups):
            targets[:, members] = rows[:, [column]]
        split: Ints = np.zeros(targets.shape, dtype=np.intp)
        return self._with_divided(layer, Ways(targets, rows[:, -2], rows[:, -1], split))

    def divisible(self, layer: Layer) -> dict[int, list[int]]:
        """Groups that may be divided -> their columns in the layer's targets."""
        found: dict[int, list[int]] = {}
        for column, target in enumerate(layer.targets if self._divides else ()):
            if target in self.divided.of_target:
                found.setdefault(self.divided.of_target[target], []).append(column)
        return found

    def _with_divided(self, layer: Layer, ways: Ways) -> Ways:
        """The ways, and those in which what is on the first accelerator as a whole is divided, all at one share."""
        groups = self.divisible(layer)
        if not groups:
            return ways
        columns = [column for inside in groups.values() for column in inside]
        there = np.flatnonzero((ways.targets[:, columns] == STREAMER).all(axis=1))
        balanced = {self.divided.balanced(self.steps[0].at, g) for g in groups}
        parts = []
        for share in sorted({*SHARES, *balanced}):
            split = np.zeros(len(layer.targets), dtype=np.intp)
            for g, inside in groups.items():
                split[inside] = self.divided.groups[g].values(share)
            parts.append(np.tile(split, (len(there), 1)))
        again = np.concatenate([np.arange(len(ways.small)), np.tile(there, len(parts))])
        split = np.concatenate([ways.split, *parts])
        return Ways(ways.targets[again], ways.small[again], ways.cache[again], split)

    def _grouped(self, layer: Layer) -> list[list[int]]:
        """Targets by the operator whose result they read."""
        graph = self.steps[0].at.graph
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, target in enumerate(layer.targets):
            op = graph.operators[int(np.flatnonzero(graph.target == target)[0])]
            groups.setdefault(op.producers[:1], []).append(i)
        return list(groups.values())

    def _make_class(self, i: int) -> tuple[Ways, NDArray[np.intp], LayerClass]:
        """All arcs of a layer: way x state before x state after."""
        layer, last = self.layers[i], i == len(self.layers) - 1
        ways = self._ways(layer)
        n = len(ways.small)
        enters = range(self._state_devices) if i else (0,)
        follows = range(1) if last else range(self._state_devices)
        way, enter, follow = (
            a.reshape(-1) for a in np.meshgrid(np.arange(n), list(enters), list(follows), indexing="ij")
        )
        # Ways that differ only in how much is divided are priced once, but for what dividing adds.
        homes = np.column_stack([ways.targets, ways.small, ways.cache, ways.split > 0])
        _, distinct, among = np.unique(homes, axis=0, return_index=True, return_inverse=True)
        among = among.reshape(-1)
        seconds = np.zeros(len(way))
        first = end = np.zeros(len(way), dtype=np.int8)
        for step, cuts in zip(self.steps, self._cuts, strict=True):
            piece = _Piece(self, step, i, cuts)
            pins, uploaded = piece.pins(ways)
            # Several states of a cut may mean one device, on which all that lies beyond it depends.
            (before, b), (after, a) = (
                np.unique(piece.beyond(np.array(states, dtype=np.intp), side), return_inverse=True)
                for states, side in ((enters, -1), (follows, 1))
            )
            rows, entered, left = (x.reshape(-1) for x in np.meshgrid(distinct, before, after, indexing="ij"))
            each = piece.seconds(pins[rows], uploaded[rows], entered.astype(np.int8), left.astype(np.int8))
            seconds += each.reshape(len(distinct), len(before), len(after))[among][:, b][:, :, a].reshape(-1)
            seconds += piece.divided(ways, uploaded)[way]
            first, end = piece.ends(ways)
        enter_state = self._state(enter, first[way].astype(np.intp))
        leave_state = np.zeros_like(enter_state) if last else self._state(end[way].astype(np.intp), follow)
        arcs = LayerClass(
            enter=enter_state,
            leave=leave_state,
            seconds=_without_noise(seconds),
            nbytes=self._bytes(layer, ways)[way],
        )
        return ways, way, arcs

    def _bytes(self, layer: Layer, ways: Ways) -> NDArray[np.int64]:
        """(ways, accelerators) bytes."""
        costs = self.costs
        small = sum(costs.graph.tensor[costs.small[s]].nbytes for s in layer.small)
        cache = self.kv_bytes[layer.kv_layer] if layer.kv_layer >= 0 else 0
        sizes = costs.nbytes[list(layer.targets)]
        columns = [
            ((ways.targets == d) * sizes).sum(axis=1) + small * (ways.small == d) + cache * (ways.cache == d)
            for d in range(1, len(costs.names))
        ]
        taken = np.stack(columns, axis=1).astype(np.int64) if columns else np.zeros((len(ways.small), 0), np.int64)
        for g, inside in self.divisible(layer).items():
            group, counts = self.divided.groups[g], ways.split[:, inside[0]]
            for count in np.unique(counts[counts > 0]).tolist():
                taken[counts == count, STREAMER - 1] -= group.nbytes - bytes_of(group, count)
        return taken

    # ---- states ---------------------------------------------------------------------------------------------------

    def _state(self, before: NDArray[np.intp], after: NDArray[np.intp]) -> NDArray[np.int16]:
        """Number of the cut between two pinned operators with these homes."""
        return (before * self._state_devices + after).astype(np.int16)


def _without_noise(seconds: Floats) -> Floats:
    """Rounded to 2**-36 of the longest: ways that take equally long are not told apart by the order of additions."""
    longest = float(np.abs(seconds).max(initial=0.0))
    unit = 2.0 ** (np.floor(np.log2(longest)) - 36) if longest > 0 else 1.0
    rounded: Floats = np.round(seconds / unit) * unit
    return rounded


class _Piece:
    """A layer in one stage."""

    def __init__(self, model: LayeredModel, step: Step, i: int, cuts: Sequence[int]) -> None:
        self.all, self.step, self.costs = model, step, model.costs
        start, end = (0 if i == 0 else cuts[i]), cuts[i + 1]
        self.block = Block(step.at, start, end, step.logits)
        graph = step.at.graph
        self.layer = model.layers[i]
        self.target = {t: c for c, t in enumerate(self.layer.targets)}
        self.graph, self.start, self.end, self.is_last = graph, start, end, i == len(model.layers) - 1
        self._check_outside(cuts[i - 1] if i > 1 else 0)

    def _check_outside(self, previous: int) -> None:
        """The state of the cut must tell where everything runs that the layer reads."""
        graph, at = self.graph, self.start
        last_pin = int(graph.before[at - 1]) if at else -1
        for producer in self.block.outside:
            fixed = graph.pinned[producer] and graph.gets_rows[producer]
            if producer < last_pin and not fixed:
                name = graph.operators[producer].name
                raise NotLayered(f"operator {name!r} is read beyond the next layer; the exact planner cannot cut there")

    def _homes(self, ways: Ways, op: int) -> NDArray[np.int8]:
        """(ways,) home of a pinned operator, the number of devices for a host weight that may be uploaded."""
        graph, n = self.graph, len(ways.small)
        if graph.target[op] >= 0:
            home = ways.targets[:, self.target[int(graph.target[op])]]
            upload = bool(self.all.upload[graph.target[op]])
            return np.where((home == 0) & upload, len(self.costs.names), home).astype(np.int8)
        if graph.gets_rows[op]:
            return np.zeros(n, dtype=np.int8)
        return ways.cache if graph.cache_layer[op] >= 0 else ways.small

    def ends(self, ways: Ways) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """Homes of the layer's first and last pinned operator."""
        graph = self.graph
        pinned = [op for op in range(self.start, self.end) if graph.pinned[op] and not graph.gets_rows[op]]
        return self._homes(ways, pinned[0]), self._homes(ways, pinned[-1])

    def beyond(self, home: NDArray[np.intp], side: int) -> Ids:
        """Where the nearest pinned operator before (-1) or after (1) the layer runs, for homes of its weight."""
        tokens = self.step.at.tokens
        at = (int(self.graph.before[self.start - 1]) if self.start else -1) if side < 0 else self.end
        large = 0 <= at < len(tokens) and tokens[at] >= self.all.moved_from
        mover = self.all.mover if large else 0
        return np.where(home == len(self.costs.names), mover, home).astype(np.int8)

    def pins(self, ways: Ways) -> tuple[Ids, Mask]:
        """(ways, operators) device ids of pinned operators, and which of them have their weight moved."""
        pins = np.zeros((len(ways.small), self.block.n), dtype=np.int8)
        uploaded = np.zeros(pins.shape, dtype=bool)
        mover = self.all.mover
        for op in range(self.start, self.end):
            if not self.graph.pinned[op]:
                continue
            home = self._homes(ways, op)
            may, column = home == len(self.costs.names), op - self.start
            moves = may & (mover > 0) & (self.step.at.tokens[op] >= self.all.moved_from)
            pins[:, column] = np.where(moves, mover, np.where(may, 0, home))
            uploaded[:, column] = moves | self._moves_whole(ways, op)
        return pins, uploaded

    def _moves_whole(self, ways: Ways, op: int) -> Mask:
        """(ways,) the operator's weight is divided in general, but moved as a whole in this stage."""
        target = int(self.graph.target[op])
        if target < 0 or not self.all.mover or self.step.at.tokens[op] < self.all.moved_from:
            return np.zeros(len(ways.small), dtype=bool)
        divided: Mask = ways.split[:, self.target[target]] > 0
        return divided & bool(self.all.upload[target])

    def divided(self, ways: Ways, uploaded: Mask) -> Floats:
        """(ways,) seconds that divided weights add to whole ones on the accelerator, in all runs of the stage."""
        seconds = np.zeros(len(ways.small))
        for g, inside in self.all.divisible(self.layer).items():
            tables, counts = self.all.divided, ways.split[:, inside[0]]
            first = tables.first(self.step.at, g)
            if first < 0 or not self.block.runs[first - self.start]:
                continue
            extra = tables.extra(self.step.at, g, counts / tables.groups[g].width)
            seconds += np.where((counts > 0) & ~uploaded[:, first - self.start], extra, 0.0)
        return self.runs * seconds

    @property
    def runs(self) -> float:
        return sum(times for _, times in self.step.depths)

    def seconds(self, pins: Ids, uploaded: Mask, enter: Ids, follow: Ids) -> Floats:
        """(arcs,) seconds of all runs of the stage; `enter` and `follow` are the devices beyond the two cuts."""
        graph, start, end = self.graph, self.start, self.end
        # Columns: the layer, the pinned operators beyond its cuts.
        padded = np.concatenate([pins, enter[:, None], follow[:, None]], axis=1)
        n = self.block.n
        before, after = graph.before[start:end] - start, graph.after[start:end] - start
        before = np.where(before >= 0, before, n)
        after = np.where((after >= 0) & (after < n), after, n + 1)
        ids = spread(padded, before, after)
        outside = [self._outside(p, pins, enter) for p in self.block.outside]
        ids = np.concatenate([ids, *(o[:, None] for o in outside)], axis=1).astype(np.int8)
        (depth, times), *others = self.step.depths
        price = self.all.price
        streams = price is not None and self.step.at.n_tokens >= self.all.moved_from
        following = follow if self._goes_on() else None
        if streams:
            nothing = np.zeros_like(uploaded)
            once = self.block.seconds(self.costs, ids, nothing, depth, following, streamed=uploaded, price=price)
        else:
            once = self.block.seconds(self.costs, ids, uploaded, depth, following)
        # What streamed copies hide makes everything else, attention too, cheaper.
        share = 1 - price * self.costs.overlap if streams and price is not None else 1.0
        total = self.runs * (once.total - share * once.attention) + times * share * once.attention
        for depth, times in others:
            total += times * share * self.block.attention_seconds(self.costs, ids, depth)
        return total

    def _goes_on(self) -> bool:
        """Whether the operator after the layer runs: without logits the end of the graph does not."""
        graph, end = self.graph, self.end
        if self.is_last:
            return False
        return self.step.logits or not (graph.output_rows[end] or graph.is_output[end])

    def _outside(self, producer: int, pins: Ids, enter: Ids) -> Ids:
        graph = self.graph
        if graph.gets_rows[producer]:
            return np.zeros(len(pins), dtype=np.int8)
        if graph.pinned[producer]:
            return enter
        first = pins[:, int(graph.after[self.start]) - self.start]
        return np.where(enter > 0, enter, first)
