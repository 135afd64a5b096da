"""The request a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from .entries import padded_rows


def context_of_each(n_ctx: int, n_sequences: int) -> int:
    """Tokens of context that each of so many sequences has: llama.cpp divides a cache that is not unified."""
    return n_ctx if n_sequences == 1 else padded_rows(n_ctx // n_sequences)


@dataclass(frozen=True)
class Workload:
    """The request a plan is optimised for, in tokens.

    n_prompt = 0 optimises generation alone. depth: tokens in the KV cache before the prompt. n_parallel: sequences
    that generate together, one token each in every step.
    """

    n_prompt: int = 512
    n_generate: int = 128
    depth: int = 0
    n_parallel: int = 1

    def chunks(self, n_ubatch: int) -> list[tuple[int, int]]:
        """Prefill in micro-batches: (tokens, depth after them)."""
        starts = range(0, self.n_prompt, n_ubatch)
        return [
            (min(n_ubatch, self.n_prompt - start), self.depth + min(start + n_ubatch, self.n_prompt))
            for start in starts
        ]

    @property
    def middle(self) -> int:
        """The depth half-way through the answer, where the mean TPOT is predicted."""
        return self.depth + self.n_prompt + self.n_generate // 2
