"""Times of the operators of a loaded model inside its own graphs, by the engine's timer (csrc/observe/op_timer.h).

The timer knows the CPU and CUDA backends of this process. It waits after every operator, so that the sum is that of
the parts, not of the best case.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from oallama.engine import native
from oallama.errors import OallamaError

from .record import WARM_UP


@dataclass(frozen=True)
class TimedOperator:
    """One operator of a pass. seconds: the median of the passes. operand: its first one, mostly the weight's name."""

    device: str
    node: str
    op: str
    operand: str
    seconds: float


def time_operators(
    llm: Any, n_prompt: int, depth: int, repeats: int, seed: int = 1
) -> tuple[list[TimedOperator], list[TimedOperator]]:
    """(prefill, decode) of a loaded model, each operator's median over `repeats` passes.

    prefill: one micro-batch of `n_prompt` random tokens in an empty cache. decode: one token each, behind `depth` or
    more. llm: a `Llama`; its cache is cleared. Raises OallamaError when this exceeds the context or its micro-batch.
    """
    needed = max(n_prompt, depth) + WARM_UP + repeats
    if needed > llm.n_ctx():
        raise OallamaError(f"timing operators needs a context of {needed} tokens, it has {llm.n_ctx()}; raise --ctx")
    ids = random.Random(seed)
    tokens = [ids.randrange(llm.n_vocab()) for _ in range(needed)]
    llm.reset()
    llm.eval(tokens[:n_prompt])
    prefill = []
    for _ in range(repeats):
        llm.reset()
        with _timing() as core:
            llm.eval(tokens[:n_prompt])
            prefill.append(core.op_timer_take())
    llm.reset()
    llm.eval(tokens[: depth + WARM_UP])
    decode = []
    for token in tokens[depth + WARM_UP : depth + WARM_UP + repeats]:
        with _timing() as core:
            llm.eval([token])
            decode.append(core.op_timer_take())
    return _medians(prefill), _medians(decode)


def _medians(passes: Sequence[Sequence[tuple[str, str, str, str, float, float]]]) -> list[TimedOperator]:
    """Passes are of the same graph; a graph that grew with the cache is compared as far as the last one goes."""
    alike = [records for records in passes if [r[:4] for r in records] == [r[:4] for r in passes[-1]]]
    medians = [statistics.median(record[4] for record in same) for same in zip(*alike, strict=True)]
    names = [record[:4] for record in alike[0]]
    return [TimedOperator(*name, seconds=each) for name, each in zip(names, medians, strict=True)]


@contextmanager
def _timing() -> Iterator[Any]:
    core = native.core()
    core.op_timer_take()
    core.op_timer_enable(True)
    try:
        yield core
    finally:
        core.op_timer_enable(False)
