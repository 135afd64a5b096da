"""One completion of a loaded model: streamed to standard output, and timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oallama.base.printing import seconds, write_text
from oallama.engine import runtime
from oallama.errors import OallamaError


@dataclass
class TokenClock:
    """Notes when each token was sampled; given to llama-cpp-python as a stopping criterion that never stops."""

    start: float = field(default_factory=time.perf_counter)
    times: list[float] = field(default_factory=list)
    _length: int = 0

    def __call__(self, tokens: Any, logits: Any) -> bool:
        if len(tokens) > self._length:  # upstream asks once more at the end
            self._length = len(tokens)
            self.times.append(time.perf_counter() - self.start)
        return False

    @property
    def ttft_s(self) -> float | None:
        return self.times[0] if self.times else None

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (n - 1)."""
        n = len(self.times)
        return (self.times[-1] - self.times[0]) / (n - 1) if n > 1 else None

    def summary(self, n_prompt: int) -> str:
        speed = f" ({1 / self.tpot_s:.1f} tokens/s)" if self.tpot_s else ""
        return (
            f"{n_prompt} prompt tokens, {len(self.times)} generated: "
            f"TTFT {seconds(self.ttft_s)}, TPOT {seconds(self.tpot_s)}{speed}"
        )


def warm_up(llm: Any) -> None:
    """Compute one token and forget it: a device's first graph after loading takes longer than those that follow."""
    llm.eval([max(0, llm.token_bos())])
    runtime.llama_cpp().llama_synchronize(llm.ctx)
    llm.reset()


def complete(
    llm: Any,
    prompt: str,
    n_generate: int,
    temperature: float,
    seed: int | None,
    quiet: bool = False,
    stop: Sequence[str] = (),
) -> tuple[TokenClock, str]:
    """Stream one completion to stdout (unless quiet); returns its clock and text."""
    import oallama

    clock, answer = TokenClock(), []
    try:
        stream = llm.create_completion(
            prompt,
            max_tokens=n_generate,
            temperature=temperature,
            seed=seed,
            stream=True,
            stop=list(stop),
            stopping_criteria=oallama.StoppingCriteriaList([clock]),
        )
        for chunk in stream:
            answer.append(chunk["choices"][0]["text"])
            if not quiet:
                write_text(answer[-1])
    except ValueError as error:
        if "context window" not in str(error):
            raise
        raise OallamaError(f"{error}; shorten the prompt or raise --ctx") from error
    if not quiet:
        print()
    return clock, "".join(answer)
