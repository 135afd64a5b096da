"""Runs one request on a loaded model and notes what its devices and links did."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oallama.engine import native
from oallama.errors import OallamaError

from .timeline import Span, Stage, Timeline

# Decode steps before anything is noted: the first ones touch memory for the first time.
WARM_UP = 2


def record_timeline(llm: Any, n_prompt: int, n_generate: int, seed: int = 1) -> Timeline:
    """One prefill of `n_prompt` random tokens and `n_generate` decode steps, after a run of the same kind.

    llm: a `Llama`; its cache is cleared. Splits and copies are waited for one by one while they are noted, so times
    are those of the parts, not of the best case. Raises OallamaError when the request exceeds the context.
    """
    if n_prompt + n_generate > llm.n_ctx():
        raise OallamaError(
            f"{n_prompt} + {n_generate} tokens exceed the context of {llm.n_ctx()}; give a larger --ctx or fewer tokens"
        )
    random_ids = random.Random(seed)
    tokens = [random_ids.randrange(llm.n_vocab()) for _ in range(n_prompt + n_generate)]
    prompt, rest = tokens[:n_prompt], tokens[n_prompt:]
    _eval(llm, prompt, rest[:WARM_UP])
    with recorded_spans() as spans:
        stages = _eval(llm, prompt, rest)
    return Timeline(tuple(spans), tuple(stages))


def _eval(llm: Any, prompt: list[int], rest: list[int]) -> list[Stage]:
    llm.reset()
    stages = []
    for name, batches in (("prefill", [prompt]), ("decode", [[token] for token in rest])):
        begin = time.monotonic()
        for batch in batches:
            llm.eval(batch)
        if batches:
            stages.append(Stage(name, begin, time.monotonic()))
    return stages


@contextmanager
def recorded_spans() -> Iterator[list[Span]]:
    """What devices and links do meanwhile, filled in at the end. Splits and copies are waited for one by one."""
    core, spans = native.core(), list[Span]()
    core.trace_take()
    core.trace_enable(True)
    try:
        yield spans
    finally:
        core.trace_enable(False)
        spans.extend(Span(*fields) for fields in core.trace_take())
