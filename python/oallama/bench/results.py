"""What a benchmark leaves behind: one Result per engine and cell, with every sample. Data only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from .stats import Ratio, Summary, itl, speedup, summarize, tpot


@dataclass(frozen=True, order=True)
class Cell:
    """One point of a sweep, in tokens: a prompt processed behind `depth` cached tokens, then `gen` tokens generated."""

    depth: int
    prompt: int
    gen: int

    def __str__(self) -> str:
        """llama-bench's name for the test, as "pp64+tg32 @ d0"."""
        return f"pp{self.prompt}+tg{self.gen} @ d{self.depth}"


@dataclass(frozen=True)
class ExpectedTimes:
    """What the planner expects of one cell, in seconds; None where it has no opinion."""

    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True)
class Sample:
    """One run: when each token was there, in seconds since the start of prompt processing, and which token it was."""

    round: int
    token_times_s: tuple[float, ...]
    tokens: tuple[int, ...]

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1]

    @property
    def tpot_s(self) -> float | None:
        return tpot(self.token_times_s)

    @property
    def tokens_sha256(self) -> str:
        return hashlib.sha256(repr(self.tokens).encode()).hexdigest()[:16]


@dataclass
class Loaded:
    """An engine after its load. memory: bytes by buffer type and kind, as llama.cpp logged them (0.01 MiB steps).

    first_prompts: (tokens, TTFT in seconds) of the first prompt after each load, into an empty cache: what it waits for
    (kernels that are loaded, memory that is pinned and read) later ones do not.
    """

    load_s: list[float]
    model: dict[str, Any]
    devices: list[dict[str, Any]]
    memory: dict[str, dict[str, int]]
    peak_rss_bytes: int | None = None
    gpu_process_bytes: int | None = None
    first_prompts: list[tuple[int, float]] = field(default_factory=list)

    def device_bytes(self) -> dict[str, int]:
        """Bytes in each device's own memory; host buffers, pinned ones included, do not count."""
        of = {d["buffer_type"]: d["name"] for d in self.devices if d["kind"] in ("gpu", "igpu")}
        return {of[buffer]: sum(sizes.values()) for buffer, sizes in self.memory.items() if buffer in of}


@dataclass
class Result:
    """All that was measured of one engine in one cell; `error` says why an optional engine has no samples."""

    engine: str
    placement: str
    cell: Cell
    baseline: bool
    params: dict[str, Any]
    env: dict[str, str]
    lib_dir: str
    plan_hash: str | None
    predicted_bytes: dict[str, int] | None
    prediction: ExpectedTimes
    environment: Mapping[str, Any]
    loaded: Loaded | None = None
    samples: list[Sample] = field(default_factory=list)
    warmups: list[Sample] = field(default_factory=list)
    error: str | None = None

    def values(self, name: str) -> list[float]:
        """The samples of "ttft_s", "tpot_s" or "e2e_s" in order of rounds, or every gap of all runs for "itl_s"."""
        if name == "itl_s":
            return [gap for s in self.samples for gap in itl(s.token_times_s)]
        return [v for s in self.samples if (v := getattr(s, name)) is not None]

    def summary(self, name: str) -> Summary | None:
        return summarize(self.values(name))

    def device_bytes(self) -> int | None:
        return sum(self.loaded.device_bytes().values()) if self.loaded else None

    def deterministic(self) -> bool:
        """Whether every run of this engine gave the same tokens."""
        return len({s.tokens for s in self.samples}) <= 1


def first_prompts(results: Iterable[Result]) -> list[str]:
    """A line per engine: TTFT of the first prompt after a load beside the median of later prompts of that length."""
    lines = {}
    for result in results:
        if result.engine in lines or result.loaded is None or not result.samples:
            continue
        first = [s for n, s in result.loaded.first_prompts if (0, n) == (result.cell.depth, result.cell.prompt)]
        later = result.summary("ttft_s")
        if first and later:
            lines[result.engine] = (
                f"{result.engine}: the first prompt after a load ({result.cell.prompt} tokens) took "
                f"{1e3 * median(first):.1f} ms, later ones {1e3 * later.p50:.1f} ms"
            )
    return list(lines.values())


@dataclass(frozen=True)
class Comparison:
    """One result against the baseline's in the same cell: speed-ups above 1 mean faster."""

    ttft: Ratio | None
    tpot: Ratio | None
    e2e: Ratio | None
    same_tokens: bool


def compare(result: Result, results: Iterable[Result]) -> Comparison | None:
    """Compare with the first baseline among `results` that has samples in the same cell; None if that is impossible."""
    base = next((r for r in results if r.baseline and r.cell == result.cell and r.samples), None)
    if base is None or base is result or not result.samples:
        return None
    ttft, tpot_, e2e = (speedup(base.values(name), result.values(name)) for name in ("ttft_s", "tpot_s", "e2e_s"))
    return Comparison(ttft, tpot_, e2e, base.samples[0].tokens == result.samples[0].tokens)
