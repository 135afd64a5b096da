"""How far looks for guests' tasks are apart on a GPU: a look is a launch between two kernels, and cannot be inside one.

The mean wait is that of waiting.py, of the pieces between two looks in place of operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .waiting import mean_wait

# Of one block between two kernels, and of the programmatic launch that it breaks. An estimate: no GPU has measured it
# (docs/weave-cuda.md); it only says what a plan's looks cost and decides nothing.
LOOK_S = 5e-6


@dataclass(frozen=True)
class Distance:
    """Products with weights and attentions between two looks: of steps with at most `few` rows, and of prompts."""

    decode: int
    prompt: int
    few: int

    def __str__(self) -> str:
        """As OALLAMA_WEAVE_CUDA_RECEIVER has it."""
        return f"{self.decode}:{self.prompt}:{self.few}"


def pieces(seconds: Sequence[float], is_product: Sequence[bool], distance: int) -> list[float]:
    """Seconds between looks after every `distance` products, and after the last operator.

    >>> pieces([1, 2, 3, 4, 5], [True, False, True, True, False], 2)
    [6, 9]
    """
    found, since, n = [], 0.0, 0
    for one, product in zip(seconds, is_product, strict=True):
        since += one
        n += product
        if n == distance:
            found.append(since)
            since, n = 0.0, 0
    return [*found, since] if since else found


def widest(seconds: Sequence[float], is_product: Sequence[bool], threshold_s: float, slack_s: float = 0.0) -> int:
    """The most products between two looks with which a task waits `threshold_s` on average, or hardly more.

    Where looks after every product do not reach the threshold, a tenth more waiting than with them is allowed. Waiting
    grows with the distance but for what the last piece is, so all distances are tried; 1 without products.
    """
    n = sum(is_product)
    allowed_s = max(threshold_s, 1.1 * mean_wait(pieces(seconds, is_product, 1), slack_s))
    fits = (d for d in range(n, 1, -1) if mean_wait(pieces(seconds, is_product, d), slack_s) <= allowed_s)
    return next(fits, 1)
