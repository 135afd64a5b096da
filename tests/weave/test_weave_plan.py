"""`oallama weave plan`: the whole command on this machine, and what `oallama serve` makes of its file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama.data.operators import AttentionShape
from oallama.data.plan import ContextSettings
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.serving.serve_limits import Limits
from oallama.serving.serving import Served, environments
from oallama.weave.channel import Sender, alone_kernel
from oallama.weave.plan import Load, Looks, measure, read_looks
from support.cli import oallama


def weave_plan(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return oallama("weave", "plan", *arguments)


@pytest.fixture(scope="module")
def made(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    path = tmp_path_factory.mktemp("weave-plan") / "weave.json"
    options = ["--ctx", "512", "--parallel", "2", "--guests", "3", "--threads", "1", "-o", path]
    done = weave_plan(tiny("llama"), tiny("qwen2"), *options)
    assert done.returncode == 0, done.stderr
    return path, json.loads(path.read_text()), done.stdout


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_waits_are_those_of_the_parts(made: tuple[Path, dict[str, Any], str], kind: str) -> None:
    """By the paper's formula, of operators cut as the plan says; the aim is reached, or nothing can be cut on."""
    _, plan, _ = made
    step = plan[kind]
    seconds, parts = np.array(step["seconds"]), np.array(step["splitting"]["parts"])
    slack = max(0.0, plan["home_s"] - plan["measured"]["guest_s"])

    def wait(lengths: np.ndarray) -> float:
        return float((np.maximum(0.0, lengths - slack) ** 2).sum() / (2 * lengths.sum()))

    assert step["splitting"]["wait_before_s"] == pytest.approx(wait(seconds))
    after = wait(np.repeat(seconds / parts, parts))
    assert step["splitting"]["wait_after_s"] == pytest.approx(after) and after <= wait(seconds)
    names = np.array(step["names"])
    assert {"ffn_up", "attention", "output"} <= set(names)
    # Small operators and the two kinds that were cut the most: whole operators are not cut at all.
    assert (parts[names == "rms_norm"] == 1).all()
    assert plan["threshold_s"] == pytest.approx(0.05 * plan["step_s"] / plan["layers"])
    assert plan["measured"]["poll_s"] > 0 and plan["load"] == {"n_home": 2, "n_guests": 3, "n_cold": 2, "depth": 256}


def test_the_part_serves_both_kinds_of_step(made: tuple[Path, dict[str, Any], str]) -> None:
    path, plan, shown = made
    parts = [plan[kind]["part"] for kind in ("decode", "prefill") if plan[kind]["part"]]
    assert read_looks(path, on_gpus=False) == Looks(plan["hot"], plan["cold"], min(parts, default=None), None)
    assert "W before" in shown and "W after" in shown and "they cost" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_models_are_those_that_serve_loads(
    made: tuple[Path, dict[str, Any], str], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """By plans for the CPU, which say whose kernels attend; --no-plan: as llama.cpp does by itself."""
    _, plan, shown = made
    whose = {"oallama": "our kernels", "ggml": "ggml's kernels"}
    assert f"attention by {whose[plan['attention']]}" in shown
    options = [
        "--ctx",
        "512",
        "--parallel",
        "2",
        "--guests",
        "3",
        "--threads",
        "1",
        "--no-plan",
        "-o",
        tmp_path / "w.json",
    ]
    done = weave_plan(tiny("llama"), tiny("qwen2"), *options)
    unplanned = json.loads((tmp_path / "w.json").read_text())
    assert unplanned["attention"] == "ggml" and "attention by ggml's kernels" in done.stdout
    assert [unplanned[key] for key in ("hot", "cold", "load")] == [plan[key] for key in ("hot", "cold", "load")]


@pytest.mark.parametrize("attention", ["ggml", "oallama"])
def test_the_channel_is_measured_with_the_hot_models_kernel(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    attend = Sender.attend

    def noted(self: Sender, *given: Any, own: int = 0, **more: Any) -> Any:
        asked.append(own)
        return attend(self, *given, own=own, **more)

    monkeypatch.setattr(Sender, "attend", noted)
    shape = AttentionShape(n_head=4, n_head_kv=2, head_dim_k=64, head_dim_v=64)
    context = ContextSettings(n_ctx=512, attention=attention)
    times = measure(shape, Load(n_home=1, n_guests=2, n_cold=1, depth=100), context)
    assert times.guest_s > 0 and times.poll_s > 0
    assert {*asked} == {alone_kernel("f16", "f16", 64, 64) if attention == "oallama" else 0} and len(asked) > 9


@pytest.mark.parametrize(("part", "looks"), [(12345, "12345"), (None, "operators")])
def test_receivers_are_told(part: int | None, looks: str) -> None:
    hot = Served(Path("hot.gguf"), Settings(n_ctx=512, n_seq_max=2), guests=2)
    cold = Served(Path("cold.gguf"), Settings(n_ctx=512, n_seq_max=2), lend_nbytes=1000, part=part)
    found = json.loads(environments(hot, [cold], 0.1, Limits(), "/tmp"))
    assert found["cold"]["OALLAMA_WEAVE_RECEIVER"].endswith(f":1000:{looks}")
    assert found["hot"]["OALLAMA_WEAVE_FIRST_GUEST"] == "2" and found["hot"]["OALLAMA_REQUEST_LIMIT"] == "68"


def test_bad_input(made: tuple[Path, dict[str, Any], str], tiny: Callable[..., Path], tmp_path: Path) -> None:
    path, plan, _ = made
    other = tmp_path / "other.json"
    for content in ("{", "[]", "{}", json.dumps(plan | {"part": -1}), json.dumps(plan | {"schema": "oallama.plan/1"})):
        other.write_text(content)
        with pytest.raises(OallamaError, match="make a new one with `oallama weave plan`"):
            read_looks(other, on_gpus=False)
    models = ["--hot", tiny("qwen2"), "--cold", tiny("llama")]
    done = oallama("serve", *models, "--weave", path)
    assert done.returncode == 2 and "weave plan" in done.stderr and "Traceback" not in done.stderr
    assert weave_plan(tmp_path / "none.gguf", tiny("llama")).returncode == 2
