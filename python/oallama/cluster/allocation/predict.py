"""What a pipeline will take: seconds per token and to the first token. No QoS terms: these are times to be measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...data.workload import Workload
from .passes import prompt_passes, token_pass
from .problem import Pass, Problem, messages
from .terms import head_seconds, used_links


@dataclass(frozen=True)
class ExpectedLatency:
    """ttft_s: until every sequence has its first token; tpot_s: of a token after it, in seconds. The parts add up."""

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
    request: Workload,
    *,
    n_ubatch: int = 512,
    payload_share: float = 1.0,
    n_ctx: int = 0,
) -> ExpectedLatency:
    """Predict a pipeline's TTFT and TPOT.

    Micro-batches go through one after another (ggml's RPC devices do not overlap them).

    Args:
        layers: the device of every layer, as in Allocation.layers.
        payload_share: E_p for the transfers; default 1, as bandwidth is measured with payload.
        n_ctx: tokens of context: every server is sent the attention mask of the KV cells in use, too. 0: none.

    Raises:
        OallamaError: for a device or link that is not known.
    """

    def times(passes: tuple[Pass, ...]) -> tuple[float, float]:
        counted = replace(problem, passes=passes)
        pairs = zip(problem.layers, layers, strict=True)
        compute = sum(counted.seconds_on(problem.device(name), layer) for layer, name in pairs)
        return compute + head_seconds(counted), _links_seconds(counted, layers, payload_share)

    return ExpectedLatency(*times(prompt_passes(request, n_ubatch, n_ctx)), *times((token_pass(request, n_ctx),)))


def _links_seconds(problem: Problem, layers: Sequence[str], payload_share: float) -> float:
    seconds = 0.0
    for link in used_links(problem, layers):
        row_bytes = (problem.layers[link.after - 1] if link.after else problem.embedding).output_bytes
        to_client, last = link.target == problem.client.name, link.after == len(layers)
        for each in messages(problem, row_bytes, to_client=to_client, last=last):
            slow_start = link.quality.slow_start_s(each.nbytes) if each.after_pause else 0.0
            seconds += each.times * (link.quality.mean_s(each.nbytes, payload_share) + slow_start)
    return seconds
