"""What sequences of a hot model do in tests: join, decode together, leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from oallama.weave.sequences import Sequences
from support.logits import tokens

# Sequences join with prompts of several lengths, decode together, leave, and others take their numbers.
SCRIPT: list[dict[int, list[int]]] = [
    {0: tokens(17, 1)},
    {0: tokens(1, 2), 3: tokens(30, 3)},
    {0: tokens(1, 4), 3: tokens(1, 5), 5: tokens(9, 6)},
    *({0: tokens(1, 10 + i), 3: tokens(1, 20 + i), 5: tokens(1, 30 + i)} for i in range(4)),
    {5: tokens(1, 40), 0: tokens(1, 41)},
    {5: tokens(100, 42), 3: tokens(1, 43)},
    *({0: tokens(1, 50 + i), 1: tokens(1, 60 + i), 3: tokens(1, 70 + i), 5: tokens(1, 80 + i)} for i in range(4)),
]


def play(hot: Sequences, first: int = 0, end: int | None = None, *, leave: bool = False) -> list[np.ndarray]:
    """Logits of all rows of the script. leave: sequences go, or lose their end, between steps."""
    found = []
    for at in range(first, len(SCRIPT) if end is None else end):
        if leave and at == 8:
            hot.remove(5)
        if leave and at == 10:
            hot.remove(0, 5)
        for part in parts(SCRIPT[at]):
            logits = hot.step(part)
            found += [logits[seq_id] for seq_id in sorted(logits)]
    return found


def parts(step: Mapping[int, Sequence[int]]) -> Iterator[dict[int, Sequence[int]]]:
    """Batches of less than 64 rows: with more, ggml-cpu's tiles begin wherever a sequence has its cells."""
    while step:
        now = {seq_id: new[:40] for seq_id, new in step.items()}
        yield now
        step = {seq_id: new[40:] for seq_id, new in step.items() if len(new) > 40}
