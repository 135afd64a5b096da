"""A request as passes through all layers: what the objective is counted for, and what is predicted."""

from __future__ import annotations

from dataclasses import replace

from ...data.workload import Workload
from .problem import Pass

# llama.cpp's masks are of f16 (flash attention), for KV cells in groups of so many.
MASK_BYTES, KV_CELLS = 2, 256


# Tokens of micro-batches that are tried for a pipeline's prompts: with small ones its parts overlap more (predict.py).
MICRO_BATCHES = (256, 128)


def micro_batches(request: Workload, n_ubatch: int) -> tuple[int, ...]:
    """The sizes that are tried: the given one, and smaller ones into which a prompt is cut."""
    return (n_ubatch, *(n for n in MICRO_BATCHES if n < min(n_ubatch, request.n_prompt)))


def prompt_passes(request: Workload, n_ubatch: int, n_ctx: int) -> tuple[Pass, ...]:
    """Every sequence's prompt in micro-batches. Only the last row of a prompt reaches the head.

    Long prompts go through one after another. Of short ones llama-server computes the first that comes; those that wait
    meanwhile are joined.
    n_ctx: tokens of context; a device is sent the mask of the KV cells in use, too. 0: no mask.
    """
    n_prompt, end = request.n_prompt, request.depth + request.n_prompt
    if request.n_parallel > 1 and 0 < n_prompt < n_ubatch:
        full, rest = divmod((request.n_parallel - 1) * n_prompt, n_ubatch)
        sizes = [(n_prompt, 1), (n_ubatch, full), (rest, 1)]
        row = _mask_row(end, n_ctx)
        return tuple(Pass(n, max(1, n // n_prompt), n * row, k, after_pause=True) for n, k in sizes if n and k)
    return tuple(
        Pass(n, int(depth == end), n * _mask_row(depth, n_ctx), request.n_parallel, after_pause=True)
        for n, depth in request.chunks(n_ubatch)
    )


def token_pass(request: Workload, n_ctx: int) -> Pass:
    """One token of every answer, at once."""
    n = request.n_parallel
    return Pass(n, n, n * _mask_row(request.depth + request.n_prompt + 1, n_ctx))


def request_passes(request: Workload, n_ubatch: int, n_ctx: int) -> tuple[Pass, ...]:
    """The whole request; its seconds are TTFT + (n_generate - 1) TPOT."""
    rest = replace(token_pass(request, n_ctx), count=request.n_generate - 1)
    return (*prompt_passes(request, n_ubatch, n_ctx), *([rest] if rest.count else []))


def request_seconds(request: Workload, ttft_s: float, tpot_s: float) -> float:
    """From the prompts to the last token of every answer."""
    return ttft_s + (request.n_generate - 1) * tpot_s


def _mask_row(depth: int, n_ctx: int) -> int:
    """Bytes of the mask of one token that sees `depth` positions."""
    return MASK_BYTES * min(n_ctx, -(-depth // KV_CELLS) * KV_CELLS)
