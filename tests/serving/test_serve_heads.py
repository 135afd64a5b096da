"""llama-server with a model's MTP heads by plan: its command line, its answers, its buffers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oallama.data.plan import PlacementPlan
from oallama.drafts import acceptance, known
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.serving.command import Heads, planned_server
from oallama.serving.head_acceptance import measure_heads, rate_of
from support.archs import TOKENS
from support.cli import oallama
from support.made_profile import made_profile
from support.mtp_model import mtp_model
from support.plans import make
from support.servers import call, serving

SETTINGS = Settings(n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1)
SMALL = ("--ctx", "256", "--threads", "1")
MIB = 1 << 20
N = 24
# One head on plain attention, on compressed keys and values, beside recurrent states; two in a chain.
ARCHS = {"glm4moe": 1, "deepseek2": 1, "qwen35": 1, "hy_v3": 2}
OTHERS = {"bailingmoe3": 1, "nemotron_h_moe": 1, "mimo2": 2, "step35": 2, "deepseek4": 1, "glm-dsa": 1, "deepseek32": 1}
HEADS = {**ARCHS, **OTHERS}


@pytest.fixture(scope="module")
def asked(rpc: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, tuple[str | Path, ...]]]:
    """A model, and options that plan it for a device much faster than the CPU."""
    folder = tmp_path_factory.mktemp("mtp")

    def get(arch: str) -> tuple[Path, tuple[str | Path, ...]]:
        path = folder / f"{arch}-{HEADS[arch]}-heads.gguf"
        model = path if path.exists() else mtp_model(folder, arch, HEADS[arch])
        profile = folder / f"{arch}.json"
        made_profile(model, rpc.devices[0], SETTINGS, name="RPC0").save(profile)
        return model, ("--local-rpc", "--vram", "256MiB", "--profile", profile, *SMALL)

    return get


def answer(port: int) -> Any:
    body = {"prompt": TOKENS, "n_predict": N, "temperature": 0, "return_tokens": True, "ignore_eos": True}
    return call(port, "/completion", body)


def sizes(log: str, what: str) -> list[float]:
    return [float(size) for size in re.findall(rf"RPC0\S* +{what} buffer size = +([\d.]+) MiB", log)]


def test_command_line(tmp_path: Path) -> None:
    assert Heads(2).options() == {
        "spec-type": "draft-mtp",
        "spec-draft-n-max": 2,
        "spec-draft-type-k": "f16",
        "spec-draft-type-v": "f16",
    }
    command = planned_server(tmp_path / "m.gguf", SETTINGS, make(), draft=Heads(2))
    assert command[command.index("--spec-type") + 1] == "draft-mtp" and "--spec-draft-model" not in command


@pytest.mark.parametrize("arch", [*ARCHS, *(pytest.param(arch, marks=pytest.mark.slow) for arch in OTHERS)])
def test_serve_with_heads(arch: str, asked: Callable[..., Any], tmp_path: Path) -> None:
    """Tokens are the model's own, weights and caches those of the plan, and compute buffers no larger."""
    model, options = asked(arch)
    plans = json.loads(oallama("plan", model, *options, "--heads", "--acceptance", "1", "--json").stdout)
    n, plan = plans["chosen"]["n"], plans["plan"]["predicted"]["devices"]["RPC0"]
    assert n >= 1 and plans["chosen"]["pair"] == "head on RPC0" and plans["draft_plan"] is None
    with serving(tmp_path / "plain", model, *options) as port:
        expected = answer(port)
        assert "draft_n" not in expected["timings"]
    with serving(tmp_path / "log", model, *options, "--heads", "--acceptance", "1") as port:
        found = answer(port)
        assert found["timings"]["draft_n"] > 0
    assert found["tokens"] == expected["tokens"] and len(found["tokens"]) == N
    log = (tmp_path / "log").read_text(errors="replace")
    assert f"the MTP head guesses {n} at a time" in log and "100% of guesses right, given" in log
    assert sum(sizes(log, "model")) == pytest.approx(plan["weights"] / MIB, abs=0.02)
    states = sizes(log, "KV") + sizes(log, "RS")
    assert len(states) >= 2 and sum(states) <= plan["kv"] / MIB + 0.02
    if arch not in ("qwen35", "deepseek4"):  # states for the most guesses; states that are logged by other names
        assert sum(states) == pytest.approx(plan["kv"] / MIB, abs=0.02)
    assert 0 < sum(sizes(log, "compute")[:2]) <= plan["compute"] / MIB + 0.02


