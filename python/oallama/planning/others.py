"""Seconds of operators that are neither target operators nor attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..data.profile import Profile
from .stage import StageGraph


def other_seconds(
    profile: Profile, devices: Sequence[str], width: int, graph: StageGraph, n_tokens: int
) -> NDArray[np.float64]:
    """(devices, operators) seconds when the stage runs with so many tokens.

    Small operators have one price, at rows of `width` values. Those that were timed by kind and shape are in proportion
    to the tokens they process, at least that price.
    """
    small = [profile.other_op_time(name, n_tokens, width) or 0.0 for name in devices]
    other = np.repeat(np.array(small)[:, None], len(graph.operators), axis=1)
    for op in graph.operators:
        if op.shape is None:
            continue
        share = 1.0 if graph.output_rows[op.index] else n_tokens / graph.tier
        for d, name in enumerate(devices):
            if (seconds := profile.shape_time(name, op.shape.key)) is not None:
                other[d, op.index] = max(share * seconds, min(seconds, small[d]))
    return other
