"""Lengths of requests in tokens: those of two published traces, fixed ones, or pairs from a file."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oallama.errors import OallamaError

LONGEST = 2048
BLOCK = 4096
# Columns of the traces themselves (Azure/AzurePublicDataset, HPMLL/BurstGPT, Mooncake) and of OpenAI's `usage`.
PROMPT_COLUMNS = ("prompt_tokens", "contexttokens", "request tokens", "input_tokens", "input_length", "prompt", "input")
ANSWER_COLUMNS = (
    "completion_tokens", "generatedtokens", "response tokens", "output_tokens", "output_length", "answer", "output"
)  # fmt: skip


@dataclass(frozen=True)
class Lengths:
    """A distribution of request lengths.

    Attributes:
        name: as the user gave it.
        scale: factor on both lengths; each is one token at least.
        sample: (rng, n) -> n unscaled pairs (tokens of the prompt, tokens of the answer), shape (n, 2).
    """

    name: str
    scale: float
    sample: Callable[[np.random.Generator, int], np.ndarray]

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """n pairs of whole tokens, shape (n, 2); the first k of them do not depend on n."""
        return np.maximum(1, np.rint(self.sample(rng, n) * self.scale)).astype(int)


@dataclass(frozen=True)
class Trace:
    """Prompts and answers are independent and log-normal (mu, sigma); pairs of more than LONGEST tokens are dropped.

    What the paper (Weaver, ATC 2025) gives are the means after dropping; mu and sigma are solved so that they come out
    exactly and the logarithms deviate by as much as in excerpts of the traces: 212 rows of
    AzureLLMInferenceTrace_conv.csv from 18:41:12 on (160 are kept, means 689 and 195, deviations 0.74 and 0.82) and the
    first 32 answered rows of BurstGPT_1.csv (29 kept, means 589 and 346, deviations 1.41 and 0.80). The form is
    assumed: in the Azure excerpt prompts gather near 390 and 1100 tokens, and prompts and answers correlate (0.44).
    """

    prompt: tuple[float, float]
    answer: tuple[float, float]

    def sample(self, rng: np.random.Generator, n: int) -> np.ndarray:
        kept = [np.empty((0, 2))]
        while sum(map(len, kept)) < n:
            drawn = np.stack([rng.lognormal(*side, size=BLOCK) for side in (self.prompt, self.answer)], axis=1)
            kept.append(drawn[drawn.sum(axis=1) <= LONGEST])
        return np.concatenate(kept)[:n]


TRACES = {
    "burstgpt": Trace((9.2818, 2.8141), (5.6257, 0.8582)),  # means 575 and 340
    "azure-conv": Trace((6.8424, 1.0312), (5.1934, 0.8333)),  # means 749 and 232
}


def parse_lengths(text: str, scale: float = 1.0) -> Lengths:
    """The distribution a user names: one of TRACES, "PROMPT:ANSWER" in tokens, or a file of pairs.

    A file is CSV with a header that names the columns (those of the published traces are known), CSV of two columns
    without one, or JSON lines; its pairs are drawn with equal chance, without those that have no prompt or no answer.

    Raises:
        OallamaError: an unknown name, a file that cannot be read or has no pairs, or a scale that is not above 0.

    >>> parse_lengths("128:64").draw(np.random.default_rng(0), 1).tolist()
    [[128, 64]]
    """
    if not scale > 0:
        raise OallamaError(f"lengths are scaled by a factor above 0, got {scale:g}")
    if text in TRACES:
        return Lengths(text, scale, TRACES[text].sample)
    if fixed := re.fullmatch(r"(\d+):(\d+)", text):
        pair = np.array([int(fixed[1]), int(fixed[2])])
        if not pair.all():
            raise OallamaError(f"a request has one token at least in its prompt and in its answer, got {text}")
        return Lengths(text, scale, lambda rng, n: np.tile(pair, (n, 1)))
    if not Path(text).is_file():
        names = ", ".join(TRACES)
        raise OallamaError(f"unknown lengths {text!r}; expected {names}, PROMPT:ANSWER in tokens, or a file of pairs")
    pairs = read_pairs(Path(text))
    return Lengths(text, scale, lambda rng, n: pairs[rng.integers(len(pairs), size=n)])


def read_pairs(path: Path) -> np.ndarray:
    """Pairs (tokens of the prompt, of the answer) of a CSV or JSONL file, shape (n, 2); errors as `parse_lengths`."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OallamaError(f"cannot read lengths from {path}: {error}") from None
    rows = [line for line in lines if line.strip()]
    try:
        pairs = [*(_of_json(rows) if rows and rows[0].lstrip()[0] in "[{" else _of_csv(rows))]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        known = f"{', '.join(PROMPT_COLUMNS)} and {', '.join(ANSWER_COLUMNS)}"
        raise OallamaError(f"no pairs of lengths in {path} ({error}); known columns are {known}") from None
    kept = [pair for pair in pairs if min(pair) > 0]
    if not kept:
        raise OallamaError(f"no pairs of lengths in {path}")
    return np.array(kept)


def _of_json(rows: Iterable[str]) -> Iterable[tuple[int, int]]:
    for row in rows:
        value = json.loads(row)
        yield _named(value) if isinstance(value, dict) else (int(value[0]), int(value[1]))


def _of_csv(rows: list[str]) -> Iterable[tuple[int, int]]:
    if re.fullmatch(r"[\d\s,]*", rows[0]) if rows else True:
        yield from ((int(row[0]), int(row[1])) for row in csv.reader(rows))
    else:
        yield from map(_named, csv.DictReader(rows))


def _named(row: dict[str, Any]) -> tuple[int, int]:
    lower = {str(name).strip().lower(): value for name, value in row.items()}
    prompt, answer = (next((n for n in names if n in lower), "no column") for names in (PROMPT_COLUMNS, ANSWER_COLUMNS))
    return int(lower[prompt]), int(lower[answer])
