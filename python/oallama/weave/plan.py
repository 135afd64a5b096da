"""How a cold model's process computes for guests: where its threads look for tasks, and what either side waits.

The cold model's operators and the hot one's come from the profile, what a guest's attention takes through a channel is
measured with one, and so is a look that finds nothing. docs/sources.md, 4; equations in docs/weave.md.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from oallama.base.jsonfile import read_json_object, write_text_atomic
from oallama.data.operators import AttentionShape
from oallama.data.plan import ContextSettings
from oallama.errors import OallamaError
from oallama.planning.cost import CostModel
from oallama.planning.operator_costs import OperatorCost, operator_costs

from .channel import Receiver, Sender, SequenceRows, alone_kernel, channel_path
from .distance import LOOK_S, Distance, pieces, widest
from .waiting import Splitting, mean_wait, split

SCHEMA = "oallama.weave/1"
REMEDY = "make a new one with `oallama weave plan`"
SHARE = 0.05  # of the hot model's step may be spent waiting; the paper's threshold
_REPEATS, _POLLS = 31, 200_000


@dataclass(frozen=True)
class Load:
    """What runs: sequences of the hot model at home and as guests, of the cold one, and tokens that each has."""

    n_home: int
    n_guests: int
    n_cold: int
    depth: int


@dataclass(frozen=True)
class ChannelTimes:
    """Seconds through a channel here. guest_s: of all guests' attention, a layer. poll_s: a look for tasks, in vain.

    On GPUs neither is measured: guest_s is what the profile says of the cold model's GPU, poll_s an estimate.
    """

    guest_s: float
    poll_s: float


@dataclass(frozen=True)
class Step:
    """One kind of step of the cold model, and what splitting does to those who wait for it.

    names, seconds: of the operators in execution order; splitting.parts[i] - 1 looks are inside of operator i.
    part: multiply-adds of a thread between two looks; None: none inside of operators.
    distance: products between two looks on a GPU, where none are inside of operators: splitting.wait_before_s is that
    of looks after every product, wait_after_s of those there are.
    """

    names: tuple[str, ...]
    seconds: tuple[float, ...]
    splitting: Splitting
    part: int | None
    distance: int | None = None
    n_looks: int = 0

    @property
    def duration_s(self) -> float:
        """Of the step, without looks."""
        return sum(self.seconds)

    @property
    def wait_for_request_s(self) -> float:
        """Mean wait of a task that is served at the end of the step (control by requests)."""
        return self.duration_s / 2


@dataclass(frozen=True)
class WeavePlan:
    """For one hot and one cold model on this machine.

    Attributes:
        hot, cold: fingerprints of the files (autoplan.model_fingerprint).
        attention: whose kernels attend for the hot model and its guests, "ggml" or "oallama".
        layers: of the hot model, each of which sends a task per step.
        step_s: of the hot model with all its sequences, had it no guests.
        home_s: its attention of a layer, of the sequences at home (K); threshold_s: the wait per task aimed at.
        decode, prefill: of the cold model: its sequences a token each; a micro-batch of a prompt.
    """

    hot: Mapping[str, Any]
    cold: Mapping[str, Any]
    load: Load
    measured: ChannelTimes
    n_threads: int
    attention: str
    layers: int
    step_s: float
    home_s: float
    threshold_s: float
    decode: Step
    prefill: Step

    @property
    def part(self) -> int | None:
        """Multiply-adds between two looks that serve both kinds of step; None: looks after operators suffice."""
        return min((step.part for step in (self.decode, self.prefill) if step.part), default=None)

    @property
    def distance(self) -> Distance | None:
        """Between two looks on a GPU; None: the cold model is on the CPU."""
        if self.decode.distance is None or self.prefill.distance is None:
            return None
        return Distance(self.decode.distance, self.prefill.distance, self.load.n_cold)

    @property
    def waiting_share(self) -> float:
        """Share of the hot model's step that may be spent waiting."""
        return self.threshold_s * self.layers / self.step_s

    def polls_s(self, step: Step) -> float:
        """What the looks cost a step; on the CPU on each thread beside the others."""
        return self.measured.poll_s * step.n_looks

    def to_json(self) -> str:
        """The file's text."""
        distance = asdict(self.distance) if self.distance else None
        made = {"schema": SCHEMA, **asdict(self), "part": self.part, "distance": distance}
        return json.dumps(made, indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raises OallamaError when it cannot be written."""
        write_text_atomic(path, self.to_json(), "weave plan")


@dataclass(frozen=True)
class Looks:
    """What a server needs of a plan: the models' fingerprints, and where looks are (`WeavePlan`)."""

    hot: dict[str, Any]
    cold: dict[str, Any]
    part: int | None
    distance: Distance | None


def read_looks(path: str | os.PathLike[str], on_gpus: bool) -> Looks:
    """Of a plan's file, for models on GPUs or on the CPU.

    Raises:
        OallamaError: it is none, or one for the other kind of device.
    """
    found = read_json_object(path, "weave plan", REMEDY)
    part, distance = found.get("part"), found.get("distance")
    sound = isinstance(part, int | None) and (part is None or part >= 1)
    if distance is not None:
        values = list(distance.values()) if isinstance(distance, dict) else []
        names = [field.name for field in fields(Distance)]
        sound = sound and list(distance) == names and all(isinstance(n, int) and n >= 1 for n in values)
    if found.get("schema") != SCHEMA or not sound:
        raise OallamaError(f"{path} is no weave plan of this version; {REMEDY}")
    if on_gpus != (distance is not None):
        made, now = ("GPUs", "the CPU") if distance else ("the CPU", "GPUs")
        raise OallamaError(f"the weave plan {path} is for models on {made}, these are on {now}; {REMEDY}")
    return Looks(found["hot"], found["cold"], part, Distance(**distance) if distance else None)


def plan(
    hot: CostModel, cold: CostModel, load: Load, measured: ChannelTimes, n_threads: int, n_ubatch: int
) -> WeavePlan:
    """Split the cold model's operators as far as the hot one's waiting asks for (waiting.split).

    Models whose costs have accelerators are on the first of them; there looks are put further apart instead, as far as
    the waiting allows (distance.widest).

    A task may wait as long as the hot model computes attention of its own beyond the guests' (K - N) for nothing; of
    the rest SHARE of the hot model's step, over its layers, is allowed.
    """
    shape, layers = guest_shape(hot)
    home_s = load.n_home * float(hot.attention_s(shape, 1, load.depth)[_device(hot)])
    together = operator_costs(hot, load.n_home + load.n_guests, load.depth, decode=True, device=_device(hot))
    step_s = sum(cost.seconds for cost in together)
    threshold_s = SHARE * step_s / layers
    slack_s = max(0.0, home_s - measured.guest_s)

    def step(n_tokens: int, *, decode: bool) -> Step:
        costs = operator_costs(cold, n_tokens, load.depth, decode=decode, device=_device(cold))
        if _device(cold):
            return _step_on_gpu(costs, threshold_s, slack_s, measured.poll_s)
        return _step(costs, threshold_s, slack_s, measured.poll_s, n_threads)

    return WeavePlan(
        hot=hot.graph.model,
        cold=cold.graph.model,
        load=load,
        measured=measured,
        n_threads=n_threads,
        attention=hot.context.attention,
        layers=layers,
        step_s=step_s,
        home_s=home_s,
        threshold_s=threshold_s,
        decode=step(load.n_cold, decode=True),
        prefill=step(n_ubatch, decode=False),
    )


def _step(costs: Sequence[OperatorCost], threshold_s: float, slack_s: float, poll_s: float, n_threads: int) -> Step:
    seconds = [cost.seconds for cost in costs]
    most = [max(1, cost.n_groups // n_threads) if cost.multiply_adds else 1 for cost in costs]
    # What is left when all is cut as far as it can be: to wait for a tenth less than that is not worth any cut.
    least_s = mean_wait([t / n for t, n in zip(seconds, most, strict=True) for _ in range(n)], slack_s)
    found = split(seconds, max(threshold_s, 1.1 * least_s), slack_s=slack_s, part_cost_s=poll_s, most_parts=most)
    between = [
        max(1, cost.multiply_adds // n_threads // n) for cost, n in zip(costs, found.parts, strict=True) if n > 1
    ]
    names = tuple(cost.kind for cost in costs)
    return Step(names, tuple(seconds), found, min(between, default=None), n_looks=sum(found.parts))


def _step_on_gpu(costs: Sequence[OperatorCost], threshold_s: float, slack_s: float, look_s: float) -> Step:
    seconds, is_product = [cost.seconds for cost in costs], [cost.multiply_adds > 0 for cost in costs]
    distance = widest(seconds, is_product, threshold_s, slack_s)
    waits = [mean_wait(pieces(seconds, is_product, each), slack_s) for each in (1, distance)]
    n_looks = len(pieces(seconds, is_product, distance))
    splitting = Splitting((1,) * len(costs), waits[0], waits[1], look_s * n_looks)
    return Step(tuple(cost.kind for cost in costs), tuple(seconds), splitting, None, distance, n_looks)


def _device(costs: CostModel) -> int:
    """Of the model: its first accelerator, or the host."""
    return min(1, len(costs.names) - 1)


def estimate(hot: CostModel, load: Load, cold_device: str) -> ChannelTimes:
    """What `measure` measures, for the cold model on a GPU that `hot` has times of."""
    shape, _ = guest_shape(hot)
    each = float(hot.attention_s(shape, 1, load.depth + 1)[hot.ids[cold_device]])
    return ChannelTimes(load.n_guests * each, LOOK_S)


def guest_shape(model: CostModel) -> tuple[AttentionShape, int]:
    """The shape of most layers' attention, and how many layers have any.

    Raises:
        OallamaError: no layer has.
    """
    shapes = [shape for shape in model.graph.attention if shape is not None]
    if not shapes:
        raise OallamaError("the hot model has no attention that guests could have")
    return max(set(shapes), key=shapes.count), len(shapes)


def measure(shape: AttentionShape, load: Load, context: ContextSettings) -> ChannelTimes:
    """A guest's token after `depth` others, all guests in one task as in a step; medians.

    context: the hot model's, which says the types of the cache and whose kernels attend.

    Raises:
        OallamaError: no shared memory for a channel, or none for the guests' K and V of a layer.
    """
    width_k, width_v = shape.n_head_kv * shape.head_dim_k, shape.n_head_kv * shape.head_dim_v
    type_k, type_v = context.type_k, context.type_v
    own = alone_kernel(type_k, type_v, shape.head_dim_k, shape.head_dim_v) if context.attention == "oallama" else 0
    n = max(1, load.n_guests)
    quota = n * (load.depth + 64) * (width_k + width_v) * 4 + (1 << 20)
    path = channel_path(f"plan-{os.getpid()}")
    rng = np.random.default_rng(1)
    with Receiver(path, quota) as receiver, Sender(path, deadline_s=10.0) as sender:
        rows = []
        for _ in range(n):
            guest = sender.open(
                n_layers=1, max_tokens=load.depth + 1, k_width=width_k, v_width=width_v, k_type=type_k, v_type=type_v
            )
            if guest is None or not sender.reserve(guest, load.depth + 1):
                raise OallamaError(f"there is no memory for {n} guests of {load.depth} tokens to measure with")
            rows.append(SequenceRows(guest, load.depth, 1))
        q = rng.standard_normal((n, shape.n_head, shape.head_dim_k), dtype=np.float32)
        k = rng.standard_normal((n, shape.n_head_kv, shape.head_dim_k), dtype=np.float32)
        v = rng.standard_normal((n, shape.n_head_kv, shape.head_dim_v), dtype=np.float32)
        times = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            sender.attend(0, rows, q, k, v, scale=shape.head_dim_k**-0.5, own=own)
            times.append(time.perf_counter() - begin)
        return ChannelTimes(statistics.median(times), receiver.poll_seconds(_POLLS))
