"""Plans that stream weights for every token, by name only: the most layers that fit beside them, or none at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..data.operators import layer_of
from ..data.plan import PlacementPlan
from .largest import largest
from .space import Space, too_small
from .stage import Homes, Ids, Ints

_MINIMAL_SLOTS = 2


def stream_all(space: Space) -> PlacementPlan:
    """As many of the last layers resident as fit; all else streamed, KV caches and attention on the device."""
    builder = space.builder(space.ours)
    costs = builder.costs
    layer = np.array([costs.graph.n_layer if (il := layer_of(name)) is None else il for name in costs.targets])

    def homes(n: int) -> Homes:
        home = (layer > costs.graph.n_layer - n).astype(np.int8)
        return replace(builder.uniform(1, home), stream=_always(home))

    n, dry_run = largest(builder, lambda n: builder.by_homes(homes(n)), homes, costs.graph.n_layer + 1)
    return builder.finish(dry_run, "stream-all", {"n_resident_layers": n})


def minimal(space: Space) -> PlacementPlan:
    """Nothing but norms and buffers stays on the device; a smaller micro-batch where buffers exceed the budget."""
    for size in space.sizes():
        builder = space.builder(replace(space.ours, n_ubatch=size))
        home = np.zeros(len(builder.costs.targets), dtype=np.int8)
        homes = replace(builder.uniform(1, home), stream=_always(home), stream_caches=True)
        plan = builder.by_homes(replace(homes, layers=np.zeros_like(homes.layers)))
        # llama.cpp's "auto" drops the fused form when attention is not where its KV cache is.
        context = replace(plan.context, flash_attn="on" if builder.costs.flash else "off")
        dry_run = builder.dry_run(replace(plan, context=context, stream_slots=_MINIMAL_SLOTS))
        if builder.fits(dry_run):
            return builder.finish(dry_run, "minimal", {"n_ubatch": size})
    raise too_small(builder, dry_run)


def _always(home: Ids) -> Ints:
    """Streamed from one token on where the home is the host."""
    return np.where(home == 0, 1, 0).astype(np.intp)
