"""What an allocation is made from: devices, links, layers and the weights of the objective. Data, nothing is solved.

Device 0 is the client: embedding and head stay with it (x_00 = 1). Times are seconds, sizes bytes, of one token unless
said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from ...data.curves import Points, log_log
from ...errors import OallamaError
from .network import LinkQuality, Network

# direct: data goes from i to k on the link i->k (the patent). via-client: ggml's RPC, whose client holds every tensor
# that crosses a boundary in between, so that it costs i->client and then client->k.
LinkModel = Literal["via-client", "direct"]
LINK_MODELS: tuple[LinkModel, ...] = ("via-client", "direct")
MS = 1e-3  # seconds in the unit of the weights w_c and wq3


@dataclass(frozen=True)
class Settings:
    """Weights of the objective, with the patent's typical values (docs/sources.md, 5), and its constraints.

    The patent gives the weights without units. The objective is taken in milliseconds: w_c and wq3 have that unit, wq1
    and wq2 multiply times and have none. (In seconds w_c = 1 would outweigh any layer, and 1 % of loss cost a second.)
    Every result is in seconds.

    Args:
        w_c: milliseconds per layer. Every layer is on one device, so this term is the same for all allocations.
        wq1: price of a second of jitter, in seconds.
        wq2: price of the expected retransmissions t * PLR, in seconds per second.
        wq3: milliseconds per squared share of lost packets (PLR^2).
        e_p: share of a link's bandwidth that is payload, in (0, 1]. 1 where the bandwidth was measured as payload.
        beta: share of a device's memory that layers may fill, in (0, 1]; not the patent's number, which names none.
        first_layer: name of the device that computes the first layer, the patent's x_00 = 1; None: any.
    """

    w_c: float = 1.0
    wq1: float = 10.0
    wq2: float = 1.0
    wq3: float = 10000.0
    e_p: float = 0.3
    beta: float = 0.9
    first_layer: str | None = None

    def __post_init__(self) -> None:
        for name in ("w_c", "wq1", "wq2", "wq3"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise OallamaError(f"weight {name} is {value!r}, expected 0 or more")
        for name, shown in (("e_p", "E_p"), ("beta", "beta")):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise OallamaError(f"setting {shown} is {value!r}, expected a share above 0, at most 1")

    def crossing(self, link: LinkQuality, message: Message) -> Crossing:
        """What a message over a link costs: L, t = O / (E_p * B), wq1 * jitter, wq2 * t * PLR, wq3 * PLR^2.

        L has the software's part in it, and the transfer TCP's slow start after a pause.
        """
        transfer = link.transfer_s(message.nbytes, self.e_p)
        return Crossing(
            latency_s=link.latency_s + link.software_s,
            transfer_s=transfer + (link.slow_start_s(message.nbytes) if message.after_pause else 0.0),
            jitter_s=self.wq1 * link.jitter_s,
            loss_s=self.wq2 * transfer * link.loss,
            loss_variance_s=self.wq3 * MS * link.loss**2,
        )


class Message(NamedTuple):
    """What passes send over a link, so many times. after_pause: the link has been idle before each."""

    times: int
    nbytes: int
    after_pause: bool


class Crossing(NamedTuple):
    """The terms of one crossing of a link, in seconds."""

    latency_s: float
    transfer_s: float
    jitter_s: float
    loss_s: float
    loss_variance_s: float


@dataclass(frozen=True)
class Device:
    """A device of the cluster.

    Args:
        name: unique; layers and links refer to it.
        memory_bytes: budget for layers (weights and KV cache). The client's holds embedding and head as well; 0 for
            the client means that it computes those alone, whatever memory they take.
        flops_per_s: measured with the model's own operators at one token.
        prefill_flops_per_s: the same at a full micro-batch; default, and at least: as at one token.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    prefill_flops_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise OallamaError(f"device {self.name}: memory_bytes is {self.memory_bytes}, expected 0 or more")
        for name in ("flops_per_s", "prefill_flops_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise OallamaError(f"device {self.name}: {name} is {value!r}, expected a finite number above 0")


@dataclass(frozen=True)
class Layer:
    """A sub-model j of the patent: one decoder layer, or embedding and head together (sub-model 0).

    Args:
        flops: of one token.
        memory_bytes: M_j: weights and KV cache.
        output_bytes: O_j: what one token hands to the next sub-model, n_embd * 4 for llama.cpp's f32.
        kv_bytes: the part of memory_bytes that is KV cache; a move of the layer carries it along.
        seconds: {device: ((n_tokens, seconds), ...)} measured, ascending; it goes before flops where it has the device.
    """

    flops: float
    memory_bytes: int
    output_bytes: int
    kv_bytes: int = 0
    seconds: Mapping[str, Points] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("flops", "memory_bytes", "output_bytes", "kv_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                raise OallamaError(f"layer {name} is {getattr(self, name)!r}, expected 0 or more")
        if self.kv_bytes > self.memory_bytes:
            raise OallamaError(f"layer kv_bytes is {self.kv_bytes}, expected at most memory_bytes {self.memory_bytes}")

    def seconds_on(self, device: Device, n_tokens: int = 1) -> float:
        """Seconds of `n_tokens` tokens at once.

        Measured points are interpolated. Without any, the roofline of the two rates: reading the weights takes as long
        as one token does, arithmetic n times one token's at the prefill rate; the longer of them.
        """
        if points := self.seconds.get(device.name):
            return log_log(points, n_tokens)
        prefill = max(device.prefill_flops_per_s or 0.0, device.flops_per_s)
        return max(self.flops / device.flops_per_s, n_tokens * self.flops / prefill)


@dataclass(frozen=True)
class Pass:
    """Tokens that go through all layers at once, `count` times.

    n_tokens: of one pass. n_returned: rows that the last layer hands to the head. mask_bytes: what a pass sends to a
    device beside its tokens. after_pause: links have been idle before it, because passes like it compute for long.
    """

    n_tokens: int = 1
    n_returned: int = 1
    mask_bytes: int = 0
    count: int = 1
    after_pause: bool = False

    def __post_init__(self) -> None:
        if self.n_tokens < 1 or min(self.n_returned, self.mask_bytes, self.count) < 0:
            raise OallamaError(f"{self}: expected 1 token or more, and no number below 0")


# What the patent's objective is counted for: one token of an answer.
ONE_TOKEN = (Pass(),)


@dataclass(frozen=True)
class Problem:
    """One model on one cluster. `devices[0]` is the client, `embedding` is sub-model 0 (embedding and head).

    links: "via-client" (default; what ggml's RPC does) or "direct" (the patent). passes: what the objective is counted
    for; default: one token of an answer.

    Raises:
        OallamaError: for no device, a name twice, no layer, an unknown link model, no pass.
    """

    devices: tuple[Device, ...]
    network: Network
    layers: tuple[Layer, ...]
    embedding: Layer
    settings: Settings = Settings()
    links: LinkModel = "via-client"
    passes: tuple[Pass, ...] = ONE_TOKEN

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names or not self.layers:
            raise OallamaError(
                f"expected at least a client and a layer, got {len(names)} devices, {len(self.layers)} layers"
            )
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise OallamaError(f"device name {twice} is used {names.count(twice)} times, expected once")
        if self.links not in LINK_MODELS:
            raise OallamaError(f"link model is {self.links!r}, expected {' or '.join(LINK_MODELS)}")
        if not self.passes:
            raise OallamaError("there is no pass, expected one or more")

    @property
    def is_per_token(self) -> bool:
        """Whether the objective is counted for one token of an answer, as the patent's."""
        return self.passes == ONE_TOKEN

    @property
    def per_token(self) -> Problem:
        """The same, counted for one token of an answer."""
        return replace(self, passes=ONE_TOKEN)

    def seconds_on(self, device: Device, layer: Layer) -> float:
        """Seconds of a layer on the device for all passes."""
        return sum(each.count * layer.seconds_on(device, each.n_tokens) for each in self.passes)

    @property
    def client(self) -> Device:
        """The device that holds embedding and head."""
        return self.devices[0]

    def device(self, name: str) -> Device:
        """The device of that name; raises OallamaError for a name the cluster does not have."""
        for device in self.devices:
            if device.name == name:
                return device
        raise OallamaError(f"no device {name!r}; expected one of {', '.join(d.name for d in self.devices)}")


def messages(problem: Problem, row_bytes: int, *, to_client: bool, last: bool) -> list[Message]:
    """What all passes send over a link.

    row_bytes: of one token. to_client: where the data goes; the client gets no mask. last: after the last layer, where
    only the rows of the head are sent.
    """
    found = []
    for each in problem.passes:
        if rows := each.n_returned if last else each.n_tokens:
            nbytes = rows * row_bytes + (0 if to_client else each.mask_bytes)
            found.append(Message(each.count, nbytes, each.after_pause))
    return found
