"""Prompts of given lengths that have nothing in common, so that a server's prompt cache is of no use to it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .arrivals import Request

TEXT = Path(__file__).parents[1] / "prompts" / "alice.txt"
TOKENS_PER_WORD = 4 / 3  # of English text, where the server does not tell


def sample_text() -> str:
    """The text whose words and tokens prompts are made of (bench/README.md says where it comes from)."""
    return TEXT.read_text("utf-8")


@dataclass(frozen=True)
class Prompts:
    """Makes a model's prompts from a pool of tokens (lengths are exact) or of words (lengths are right on average).

    A prompt begins with an element that no other of the last len(pool) prompts begins with; the rest is drawn.

    Attributes:
        pool: different tokens, or different words.
        tokens_per_word: of words.
    """

    pool: tuple[int, ...] | tuple[str, ...]
    tokens_per_word: float = TOKENS_PER_WORD

    def make(self, request: Request, salt: int) -> list[int] | str:
        """The prompt of a request, as token ids or as text; another salt gives another one."""
        rng = np.random.default_rng([salt, request.number])
        first = self.pool[(salt + request.number) % len(self.pool)]
        if isinstance(first, int):
            rest = rng.choice(np.array(self.pool, dtype=int), request.n_prompt - 1)
            return [first, *map(int, rest)]
        n_words = max(1, round(request.n_prompt / self.tokens_per_word))
        return " ".join([first, *map(str, rng.choice(np.array(self.pool), n_words - 1))])


def of_tokens(tokens: list[int]) -> Prompts:
    """From the tokens of `sample_text`, as the server's /tokenize gives them."""
    return Prompts(tuple(dict.fromkeys(tokens)))


def of_words(n_tokens: int | None = None) -> Prompts:
    """From the words of `sample_text`; n_tokens: how many tokens the text is to the model, None if nobody knows."""
    words = re.findall(r"[A-Za-z]+", sample_text())
    pool = tuple(dict.fromkeys(words))
    return Prompts(pool, n_tokens / len(words) if n_tokens else TOKENS_PER_WORD)
