"""Memory of plans that divide experts, in 60 cells: a device has what was predicted, and never more than its budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama
from oallama.data.layer_experts import layer_experts
from oallama.data.profile import Concurrency
from oallama.data.routing import STAGES, RoutingTrace, StageRouting
from oallama.engine.load_settings import Settings
from oallama.engine.routers import routers_of
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.loading.routing_traces import keep_trace
from oallama.modelmaker import make_model
from oallama.planning import Workload
from support.made_profile import made_profile
from support.mixtures import skewed

SIZES = {"n_layer": 4, "n_expert": 32, "n_ff_expert": 512, "n_vocab": 4096}
PLANNERS = ("experts", "slots", "auto")
CELLS = 15  # of each model
SETTINGS = Settings(n_ctx=256, n_batch=128, n_ubatch=128, n_threads=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "file_type"), [("qwen3moe", "Q4_0"), ("gpt-oss", "MXFP4"), ("deepseek2", "Q8_0"), ("qwen35moe", "Q4_K_M")]
)
def test_no_budget_is_exceeded(
    arch: str, file_type: str, rpc: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path, device = tmp_path / "made.gguf", rpc.devices[0]
    make_model(path, arch=arch, shape="tiny", file_type=file_type, overrides=SIZES)
    graph = autoplan.read_graph(path, SETTINGS)
    keep_made_up(path, sorted({int(t.name.split(".")[1]) for t in graph.tensors if "_exps" in t.name}))
    profile = replace(made_profile(path, device, SETTINGS), concurrency=(Concurrency(device, 1.0),))
    rng = np.random.default_rng(1)
    divided = {name: 0 for name in PLANNERS}
    for cell in range(CELLS):
        planner, budget = PLANNERS[cell % len(PLANNERS)], f"{rng.uniform(25, 95):.2f}%"
        choices = Choices(device=device, planner=planner, profile=profile, workload=Workload(16, 128))
        plan = autoplan.candidates(path, graph, budget, SETTINGS, choices).best
        divided[planner] += any(place.held for place in layer_experts(plan))
        llm = Llama(str(path), plan=plan, n_ctx=256, verbose=False, verify=False)
        try:
            for token in rng.integers(300, 4000, 24).tolist():
                llm.eval([token])
            there = llm.placement()[device]
        finally:
            llm.close()
        assert there.predicted is not None
        found, expected = there.measured, there.predicted
        assert (found.weights, found.kv, found.compute) == (expected.weights, expected.kv, expected.compute), budget
        assert found.total <= plan.budgets[device], budget
    assert divided["experts"] and divided["slots"]


def keep_made_up(path: Path, layers: list[int]) -> None:
    """A trace of skewed routing."""
    routers = routers_of(path)
    assert routers is not None
    ids = skewed(np.random.default_rng(2), len(layers), 256, routers.n_experts, 4).astype(np.uint16)
    stages = dict.fromkeys(STAGES, StageRouting.judge(ids, routers.n_experts))
    keep_trace(RoutingTrace("", path.name, "made up", routers, tuple(layers), 64, stages), path)
