"""How far looks on a GPU are apart, against all distances there are, and a plan of two models on GPUs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.errors import OallamaError
from oallama.weave.distance import Distance, pieces, widest
from oallama.weave.plan import read_looks
from oallama.weave.waiting import mean_wait
from support.cli import oallama
from support.fake_cuda import needs_headers

operators = st.lists(st.tuples(st.floats(1e-6, 1e-2), st.booleans()), min_size=1, max_size=40)


@given(operators, st.integers(1, 45))
def test_pieces_are_all_of_a_step(found: list[tuple[float, bool]], distance: int) -> None:
    seconds, is_product = zip(*found, strict=True)
    cut = pieces(seconds, is_product, distance)
    assert sum(cut) == pytest.approx(sum(seconds))
    assert sum(is_product) // distance <= len(cut) <= sum(is_product) // distance + 1


@given(operators, st.floats(1e-7, 1e-2), st.floats(0, 5e-3))
def test_the_widest_distance_that_waiting_allows(
    found: list[tuple[float, bool]], threshold: float, slack: float
) -> None:
    seconds, is_product = zip(*found, strict=True)

    def wait(distance: int) -> float:
        return mean_wait(pieces(seconds, is_product, distance), slack)

    chosen = widest(seconds, is_product, threshold, slack)
    allowed = max(threshold, 1.1 * wait(1))
    assert wait(chosen) <= allowed
    assert all(wait(further) > allowed for further in range(chosen + 1, sum(is_product) + 1))


def test_a_layer_of_equal_products() -> None:
    """W of pieces of d products of 10 us is 5 d us: 35 us allow seven, slack of 20 us more of them."""
    seconds, is_product = [10e-6] * 420, [True] * 420
    assert widest(seconds, is_product, 35.1e-6) == 7
    assert widest(seconds, is_product, 35.1e-6, slack_s=20e-6) > 7
    assert widest(seconds, is_product, 1e-9) == 1
    assert str(Distance(7, 2, 4)) == "7:2:4"


@pytest.mark.slow
@needs_headers
def test_a_plan_for_gpus(backend: Path, tiny: Callable[..., Path], tmp_path: Path) -> None:
    hot, cold, path = tiny("llama", "F16"), tiny("qwen2", "F16"), tmp_path / "weave.json"
    environment = os.environ | {"GGML_BACKEND_PATH": str(backend), "XDG_CACHE_HOME": str(tmp_path)}
    options = ("--device", "hot=CUDA0,cold=CUDA1", "--ctx", "512", "--threads", "1", "--parallel", "2", "-o", path)
    done = oallama("weave", "plan", hot, cold, *options, env=environment)
    assert done.returncode == 0, done.stderr
    plan, looks = json.loads(path.read_text()), read_looks(path, on_gpus=True)
    assert looks.distance == Distance(plan["decode"]["distance"], plan["prefill"]["distance"], 2)
    for step in (plan["decode"], plan["prefill"]):
        products = [name not in ("rms_norm", "add", "mul", "glu", "rope", "get_rows") for name in step["names"]]
        assert step["distance"] >= 1 and step["n_looks"] <= sum(products) + 1
        assert step["splitting"]["wait_after_s"] <= max(
            plan["threshold_s"] * 1.001, 1.11 * step["splitting"]["wait_before_s"]
        )
    assert f"every {looks.distance.decode} products" in " ".join(done.stdout.split())
    with pytest.raises(OallamaError, match="is for models on GPUs, these are on the CPU"):
        read_looks(path, on_gpus=False)
    plan["distance"] = {"decode": 0, "prompt": 1, "few": 1}
    path.write_text(json.dumps(plan))
    with pytest.raises(OallamaError, match="is no weave plan of this version"):
        read_looks(path, on_gpus=True)
