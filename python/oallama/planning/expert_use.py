"""How often experts are used that a device has: by a routing trace, or each as likely as the others.

Static experts: a device has the k experts of a layer that were used most. What they hit is judged on tokens that they
were not chosen by (data/expert_hits.py). Numbers are means of the layers, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import comb

import numpy as np
from numpy.typing import NDArray

from ..data.expert_hits import POLICIES, counts
from ..data.routing import NONE, STAGES, RoutingTrace

Floats = NDArray[np.float64]
_JUDGED = 2048  # tokens are enough for how many of one token's choices hit


@dataclass(frozen=True)
class ExpertUse:
    """A mixture's experts by use.

    Attributes:
        hits: by stage ("prefill", "decode"), [experts + 1]: the share of uses that the k most used hit, k = 0 and up.
        together: [experts + 1, used + 1]: how often so many of a generated token's choices hit at once.
        order: by layer, all experts, the most used first; layers that are missing have them by number.
        by_layer: as `hits`, of single layers that a trace has. slots_by_layer: the same for k slots that LFRU fills.
    """

    hits: Mapping[str, Floats]
    together: Floats
    order: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    by_layer: Mapping[int, Mapping[str, Floats]] = field(default_factory=dict)
    slots_by_layer: Mapping[int, Mapping[str, Floats]] = field(default_factory=dict)

    @classmethod
    def uniform(cls, n_experts: int, n_used: int) -> ExpertUse:
        """Each expert is as likely as the others, whatever was used before."""
        share = np.arange(n_experts + 1) / n_experts
        all_choices = comb(n_experts, n_used)
        together = [
            [comb(k, hit) * comb(n_experts - k, n_used - hit) / all_choices for hit in range(n_used + 1)]
            for k in range(n_experts + 1)
        ]
        return cls(dict.fromkeys(STAGES, share), np.array(together))

    @classmethod
    def of_trace(cls, trace: RoutingTrace) -> ExpertUse:
        """What the trace shows. Both stages count alike in the order of experts."""
        n_experts, stages = trace.n_experts, trace.stages
        curves = _curves(trace, "static")
        static = {name: curve.mean(axis=0) for name, curve in curves.items()}
        shares = sum(_shares(stage.ids, n_experts) for stage in stages.values())
        order = np.argsort(-shares, axis=1, kind="stable")
        by_layer = {layer: tuple(row) for layer, row in zip(trace.layers, order.tolist(), strict=True)}
        of_layers, of_slots = (
            {layer: {name: curve[i] for name, curve in found.items()} for i, layer in enumerate(trace.layers)}
            for found in (curves, _curves(trace, "lfru"))
        )
        return cls(static, _together(stages["decode"].ids[:, :_JUDGED], n_experts), by_layer, of_layers, of_slots)

    @property
    def n_used(self) -> int:
        """Experts that a token chooses."""
        return self.together.shape[1] - 1

    @property
    def n_experts(self) -> int:
        return self.together.shape[0] - 1

    def most_used(self, layer: int, k: int) -> tuple[int, ...]:
        """The k most used experts of a layer, rising."""
        return tuple(sorted(self.order.get(layer, range(self.n_experts))[:k]))

    def share(self, layer: int, k: int, stage: str, slots: bool = False) -> float:
        """Of one layer's uses in a stage: what its k most used experts hit, or k slots. Without a trace, the mean."""
        curves = self.slots_by_layer if slots else self.by_layer
        return min(1.0, float(curves.get(layer, self.hits)[stage][k]))

    def computed(self, k: int, n_tokens: int, decode: bool) -> tuple[Floats, Floats]:
        """Shares of a pass's uses that k experts may compute, and how likely each is.

        For one generated token by how many of its choices hit; for more tokens the mean alone.
        """
        if decode and n_tokens == 1:
            return np.arange(self.n_used + 1) / self.n_used, self.together[k]
        return np.array([self.hits["decode" if decode else "prefill"][k]]), np.ones(1)

    def fewest(self, share: float) -> int:
        """The fewest experts that hit this share of a generated token's uses; all but one at most, one at least."""
        k = int(np.searchsorted(self.hits["decode"], share))
        return min(max(k, 1), self.n_experts - 1)


def _curves(trace: RoutingTrace, policy: str) -> dict[str, Floats]:
    """By stage, [layers, experts + 1]: what k = 0, 1, .. hit."""
    number = POLICIES.index(policy)
    return {
        name: np.insert(stage.hits[number].astype(np.float64), 0, 0.0, axis=1) for name, stage in trace.stages.items()
    }


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
