"""What a pipeline will take: seconds per token and to the first token. No QoS terms: these are times to be measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...data.workload import Workload
from .passes import prompt_passes, token_pass
from .problem import Pass, Problem, messages
from .terms import head_seconds, used_links


@dataclass(frozen=True)
class ExpectedLatency:
    """ttft_s: until every sequence has its first token; tpot_s: of a token after it, in seconds. The parts add up.

    ttft_saved_s: less, because the last device computes a micro-batch while the others begin the next one.
    """

    ttft_compute_s: float
    ttft_links_s: float
    tpot_compute_s: float
    tpot_links_s: float
    ttft_saved_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.ttft_compute_s + self.ttft_links_s - self.ttft_saved_s

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
    n_batch: int = 2048,
    n_ctx: int = 0,
) -> ExpectedLatency:
    """Predict a pipeline's TTFT and TPOT.

    The client hands a micro-batch to the last device and goes on with the next one. It waits for all others, because
    it fetches their results, and at the end of a batch.

    Args:
        layers: the device of every layer, as in Allocation.layers.
        payload_share: E_p for the transfers; default 1, as bandwidth is measured with payload.
        n_ubatch, n_batch: tokens of a micro-batch, and of a batch of them.
        n_ctx: tokens of context: every server is sent the attention mask of the KV cells in use, too. 0: none.

    Raises:
        OallamaError: for a device or link that is not known.
    """

    def times(passes: tuple[Pass, ...]) -> tuple[float, float]:
        counted = replace(problem, passes=passes)
        pairs = zip(problem.layers, layers, strict=True)
        compute = sum(counted.seconds_on(problem.device(name), layer) for layer, name in pairs)
        return compute + head_seconds(counted), _links_seconds(counted, layers, payload_share)

    prompts = prompt_passes(request, n_ubatch, n_ctx)
    saved = _saved_seconds(problem, layers, prompts, payload_share, n_batch)
    return ExpectedLatency(*times(prompts), *times((token_pass(request, n_ctx),)), saved)


def _saved_seconds(
    problem: Problem, layers: Sequence[str], prompts: Sequence[Pass], payload_share: float, n_batch: int
) -> float:
    """By how much prompts are through sooner than one micro-batch after the other."""
    last = layers[-1]
    first = next((at + 1 for at in reversed(range(len(layers))) if layers[at] != last), 0)
    if last == problem.client.name or last in layers[:first]:
        return 0.0
    handed, done, total, waiting = 0.0, 0.0, 0.0, 0
    for each in _in_order(prompts):
        one = replace(problem, passes=(replace(each, count=1),))
        seconds = [one.seconds_on(one.device(name), layer) for layer, name in zip(one.layers, layers, strict=True)]
        there = _links_seconds(one, layers, payload_share, until=first)
        back = _links_seconds(one, layers, payload_share) - there
        waiting += each.n_tokens
        handed += sum(seconds[:first]) + there
        done = max(handed, done) + sum(seconds[first:])
        if each.n_returned or waiting >= n_batch:
            handed = done = done + back
            waiting = 0
        total += sum(seconds) + there + back
    return total - done


def _in_order(prompts: Sequence[Pass]) -> Iterator[Pass]:
    """Passes one by one: the micro-batches of a prompt that is longer than one, then those of the next prompt."""
    if len(counts := {each.count for each in prompts}) == 1:
        for _ in range(counts.pop()):
            yield from prompts
    else:
        for each in prompts:
            yield from [each] * each.count


def _links_seconds(problem: Problem, layers: Sequence[str], payload_share: float, until: int | None = None) -> float:
    """until: of the crossings before this layer."""
    seconds = 0.0
    for link in used_links(problem, layers):
        if until is not None and link.after > until:
            break
        row_bytes = (problem.layers[link.after - 1] if link.after else problem.embedding).output_bytes
        to_client, last = link.target == problem.client.name, link.after == len(layers)
        for each in messages(problem, row_bytes, to_client=to_client, last=last):
            slow_start = link.quality.slow_start_s(each.nbytes) if each.after_pause else 0.0
            seconds += each.times * (link.quality.mean_s(each.nbytes, payload_share) + slow_start)
    return seconds
