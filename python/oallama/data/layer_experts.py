"""A mixture's experts in a plan, layer by layer: what an accelerator has of them, and what that is expected to compute.

A *use* is one expert that a router chose for one token. It hits if an accelerator computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from .operators import kind_of, layer_of
from .plan_export import HOST

if TYPE_CHECKING:
    from .plan import PlacementPlan
    from .tensor_placement import TensorPlacement

MIXED = "mixed"  # a layer whose matrices of experts do not live alike
Routing = Literal["trace", "uniform"]


@dataclass(frozen=True)
class LayerExperts:
    """Where one layer's experts are.

    home: the device of all of them, "upload" or "stream" for a host that moves all matrices so, or MIXED. device: an
    accelerator that has `held` of the `total` beside that home, "" for none. slots: whether they change while the model runs.
    """

    layer: int
    home: str
    device: str = ""
    held: int = 0
    total: int = 0
    slots: bool = False


def layer_experts(plan: PlacementPlan) -> tuple[LayerExperts, ...]:
    """Every layer with experts, in order; none for a dense model."""
    found: dict[int, set[LayerExperts]] = {}
    for name, tensor in plan.tensors.items():
        layer = layer_of(name)
        if layer is not None and kind_of(name).endswith("_exps"):
            found.setdefault(layer, set()).add(_of(layer, tensor))
    return tuple(_together(layer, places) for layer, places in sorted(found.items()))


def _together(layer: int, places: set[LayerExperts]) -> LayerExperts:
    """Of all matrices. The host may move some for large batches and others not."""
    homes = {place.home for place in places}
    if len(places) > 1 and homes <= {HOST, "upload", "stream"}:
        places = {replace(place, home=HOST) for place in places}
    return places.pop() if len(places) == 1 else LayerExperts(layer, MIXED)


def _of(layer: int, tensor: TensorPlacement) -> LayerExperts:
    home = tensor.mode if tensor.mode in ("upload", "stream") else tensor.device
    if len(tensor.segments) == 1:
        return LayerExperts(layer, home)
    host, there = tensor.segments
    if there.slots:  # and one of zeros; each of them is an expert's bytes
        total = tensor.nbytes * (there.slots + 1) // there.nbytes
        return LayerExperts(layer, home, there.device, there.slots, total, slots=True)
    if not there.experts:
        return LayerExperts(layer, MIXED)
    return LayerExperts(layer, home, there.device, len(there.experts), len(there.experts) + len(host.experts))


@dataclass(frozen=True)
class ExpectedHits:
    """Of one layer: experts that an accelerator has, and the shares of uses that they are expected to compute."""

    held: int
    decode: float
    prefill: float


@dataclass(frozen=True)
class ExpectedExperts:
    """What accelerators are expected to compute of a mixture's experts.

    routing: what is known of their use: a "trace", or nothing, which is "uniform". n_experts: of each layer. n_used:
    those that a token uses. layers: by number, those of which an accelerator has experts; where it has all, the shares
    are 1.
    """

    routing: Routing
    n_experts: int
    n_used: int
    layers: Mapping[int, ExpectedHits] = field(default_factory=dict)

    @classmethod
    def read(cls, content: Mapping[str, Any] | None) -> ExpectedExperts | None:
        """From the content of a plan file; None for dense models, and for plans of older versions."""
        if content is None:
            return None
        layers = {int(number): ExpectedHits(**hits) for number, hits in content["layers"].items()}
        return cls(content["routing"], content["n_experts"], content["n_used"], layers)

    def divided(self) -> dict[int, ExpectedHits]:
        """The layers of which the accelerator has a part."""
        return {layer: hits for layer, hits in self.layers.items() if hits.held < self.n_experts}

    def share(self, stage: Literal["decode", "prefill"], layers: Sequence[int]) -> float:
        """The mean over these layers; 0 for those of which no accelerator has experts, and for no layers."""
        found = [float(getattr(self.layers[layer], stage)) if layer in self.layers else 0.0 for layer in layers]
        return sum(found) / len(found) if found else 0.0
