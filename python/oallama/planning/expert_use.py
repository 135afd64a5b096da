"""How often experts are used that a device has: by a routing trace, or each as likely as the others.

Static experts: a device has the k experts of a layer that were used most. What they hit is judged on tokens that they
were not chosen by (data/expert_hits.py). Slots: it has k experts that change, as a simulation of the engine says.
Numbers are means of the layers, where nothing else is said. Layers differ in how much their few experts are used: those
that are alike in it are of one kind, and a plan divides each kind by its own numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb

import numpy as np
from numpy.typing import NDArray

from ..data.expert_hits import POLICIES, counts
from ..data.routing import NONE, STAGES, RoutingTrace
from .expert_reads import Unions

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
STATIC = POLICIES.index("static")
_JUDGED = 2048  # tokens are enough for how many of one token's choices hit
_READ = 8192  # tokens of a prompt, for the experts of batches
_SIMULATED = 1024  # tokens, the second half of which counts
_KINDS = 3  # of layers, at most
_ALIKE = 0.03  # layers whose hits differ by less in the mean over k are of one kind
_GRID = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # shares of experts in slots


@dataclass(frozen=True)
class SlotRun:
    """What slots did with a trace's tokens: as `Held.together` and `Held.uploads`, of each layer."""

    together: Floats
    uploads: Floats


# ids [layers, tokens, used], experts, slots; the first half of the tokens fills the slots, the second half counts.
SimulateSlots = Callable[[NDArray[np.uint16], int, int], SlotRun]


@dataclass(frozen=True)
class Held:
    """What k experts of a layer compute that an accelerator has, k = 0 and up.

    Attributes:
        hits: by stage ("prefill", "decode"), [experts + 1]: the share of uses that hit.
        together: [experts + 1, used + 1]: how often so many of a generated token's choices hit at once.
        uploads: [experts + 1]: experts that are uploaded per generated token and layer.
        by_layer: as `hits`, of single layers that a trace has.
    """

    hits: Mapping[str, Floats]
    together: Floats
    uploads: Floats
    by_layer: Mapping[int, Mapping[str, Floats]] = field(default_factory=dict)

    def share(self, layer: int, k: int, stage: str) -> float:
        """Of one layer's uses in a stage; without a trace, of all layers'."""
        return min(1.0, float(self.by_layer.get(layer, self.hits)[stage][k]))


@dataclass(frozen=True)
class Computed:
    """Shares of a pass's uses that take time on the accelerator and on the host, and how likely each pair is.

    likely: [numbers of experts, pairs]; `device` and `host` broadcast to it.
    """

    device: Floats
    host: Floats
    likely: Floats


