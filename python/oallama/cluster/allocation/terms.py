"""What an allocation costs, term by term (docs/sources.md, 5). Seconds throughout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import NamedTuple

from .network import LinkQuality
from .problem import MS, Crossing, Problem, messages


@dataclass(frozen=True)
class Terms:
    """The objective's terms in seconds.

    T_compute = compute_s (embedding and head included), T_data = latency_s + transfer_s, T_complexity = complexity_s,
    T_QoS = jitter_s + loss_s + loss_variance_s. `time_s` is what a token really takes, `total_s` what is minimised.
    """

    compute_s: float
    latency_s: float
    transfer_s: float
    complexity_s: float
    jitter_s: float
    loss_s: float
    loss_variance_s: float

    @property
    def data_s(self) -> float:
        return self.latency_s + self.transfer_s

    @property
    def qos_s(self) -> float:
        return self.jitter_s + self.loss_s + self.loss_variance_s

    @property
    def time_s(self) -> float:
        return self.compute_s + self.data_s

    @property
    def total_s(self) -> float:
        return self.time_s + self.complexity_s + self.qos_s

    def to_dict(self) -> dict[str, float]:
        """For JSON: every term, and the total."""
        return {**asdict(self), "total_s": self.total_s}


class UsedLink(NamedTuple):
    """A crossing of a link: the output of sub-model `after` (0: the embedding) goes from source to target."""

    source: str
    target: str
    after: int
    quality: LinkQuality


def used_links(problem: Problem, layers: Sequence[str]) -> Iterator[UsedLink]:
    """Every crossing of a link by one token, in order; `layers` names the device of every layer.

    The patent counts a used link once. A contiguous pipeline crosses a link once at most, so that crossings are the
    same; where layers of a device are scattered the data does cross again, and pays again.
    """
    client = problem.client.name
    for after, (source, target) in enumerate(pairwise([client, *layers, client])):
        for a, b in route(problem, source, target):
            yield UsedLink(a, b, after, problem.network.link(a, b))


def route(problem: Problem, source: str, target: str) -> list[tuple[str, str]]:
    """The links that data takes from one device to another by the problem's link model; none to the device itself."""
    if source == target:
        return []
    client = problem.client.name
    if problem.links == "via-client" and client not in (source, target):
        return [(source, client), (client, target)]
    return [(source, target)]


def price(problem: Problem, layers: Sequence[str]) -> Terms:
    """The terms of an allocation. Raises OallamaError for a device or link the problem does not know."""
    weights = problem.settings
    outputs = [problem.embedding.output_bytes, *(layer.output_bytes for layer in problem.layers)]
    compute = head_seconds(problem)
    for layer, name in zip(problem.layers, layers, strict=True):
        compute += problem.seconds_on(problem.device(name), layer)
    sums = [0.0] * len(Crossing._fields)
    for link in used_links(problem, layers):
        to_client, last = link.target == problem.client.name, link.after == len(layers)
        for message in messages(problem, outputs[link.after], to_client=to_client, last=last):
            crossing = weights.crossing(link.quality, message)
            sums = [total + message.times * term for total, term in zip(sums, crossing, strict=True)]
    latency, transfer, jitter, loss, variance = sums
    n_passes = sum(each.count for each in problem.passes)
    return Terms(compute, latency, transfer, weights.w_c * MS * len(layers) * n_passes, jitter, loss, variance)


def head_seconds(problem: Problem) -> float:
    """Seconds of embedding and head on the client, for all passes: the rows that the last layer hands back."""
    rows = ((each.count, each.n_returned) for each in problem.passes if each.n_returned)
    return sum(count * problem.embedding.seconds_on(problem.client, n) for count, n in rows)