def test_heads_that_do_not_pay_are_left_in_the_file(asked: Callable[..., Any], tmp_path: Path) -> None:
    model, options = asked("glm4moe")
    with serving(tmp_path / "log", model, *options, "--heads", "--acceptance", "0") as port:
        assert "draft_n" not in answer(port)["timings"]
    assert "without the MTP head" in (tmp_path / "log").read_text(errors="replace")


def test_plan_shows_every_way_and_writes_the_chosen_one(asked: Callable[..., Any], tmp_path: Path) -> None:
    model, options = asked("glm4moe")
    output = tmp_path / "plan.json"
    said = oallama(
        "plan", model, *options, "--heads", "--acceptance", "1", "--draft-max", "2", "--explain", "-o", output
    ).stdout
    rows = [line.split()[:2] for line in said.splitlines()[4:9]]
    assert sorted(rows) == [["-", "-"], ["CPU", "1"], ["CPU", "2"], ["RPC0", "1"], ["RPC0", "2"]]
    assert "the MTP head guesses 2 at a time" in said
    assert len(PlacementPlan.load(output).layers) == 8 and not (tmp_path / "plan.draft.json").exists()
    with serving(tmp_path / "log", model, "--local-rpc", "--threads", "1", "--plan", output) as port:
        assert answer(port)["timings"]["draft_n"] > 0
    refused = oallama("run", model, "a", "--local-rpc", "--threads", "1", "--plan", output)
    assert refused.returncode == 2 and "make one without --heads" in refused.stderr


def test_guesses_are_counted_once(asked: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "cache_dir", lambda: tmp_path)
    model, options = asked("glm4moe")
    output = tmp_path / "plan.json"
    oallama("plan", model, *options, "--heads", "--acceptance", "1", "-o", output)
    assert known(model, None) is None
    with LocalRpcServer(threads=1, register=False) as server:
        found = measure_heads(model, PlacementPlan.load(output), 3, (server.endpoint,), 1)
    assert found.source == "measured" and found.n_tokens > 24 and 0 <= found.rate < 1
    assert known(model, None) == found


def test_the_rate_is_that_of_the_sum() -> None:
    """Of steps of 3 guesses 0.875 are right in the mean: 1/2 + 1/4 + 1/8."""
    assert rate_of(875, 3000, 3) == pytest.approx(0.5)
    assert rate_of(70, 100, 1) == pytest.approx(0.7)
    assert rate_of(0, 100, 4) == pytest.approx(0.0) and rate_of(100, 100, 4) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "d.gguf"], "--draft and --heads are two ways to guess; give one"),
        (["--format", "map"], "--format map is for one model; with --heads take table or json"),
        (["--memory"], "--memory shows one model; plan it without --heads"),
        (["--device", "RPC7"], "RPC7"),
        (["--vram", "50%"], "with a draft give bytes for both"),
    ],
)
def test_bad_input(arguments: list[str], message: str, asked: Callable[..., Any]) -> None:
    model, options = asked("glm4moe")
    result = oallama("plan", model, *options, "--heads", *arguments)
    assert result.returncode == 2 and message in " ".join(result.stderr.split()).replace("│ ", "")


def test_a_model_without_heads(tiny: Callable[..., Path]) -> None:
    result = oallama("serve", tiny("llama", "F16"), "--heads", "--local-rpc", *SMALL)
    assert result.returncode == 2 and "has no MTP heads; leave --heads out" in result.stderr


def test_serve_refuses_a_plan_beside_heads(asked: Callable[..., Any], tmp_path: Path) -> None:
    result = oallama("serve", asked("glm4moe")[0], "--heads", "--plan", tmp_path / "plan.json")
    assert result.returncode == 2 and "--heads plans model and guesses in one budget; leave out --plan" in result.stderr