@dataclass(frozen=True)
class ExpertUse:
    """A mixture's experts by use.

    Attributes:
        static: what the k most used experts compute. slots: what k slots do whose experts change; None: unknown.
        order: by layer, all experts, the most used first; layers that are missing have them by number.
        unions: of a prompt's tokens, by the trace; None: random choices.
        kinds: the same of layers that are alike; none where all are. kind_of: by layer, its position in `kinds`.
    """

    static: Held
    slots: Held | None = None
    order: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    unions: Unions | None = None
    kinds: tuple[ExpertUse, ...] = ()
    kind_of: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def uniform(cls, n_experts: int, n_used: int) -> ExpertUse:
        """Each expert is as likely as the others, whatever was used before."""
        share = np.arange(n_experts + 1) / n_experts
        all_choices = comb(n_experts, n_used)
        together = [
            [comb(k, hit) * comb(n_experts - k, n_used - hit) / all_choices for hit in range(n_used + 1)]
            for k in range(n_experts + 1)
        ]
        return cls(Held(dict.fromkeys(STAGES, share), np.array(together), np.zeros(n_experts + 1)))

    @classmethod
    def of_trace(cls, trace: RoutingTrace, simulate: SimulateSlots | None = None) -> ExpertUse:
        """What the trace shows. Both stages count alike in the order of experts. simulate: what slots would do."""
        counted = _Counted.of(trace, simulate)
        every = np.arange(len(trace.layers))
        kind = _kinds(counted.curves["decode"])
        kinds = [counted.use(every[kind == number]) for number in range(kind.max() + 1)] if kind.any() else []
        kind_of = dict(zip(trace.layers, kind.tolist(), strict=True)) if kinds else {}
        return replace(counted.use(every), kinds=tuple(kinds), kind_of=kind_of)

    def of_layer(self, layer: int) -> ExpertUse:
        """That of the layer's kind."""
        return self.kinds[self.kind_of[layer]] if layer in self.kind_of else self

    @property
    def from_trace(self) -> bool:
        return bool(self.order)

    @property
    def n_used(self) -> int:
        """Experts that a token chooses."""
        return self.static.together.shape[1] - 1

    @property
    def n_experts(self) -> int:
        return self.static.together.shape[0] - 1

    def held(self, slots: bool) -> Held:
        """What experts compute that are in slots, or are always there."""
        if not slots:
            return self.static
        assert self.slots is not None
        return self.slots

    def most_used(self, layer: int, k: int) -> tuple[int, ...]:
        """The k most used experts of a layer, rising."""
        return tuple(sorted(self.order.get(layer, range(self.n_experts))[:k]))

    def computed(
        self,
        k: Ints,
        n_tokens: int,
        decode: bool,
        slots: bool = False,
        zeros: bool = False,
        reading: tuple[float, float] = (0.0, 0.0),
    ) -> Computed:
        """What numbers of experts on the accelerator compute of a pass.

        For one generated token by how many of its choices hit; for more tokens the mean alone. zeros: the accelerator
        multiplies with the expert of zeros for choices of the host. It reads that once for one token; a prompt's
        tokens are all multiplied. reading: the shares of the accelerator's and the host's seconds that read experts:
        a side reads those of its own that one of the tokens chose, the rest goes by uses.
        """
        held = self.held(slots)
        if decode and n_tokens == 1:
            hits = np.arange(self.n_used + 1)
            there = hits + (hits < self.n_used) if zeros else hits
            return Computed(there / self.n_used, 1 - hits / self.n_used, held.together[k])
        share = held.hits["decode" if decode else "prefill"][k]
        read = self._read(k, n_tokens, slots)
        device = reading[0] * read + (1 - reading[0]) * (1.0 if zeros else share)
        host = reading[1] * (1 - read) + (1 - reading[1]) * (1 - share)
        return Computed(device[:, None], host[:, None], np.ones((len(k), 1)))

    def _read(self, k: Ints, n_tokens: int, slots: bool) -> Floats:
        """The accelerator's share of the distinct experts that n tokens use."""
        if self.unions is None or slots:
            return k / self.n_experts
        union = self.unions.at(n_tokens)
        return np.asarray(union[k] / union[-1])

    def fewest(self, share: float, slots: bool = False) -> int:
        """The fewest experts that hit this share of a generated token's uses; all but one at most, one at least."""
        k = int(np.searchsorted(self.held(slots).hits["decode"], share))
        return min(max(k, 1), self.n_experts - 1)


@dataclass(frozen=True)
class _Counted:
    """A trace's layers, counted one by one.

    order: [layers, experts], the most used first. curves: by stage, [layers, experts + 1]: what static experts hit.
    slots: of each number of slots on the grid, in its order; empty without a simulation.
    """

    trace: RoutingTrace
    order: NDArray[np.intp]
    curves: Mapping[str, Floats]
    slots: Mapping[int, SlotRun]

    @classmethod
    def of(cls, trace: RoutingTrace, simulate: SimulateSlots | None) -> _Counted:
        n_experts, stages = trace.n_experts, trace.stages
        curves = {
            name: np.insert(stage.hits[STATIC].astype(np.float64), 0, 0.0, axis=1) for name, stage in stages.items()
        }
        shares = sum(_shares(stage.ids, n_experts) for stage in stages.values())
        order = np.argsort(-shares, axis=1, kind="stable")
        grid = sorted({max(1, min(n_experts - 1, round(n_experts * share))) for share in _GRID})
        ids = stages["decode"].ids[:, :_SIMULATED]
        return cls(trace, order, curves, {k: simulate(ids, n_experts, k) for k in grid} if simulate else {})

    def use(self, rows: Ints) -> ExpertUse:
        """Of the layers in these rows."""
        stages, n_experts = self.trace.stages, self.trace.n_experts
        by_layer = {self.trace.layers[row]: tuple(self.order[row].tolist()) for row in rows}
        together = _together(stages["decode"].ids[rows, :_JUDGED], n_experts)
        curves = {name: curve[rows] for name, curve in self.curves.items()}
        static = self._held(rows, curves, together, np.zeros(n_experts + 1))
        unions = Unions.of_ids(stages["prefill"].ids[rows, :_READ], self.order[rows])
        return ExpertUse(static, self._of_slots(rows) if self.slots else None, by_layer, unions)

    def _held(self, rows: Ints, curves: Mapping[str, Floats], together: Floats, uploads: Floats) -> Held:
        """curves: by stage, [rows, experts + 1]."""
        by_layer = {
            self.trace.layers[row]: {name: curve[i] for name, curve in curves.items()} for i, row in enumerate(rows)
        }
        return Held({name: curve.mean(axis=0) for name, curve in curves.items()}, together, uploads, by_layer)

    def _of_slots(self, rows: Ints) -> Held:
        """By simulations of some numbers of slots, with what lies between them in proportion.

        What slots have after generating says nothing of a prompt: there k of n experts hit as k to n.
        """
        n_experts, runs = self.trace.n_experts, self.slots.values()
        ends = [0, *self.slots, n_experts]
        n_used = self.trace.stages["decode"].ids.shape[2]
        hits = np.arange(n_used + 1) / n_used
        nothing, everything = np.eye(n_used + 1)[[0, n_used]][:, None]
        shape = (len(rows), n_used + 1)
        none, whole = np.broadcast_to(nothing, shape), np.broadcast_to(everything, shape)
        known = np.array([none, *(run.together[rows] for run in runs), whole])  # [ends, rows, used + 1]
        every = np.arange(n_experts + 1)
        together = _between(every, ends, known.mean(axis=1))
        decode = _between(every, ends, known @ hits).T
        uploads = _between(every, ends, np.array([0.0, *(run.uploads[rows].mean() for run in runs), 0.0]))
        chance = np.broadcast_to(every / n_experts, decode.shape)
        return self._held(rows, {"prefill": chance, "decode": decode}, together, uploads)


