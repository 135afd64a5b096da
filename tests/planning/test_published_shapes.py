"""Published shapes (sparse files: no weight is stored) go through parsing, planning and the dry run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_sparse_model
from support.made_profile import made_profile

GIB = 1 << 30
# shape, file type, budget, target operators: per layer 7 (llama, qwen2: 7; minicpm3: 8 for MLA; MoE: 4 + router + 3)
CASES = [
    ("llama3-8b", "F16", "8GiB", 32 * 7 + 1),
    ("minicpm3-4b", "F16", "4GiB", 62 * 8 + 1),
    ("qwq-32b", "Q4_K_M", "12GiB", 64 * 7 + 1),
    ("qwen3-30b-a3b", "Q4_K_M", "10GiB", 48 * 8 + 1),
    ("qwen3-235b-a22b", "Q4_K_M", "22GiB", 94 * 8 + 1),
    # MLA: 6 and the output; one dense layer; of the others router, experts and the shared expert.
    ("glm-4.7-flash", "Q4_K_M", "8GiB", 47 * 6 + 3 + 46 * 7 + 1),
    # Recurrent layers: 5; attention: 4; router, experts, the shared expert and its gate.
    ("qwen3.6-35b-a3b", "Q4_K_M", "8GiB", 30 * 5 + 10 * 4 + 40 * 8 + 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "file_type", "budget", "n_targets"), CASES)
def test_a_published_shape_is_planned_within_its_budget(
    shape: str, file_type: str, budget: str, n_targets: int, rpc, tmp_path: Path
) -> None:
    path = make_sparse_model(tmp_path / f"{shape}.gguf", shape=shape, file_type=file_type)
    assert path.stat().st_blocks * 512 < 64 << 20 < path.stat().st_size
    device = rpc.devices[0]
    settings = Settings(n_ctx=4096, n_threads=2)
    graph = autoplan.read_graph(path, settings)
    assert len(graph.targets(1)) == n_targets
    profile = made_profile(path, device, settings)

    plan = autoplan.plan_graph(path, graph, budget, settings, Choices(device=device, profile=profile, planner="oato"))

    limit = int(budget.removesuffix("GiB")) * GIB
    assert limit * 0.9 < plan.predicted.devices[device].total <= limit
    assert set(plan.tensors) == {t.name for t in graph.tensors}
    assert all(home == device for home in plan.layers)
    # The dry run of the finished plan is what was predicted.
    settings = replace(settings, **vars(plan.context), devices=(device,))
    used = skeleton.dry_run(path, settings, plan.to_backend_map())
    assert sum(used[device].values()) == plan.predicted.devices[device].total
