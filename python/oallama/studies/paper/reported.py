"""What the OATO paper reports (Zhang et al., J. NUDT 47(6), 2025), as far as docs/sources.md, 1 quotes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One reported number: OATO is `percent` faster than `baseline`.

    share: of the weights on the GPU, None where it is not stated. metric: "e2e", "ttft", or "" where it is not stated
    (then compared with e2e). prompt: its tokens, None where "up to" or not stated.
    """

    model: str
    share: float | None
    metric: str
    baseline: str
    percent: float
    words: str


LLAMA_CPP, FLEXGEN = "llama.cpp", "FlexGen"
CLAIMS = (
    Claim("llama3-8b", 0.50, "e2e", LLAMA_CPP, 17.4, "end to end"),
    Claim("qwq-32b", None, "e2e", LLAMA_CPP, 6.3, "end to end"),
    Claim("llama3-8b", 0.50, "e2e", FLEXGEN, 46.2, "end to end"),
    Claim("qwq-32b", None, "e2e", FLEXGEN, 36.2, "end to end"),
    Claim("llama3-8b", 0.25, "", LLAMA_CPP, 15.5, "by share of the weights"),
    Claim("llama3-8b", 0.50, "", LLAMA_CPP, 20.7, "by share of the weights"),
    Claim("llama3-8b", 0.75, "", LLAMA_CPP, 40.8, "by share of the weights"),
    Claim("llama3-8b", 0.25, "", FLEXGEN, 43.0, "by share of the weights"),
    Claim("llama3-8b", 0.50, "", FLEXGEN, 47.4, "by share of the weights"),
    Claim("llama3-8b", 0.75, "", FLEXGEN, 64.5, "by share of the weights"),
    Claim("minicpm3-4b", 0.25, "ttft", LLAMA_CPP, 41.8, "TTFT, up to"),
    Claim("llama3-8b", 0.75, "ttft", LLAMA_CPP, 100.0, "TTFT, nearly 2x"),
    Claim("qwq-32b", None, "ttft", FLEXGEN, 28.0, "TTFT"),
)
