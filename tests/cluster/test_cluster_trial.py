"""`oallama cluster plan --verify`: which ways are tried, and what comes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oallama.cluster.allocation.allocation import allocate
from oallama.cluster.allocation.candidates import Candidate
from oallama.cluster.allocation.cluster_plan import ClusterPlan
from oallama.cluster.allocation.devices import ClientEntry, DeviceEntry
from oallama.cluster.allocation.network import LinkQuality, Network
from oallama.cluster.allocation.problem import Device, Layer, Problem
from oallama.cluster.spread import trial
from oallama.cluster.spread.choose import decided
from oallama.data.plan import ContextSettings
from oallama.data.workload import Workload
from oallama.errors import OallamaError

REQUEST = Workload(10, 11)


def a_plan() -> ClusterPlan:
    network = Network.uniform(("client", "a"), LinkQuality(1e-3, 1e8))
    devices = (Device("client", 0, 1e9), Device("a", 10, 1e9))
    problem = Problem(devices, network, (Layer(1e6, 1, 400),) * 2, Layer(1e6, 0, 400))
    entry = DeviceEntry("a", "local", ("127.0.0.1", 1), 10)
    layers = allocate(problem).layers
    return ClusterPlan({}, ContextSettings(64), ClientEntry(), (entry,), problem, layers, 0.0, request=REQUEST)


def test_near_ways_and_this_host_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is far behind by prediction is not, but this host always is; what fails cannot be chosen."""
    ways = [
        Candidate("slow", "here", 1, 5.0, 0.5),
        Candidate("fast", "pipeline", 2, 1.0, 0.1, layers=("a", "a")),
        Candidate("near", "pipeline", 2, 1.2, 0.12, layers=("a", "client")),
        Candidate("far", "pipeline", 2, 3.0, 0.3, layers=("client", "client")),
        Candidate("impossible", "ranks", why_not="no MPI"),
    ]
    times = {"slow": (0.9, 0.09), "near": (1.0, 0.1)}
    tried: list[str] = []

    def run_once(model: Path, plan: ClusterPlan, agent: str | None) -> dict[str, Any]:
        assert plan.chosen is not None
        tried.append(plan.chosen.name)
        if plan.chosen.name == "fast":
            raise OallamaError("a host has gone")
        ttft, tpot = times[plan.chosen.name]
        return {"ttft_s": ttft, "tpot_s": tpot}

    monkeypatch.setattr(trial, "run_once", run_once)
    plan = a_plan()
    found = trial.measured(Path("model.gguf"), plan, ways, None, lambda done, total, what: None)
    assert tried == ["slow", "fast", "near"]
    by_name = {c.name: c for c in found}
    assert by_name["fast"].why_not == "tried: a host has gone" and by_name["fast"].predicted_s(REQUEST) is None
    assert by_name["slow"].measured_s(REQUEST) == pytest.approx(1.8) and by_name["far"].measured_s(REQUEST) is None
    chosen = decided(plan, found).chosen
    assert chosen is not None and chosen.name == "slow"


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(OallamaError, match="no such model file"):
        trial.run_once(tmp_path / "nothing.gguf", a_plan(), None)
