"""What ranks will take: their shares of the matrices, and the sums between them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oallama.data.curves import Points, log_log
from oallama.data.workload import Workload

from ..allocation.passes import prompt_passes, token_pass
from ..allocation.problem import Pass, Problem
from ..ranks.parts import Part

SUMS_PER_LAYER = 2  # after attention, after the feed-forward
LOGIT_BYTES = 4


@dataclass(frozen=True)
class RankTimes:
    """What ranks are predicted from.

    shares: of the model, by device of the problem; the client's first. parts: of a layer, as they are dealt out to
    these devices; without any all of it is by the shares. sums: (bytes, seconds) of an all-reduce of theirs, ascending.
    slower: by how much a device computes longer while all others compute, too. n_vocab: logits of a row, which come to
    the client.
    """

    shares: Mapping[str, float]
    sums: Points
    slower: Mapping[str, float]
    n_vocab: int
    parts: tuple[Part, ...] = ()


def predict_ranks(problem: Problem, ranks: RankTimes, request: Workload, n_ubatch: int) -> tuple[float, float]:
    """TTFT and TPOT of a request, in seconds; TTFT is until every sequence has its first token."""
    prompt = sum(each.count * _pass_seconds(problem, ranks, each) for each in prompt_passes(request, n_ubatch, 0))
    return prompt, _pass_seconds(problem, ranks, token_pass(request, 0))


def _pass_seconds(problem: Problem, ranks: RankTimes, each: Pass) -> float:
    row = problem.layers[0].output_bytes
    sums = SUMS_PER_LAYER * len(problem.layers) * log_log(ranks.sums, each.n_tokens * row)
    return (
        _call_seconds(problem, ranks)
        + _compute_seconds(problem, ranks, each)
        + sums
        + _gather_seconds(problem, ranks, each)
    )


def _call_seconds(problem: Problem, ranks: RankTimes) -> float:
    """Until the farthest rank has heard what to compute."""
    client = problem.client.name
    links = [problem.network.link(client, name) for name in ranks.shares if name != client]
    return max((link.latency_s for link in links), default=0.0)


def _compute_seconds(problem: Problem, ranks: RankTimes, each: Pass) -> float:
    """All wait for the slowest one, in each part of a layer."""
    shares = tuple(ranks.shares.values())
    whole = [_seconds_alone(problem, ranks, name, each) for name in ranks.shares]
    seconds = max(share * head for share, (_, head) in zip(shares, whole, strict=True))
    for part in ranks.parts or (Part(1.0, shares),):
        seconds += part.of_layer * max(of * layers for of, (layers, _) in zip(part.of_ranks, whole, strict=True))
    return seconds


def _seconds_alone(problem: Problem, ranks: RankTimes, name: str, each: Pass) -> tuple[float, float]:
    """Of all layers and of the head, if the device computed them whole."""
    device, client = problem.device(name), problem.client
    layers = sum(layer.seconds_on(device, each.n_tokens) for layer in problem.layers)
    own = sum(layer.seconds_on(client, each.n_tokens) for layer in problem.layers)
    head = problem.embedding.seconds_on(client, each.n_returned) * layers / own if each.n_returned else 0.0
    slower = ranks.slower.get(name, 1.0)
    return slower * layers, slower * head


def _gather_seconds(problem: Problem, ranks: RankTimes, each: Pass) -> float:
    """The other ranks' logits on their way to the client."""
    client, nbytes, seconds = problem.client.name, each.n_returned * LOGIT_BYTES * ranks.n_vocab, 0.0
    for name, share in ranks.shares.items():
        if nbytes and name != client:
            link = problem.network.link(name, client)
            seconds += link.mean_s(share * nbytes) - link.software_s  # what an RPC server adds
    return seconds
