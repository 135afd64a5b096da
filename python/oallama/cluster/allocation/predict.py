"""What a pipeline will take: seconds per token and to the first token. No QoS terms: these are times to be measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import OallamaError
from .problem import Problem
from .terms import used_links

# llama.cpp's masks are of f16 (flash attention), for KV cells in groups of so many.
MASK_BYTES, KV_CELLS = 2, 256


@dataclass(frozen=True)
class ExpectedLatency:
    """ttft_s: of the prompt; tpot_s: of a token after it, both in seconds. The parts add up to them."""

    ttft_compute_s: float
    ttft_links_s: float
    tpot_compute_s: float
    tpot_links_s: float

    @property
    def ttft_s(self) -> float:
        return self.ttft_compute_s + self.ttft_links_s

    @property
    def tpot_s(self) -> float:
        return self.tpot_compute_s + self.tpot_links_s


def predict_latency(
    problem: Problem,
    layers: Sequence[str],
    n_prompt: int,
    *,
    n_ubatch: int = 512,
    payload_share: float = 1.0,
    n_ctx: int = 0,
) -> ExpectedLatency:
    """Predict a pipeline's TTFT for `n_prompt` tokens, and its TPOT.

    The prompt goes through in micro-batches of `n_ubatch`, one after another (ggml's RPC devices do not overlap them).
    Only its last token is handed back to the client and reaches the head.

    Args:
        layers: the device of every layer, as in Allocation.layers.
        payload_share: E_p for the transfers; default 1, as bandwidth is measured with payload.
        n_ctx: tokens of context: every server is sent the attention mask of the KV cells in use, too. 0: none.

    Raises:
        OallamaError: for a device or link that is not known, and for sizes below 1.
    """
    if n_prompt < 1 or n_ubatch < 1:
        raise OallamaError(f"n_prompt is {n_prompt}, n_ubatch {n_ubatch}; expected at least 1 each")
    batches = [n_ubatch] * (n_prompt // n_ubatch) + [n_prompt % n_ubatch] * (n_prompt % n_ubatch > 0)
    head = problem.embedding.seconds_on(problem.client, 1)

    def compute(n_tokens: int) -> float:
        pairs = zip(problem.layers, layers, strict=True)
        return sum(layer.seconds_on(problem.device(name), n_tokens) for layer, name in pairs)

    def links(n_tokens: int, returned: int, depth: int) -> float:
        """returned: tokens that the last device hands to the head. depth: positions that the last token sees."""
        mask = MASK_BYTES * min(n_ctx, -(-depth // KV_CELLS) * KV_CELLS)
        seconds = 0.0
        for link in used_links(problem, layers):
            rows = n_tokens if link.after < len(layers) else returned
            source = problem.layers[link.after - 1] if link.after else problem.embedding
            nbytes = rows * source.output_bytes
            if link.target != problem.client.name:
                nbytes += n_tokens * mask
            if rows:
                seconds += link.quality.mean_s(nbytes, payload_share)
        return seconds

    last = len(batches) - 1
    return ExpectedLatency(
        ttft_compute_s=sum(map(compute, batches)) + head,
        ttft_links_s=sum(links(n, int(at == last), sum(batches[: at + 1])) for at, n in enumerate(batches)),
        tpot_compute_s=compute(1) + head,
        tpot_links_s=links(1, 1, n_prompt + 1),
    )
