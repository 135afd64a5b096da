"""The ways to run a model on a cluster that a plan chooses among, each with its times or why it cannot be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...data.workload import Workload
from ...errors import OallamaError
from .outcome import Solved
from .passes import request_seconds

# here: on this host alone, as `oallama run` does. pipeline: layers over RPC devices. ranks: every host a part of every
# matrix.
Way = Literal["here", "pipeline", "ranks"]
WAYS: tuple[Way, ...] = ("here", "pipeline", "ranks")
# More hosts must gain more than this: they can fail in more ways, and predictions for them are off by 11 % in the
# median (docs/cluster.md).
LEAST_GAIN = 0.15


@dataclass(frozen=True)
class RankHost:
    """A host of ranks. name: of the device in the plan. host: what ssh takes. share: of the model."""

    name: str
    host: str
    n_threads: int
    share: float


@dataclass(frozen=True)
class RankPlan:
    """One rank a host, on its CPU, the client's first. kernels: "ggml" or "oallama". network: CIDR, None: any."""

    hosts: tuple[RankHost, ...]
    kernels: str = "ggml"
    network: str | None = None


@dataclass(frozen=True)
class Candidate:
    """A way to run the model.

    Attributes:
        name: for people, unique.
        way: how it is run; "pipeline" has `layers`, "ranks" has `ranks`.
        n_hosts: that compute.
        ttft_s, tpot_s: predicted seconds for the request; None where it cannot be run.
        why_not: why it cannot.
        measured_ttft_s, measured_tpot_s: where it was tried.
        solved: how the solver found its layers; None for layers that no solver chose.
        n_ubatch: tokens of a micro-batch; 0: as the plan's context says.
    """

    name: str
    way: Way
    n_hosts: int = 1
    ttft_s: float | None = None
    tpot_s: float | None = None
    why_not: str = ""
    layers: tuple[str, ...] = ()
    ranks: RankPlan | None = None
    measured_ttft_s: float | None = None
    measured_tpot_s: float | None = None
    solved: Solved | None = None
    n_ubatch: int = 0

    def predicted_s(self, request: Workload) -> float | None:
        """Seconds of the request by prediction; None where it cannot be run."""
        return _seconds(request, self.ttft_s, self.tpot_s)

    def measured_s(self, request: Workload) -> float | None:
        """Seconds of the request by measurement; None where it was not tried."""
        return _seconds(request, self.measured_ttft_s, self.measured_tpot_s)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Candidate:
        """From its fields as JSON. Raises KeyError, TypeError or ValueError for anything else."""
        made = content["ranks"]
        ranks = made and RankPlan(tuple(RankHost(**host) for host in made["hosts"]), made["kernels"], made["network"])
        solved = Solved.from_dict(content.get("solved"))
        if content["way"] not in WAYS or (content["way"] == "ranks" and not ranks and not content["why_not"]):
            raise ValueError(f"candidate {content['name']!r} is no way to run a model")
        return cls(**{**content, "layers": tuple(content["layers"]), "ranks": ranks, "solved": solved})


def _seconds(request: Workload, ttft_s: float | None, tpot_s: float | None) -> float | None:
    return None if ttft_s is None or tpot_s is None else request_seconds(request, ttft_s, tpot_s)


def choose(candidates: Iterable[Candidate], request: Workload) -> Candidate:
    """The fastest for the request, by measurement where some were measured; fewer hosts where others gain little.

    Raises:
        OallamaError: when none can be run, with every reason.
    """
    candidates = list(candidates)
    measured = {c.name: s for c in candidates if (s := c.measured_s(request)) is not None}
    seconds = measured or {c.name: s for c in candidates if (s := c.predicted_s(request)) is not None}
    if not seconds:
        reasons = "; ".join(f"{c.name}: {c.why_not}" for c in candidates)
        raise OallamaError(f"the model cannot be run on this cluster: {reasons}")
    enough = min(seconds.values()) * (1 + (0 if measured else LEAST_GAIN))
    near = [c for c in candidates if seconds.get(c.name, enough + 1) <= enough]
    return min(near, key=lambda c: (c.n_hosts, seconds[c.name]))