def _kinds(curves: Floats) -> NDArray[np.intp]:
    """[layers]: kinds 0, 1, .. of layers by what static experts hit of them, in the mean over k; [layers, k]."""
    hits = curves.mean(axis=1)
    spread = hits.max() - hits.min()
    steps = min(_KINDS, int(spread / _ALIKE) + 1)
    if steps == 1:
        return np.zeros(len(hits), dtype=np.intp)
    step = np.minimum((steps * (hits - hits.min()) / spread).astype(np.intp), steps - 1)
    return np.unique(step, return_inverse=True)[1].reshape(-1)


def _between(at: NDArray[np.int_], ends: Sequence[int], known: Floats) -> Floats:
    """`known` [ends, ..] at positions between the ends."""
    above = np.clip(np.searchsorted(ends, at), 1, len(ends) - 1)
    low, high = np.array(ends)[above - 1], np.array(ends)[above]
    part = ((at - low) / (high - low)).reshape(-1, *([1] * (known.ndim - 1)))
    found: Floats = known[above - 1] * (1 - part) + known[above] * part
    return found


def _shares(ids: NDArray[np.uint16], n_experts: int) -> Floats:
    """[layers, experts] of a stage's uses."""
    found = [np.bincount(layer[layer != NONE], minlength=n_experts) for layer in ids]
    uses = np.array(found, dtype=np.float64)
    shares: Floats = uses / np.maximum(1, uses.sum(axis=1, keepdims=True))
    return shares


def _together(ids: NDArray[np.uint16], n_experts: int) -> Floats:
    """[experts + 1, used + 1]: as `ExpertUse.together`, the second half's tokens by the first half's order."""
    n_layers, n_tokens, n_used = ids.shape
    half = n_tokens // 2
    order = np.argsort(-counts(np.where(ids[:, :half] == NONE, 0, ids[:, :half]), n_experts), axis=1, kind="stable")
    place = np.full((n_layers, n_experts + 1), n_experts)  # no expert: after all others
    np.put_along_axis(place, order, np.broadcast_to(np.arange(n_experts), order.shape), axis=1)
    later = np.minimum(ids[:, half:], n_experts).astype(np.intp)
    places = np.take_along_axis(place, later.reshape(n_layers, -1), axis=1).reshape(-1, n_used)
    places.sort(axis=1)
    # With k experts a token's hits are its places below k.
    hits = np.zeros((n_experts + 1, n_used + 1))
    for rank in range(n_used):
        reached = np.bincount(places[:, rank], minlength=n_experts + 1)[:n_experts].cumsum()
        hits[1:, rank + 1] = reached / max(1, len(places))
    hits[:, 0] = 1.0
    together: Floats = hits - np.append(hits[:, 1:], np.zeros((n_experts + 1, 1)), axis=1)
    return together
