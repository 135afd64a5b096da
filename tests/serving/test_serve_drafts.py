"""llama-server with a draft by plan: its command line, its answers, its buffers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oallama.data.plan import PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.serving.command import Draft, planned_environment, planned_server
from support.archs import SOURCE
from support.cli import oallama
from support.made_profile import made_profile
from support.plans import make
from support.servers import call, serving

SETTINGS = Settings(n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1)
SMALL = ("--ctx", "256", "--threads", "1")
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", "F16")


@pytest.fixture(scope="module")
def planning(model: Path, draft: Path, rpc: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    made_profile(model, rpc.devices[0], SETTINGS, name="RPC0").save(path)
    return ("--local-rpc", "--vram", "64MiB", "--profile", path, *SMALL, "--draft", draft)


def test_command_line(tmp_path: Path) -> None:
    plan = make()
    options = Draft(tmp_path / "d.gguf", plan, 3).options()
    assert options == {
        "spec-type": "draft-simple",
        "spec-draft-model": str(tmp_path / "d.gguf"),
        "spec-draft-n-max": 3,
        "spec-draft-type-k": "f16",
        "spec-draft-type-v": "f16",
        "spec-draft-ngl": "all",
        "spec-draft-device": "GPU0",
    }
    on_cpu = Draft(tmp_path / "d.gguf", make(devices=("CPU",)), 1).options()
    assert (on_cpu["spec-draft-ngl"], on_cpu["spec-draft-device"]) == ("0", "none")
    command = planned_server(tmp_path / "m.gguf", SETTINGS, plan, draft=Draft(tmp_path / "d.gguf", plan, 3))
    assert command[command.index("--spec-draft-n-max") + 1] == "3" and "--spec-type" in command
    assert "--spec-type" not in planned_server(tmp_path / "m.gguf", SETTINGS, plan)


def test_tables_of_both_in_the_order_of_their_loads() -> None:
    one, other = make(), make(on_host=())
    with planned_environment(one, other) as environment:
        tables = [Path(name).read_text() for name in environment["OALLAMA_BACKEND_MAP"].split(":")]
    assert tables == [one.to_backend_map(), other.to_backend_map()] and tables[0] != tables[1]


def test_serve_with_a_draft(model: Path, planning: tuple[str | Path, ...], tmp_path: Path) -> None:
    """The answer is the model's own; buffers of both models are those of their plans."""
    plans = json.loads(oallama("plan", model, *planning, "--acceptance", "1", "--json").stdout)
    n = plans["chosen"]["n"]
    assert n >= 1 and plans["chosen"]["pair"] == "draft on RPC0"
    expected = oallama("run", model, "Once upon a time", "--no-plan", *SMALL, "-n", "8", "--temperature", "0").stdout
    with serving(tmp_path / "log", model, *planning, "--acceptance", "1") as port:
        answer = call(port, "/completion", {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0})
        assert answer["content"] == expected.removesuffix("\n")
        assert 0 < answer["timings"]["draft_n"] <= 8 * n
    out = (tmp_path / "log").read_text(errors="replace")
    assert f"one-layer.gguf guesses {n} at a time" in out and "100% of guesses right, given" in out
    loaded = [float(size) for size in re.findall(r"RPC0\S* model buffer size = +([\d.]+) MiB", out)]
    planned = [plans[name]["predicted"]["devices"]["RPC0"]["weights"] / MIB for name in ("plan", "draft_plan")]
    assert loaded == pytest.approx(planned, abs=0.01)
    computing = [float(size) for size in re.findall(r"RPC0\S* compute buffer size = +([\d.]+) MiB", out)]
    planned = [plans[name]["predicted"]["devices"]["RPC0"]["compute"] / MIB for name in ("plan", "draft_plan")]
    # Once for each model: guessing makes no buffer grow.
    assert all(real <= own + 0.01 for real, own in zip(computing, planned, strict=True)), (computing, planned)


def test_a_draft_draws_its_guesses_on_the_cpu() -> None:
    """So its device needs nothing for that, other than the device of MTP heads (planned by dry run)."""
    text = (SOURCE / "common" / "speculative.cpp").read_text()
    kinds = dict(re.findall(r"\nstruct common_speculative_impl_(\w+) : [^{]*\{(.*?)\n\};", text, re.DOTALL))
    assert {"draft_simple", "draft_mtp"} <= kinds.keys()
    assert "llama_set_sampler" in kinds["draft_mtp"] and "llama_set_sampler" not in kinds["draft_simple"]


def test_serve_without_a_draft_that_does_not_pay(model: Path, planning: tuple[str | Path, ...], tmp_path: Path) -> None:
    with serving(tmp_path / "log", model, *planning, "--acceptance", "0") as port:
        answer = call(port, "/completion", {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0})
        assert "draft_n" not in answer["timings"]
    out = (tmp_path / "log").read_text(errors="replace")
    assert "without the draft one-layer.gguf" in out and "RPC0" in out


def test_the_micro_batch_is_the_plan_s(model: Path, rpc: Any, tmp_path: Path) -> None:
    """In a tight budget plans take smaller ones; the server must, too."""
    path = tmp_path / "profile.json"
    made_profile(model, rpc.devices[0], SETTINGS, name="RPC0").save(path)
    options = ("--local-rpc", "--vram", "4MiB", "--profile", path, *SMALL)
    made = PlacementPlan.from_json(oallama("plan", model, *options, "--json").stdout)
    assert made.context.n_ubatch < 256
    with serving(tmp_path / "log", model, *options):
        pass
    assert re.search(rf"n_ubatch += {made.context.n_ubatch}\b", (tmp_path / "log").read_text(errors="replace"))


# ---- plan ------------------------------------------------------------------------------------------------------------


def test_plan_shows_every_way_and_writes_both(model: Path, planning: tuple[str | Path, ...], tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    said = oallama("plan", model, *planning, "--acceptance", "1", "--draft-max", "2", "--explain", "-o", output).stdout
    rows = [line.split()[:2] for line in said.splitlines()[4:9]]
    assert sorted(rows) == [["-", "-"], ["CPU", "1"], ["CPU", "2"], ["RPC0", "1"], ["RPC0", "2"]]
    assert "one-layer.gguf guesses 2 at a time" in said and "\N{HORIZONTAL ELLIPSIS}" not in said
    target, beside = PlacementPlan.load(output), PlacementPlan.load(tmp_path / "plan.draft.json")
    assert len(target.layers) == 5 and len(beside.layers) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-max", "5"], "less than or equal to 4"),
        (["--draft-max", "0"], "greater than or equal to 1"),
        (["--acceptance", "1.5"], "less than or equal to 1"),
        (["--format", "map"], "--format map is for one model; with --draft take"),
        (["--memory"], "--memory shows one model"),
        (["--recheck"], "with a draft leave it out"),
        (["--vram", "50%"], "with a draft give bytes for both"),
    ],
)
def test_bad_input(arguments: list[str], message: str, model: Path, planning: tuple[str | Path, ...]) -> None:
    result = oallama("plan", model, *planning, *arguments)
    assert result.returncode == 2 and message in " ".join(result.stderr.split()).replace("│ ", "")


def test_serve_refuses_a_plan_beside_a_draft(model: Path, draft: Path, tmp_path: Path) -> None:
    result = oallama("serve", model, "--draft", draft, "--plan", tmp_path / "plan.json")
    assert result.returncode == 2 and "--draft plans model and guesses in one budget; leave out --plan" in result.stderr
