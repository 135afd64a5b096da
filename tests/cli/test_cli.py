"""Every command of `oallama` as a user types it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from oallama.base.ports import free_port
from oallama.cli import chat
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.profile import Profile
from oallama.engine.load_settings import Settings
from support import cli
from support.cli import CLI
from support.made_profile import made_profile
from support.paths import ROOT
from support.processes import process_of, ran, until
from support.servers import call

COMMANDS = [
    "demo",
    "devices",
    "doctor",
    "make-model",
    "quantize",
    "quantize search",
    "compare-models",
    "profile",
    "plan",
    "run",
]
COMMANDS += ["chat", "bench", "serve", "trace"]
SETTINGS = Settings(n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1)
SMALL = ("--ctx", "256", "--threads", "1")
MIB = 1 << 20


def oallama(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the program; it must succeed without a word of the engine's log."""
    result = cli.oallama(*arguments, **options)
    assert result.returncode == 0, (result.returncode, result.stdout[-2000:], result.stderr[-2000:])
    assert "ggml" not in result.stderr and "llama_" not in result.stderr, result.stderr
    return result


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", "F16")


@pytest.fixture(scope="module")
def planning(model: Path, rpc: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """Options that plan for a loopback device without measuring: a profile with made-up times."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    made_profile(model, rpc.devices[0], SETTINGS, name="RPC0").save(path)
    return ("--local-rpc", "--vram", "50%", "--profile", path, *SMALL)


@pytest.fixture(scope="module")
def plan_file(model: Path, planning: tuple[str | Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = oallama("plan", model, *planning, "--ubatch", "256", "-o", path)
    assert f"written to {path}" in result.stdout
    return path


def test_a_plan_for_weights_that_are_read(model: Path, planning: tuple[str | Path, ...], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    oallama("plan", model, *planning, "--no-mmap", "-o", path)
    assert PlacementPlan.load(path).context.use_mmap is False
    answer = oallama("run", model, "Once", "--plan", path, "--local-rpc", "--threads", "1", "--n-generate", "2")
    assert answer.stdout.strip()


def test_help() -> None:
    """Of the program that pip installs."""
    program = Path(sys.executable).parent / "oallama"
    text = ran(program, "--help").stdout
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str) -> None:
    text = oallama(command, "--help").stdout
    assert "Usage: oallama " + command in text and max(map(len, text.splitlines())) <= 80


def test_doctor_looks_at_everything_and_mends_nothing(tmp_path: Path) -> None:
    shown = oallama("doctor", env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}).stdout
    names = ["engine", "CPU kernels", "RPC", "programs", "packages", "CPUs", "memory", "huge pages", "cache folder"]
    commands = [line for line in shown.splitlines() if line.startswith("    ")]  # to be copied: not cut into lines
    assert all(name in shown for name in names)
    assert max(len(line) for line in shown.splitlines() if line not in commands) <= 80
    findings = json.loads(oallama("doctor", "--json").stdout)
    assert {*names} <= {finding["name"] for finding in findings}
    assert all(set(finding) == {"name", "state", "found", "effect", "remedy"} for finding in findings)
    assert next(f for f in findings if f["name"] == "RPC")["state"] == "ok"


def test_version_names_engine_backends_and_kernels() -> None:
    shown = oallama("--version").stdout
    assert re.search(r"oallama \S+, llama-cpp-python 0\.\S+, llama\.cpp [0-9a-f]{9}\n", shown)
    assert "backends: cpu, rpc" in shown and "CPU kernels: " in shown


def test_devices() -> None:
    devices = json.loads(oallama("devices", "--json", "--local-rpc").stdout)
    assert [d["name"] for d in devices][:1] == ["CPU"] and devices[-1]["name"] == "RPC0"
    assert all(d["memory_total"] > 0 for d in devices if d["type"] in ("cpu", "gpu"))
    assert "RPC0" in oallama("devices", "--local-rpc").stdout


def test_make_model(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    made = json.loads(oallama("make-model", path, "--arch", "qwen2", "--set", "n_layer=2", "--json").stdout)
    assert made == {"path": str(path), "size_bytes": path.stat().st_size}
    assert "MiB" in oallama("make-model", path, "--type", "Q8_0").stdout
    assert "sparse" in oallama("make-model", path, "--shape", "llama3-8b", "--sparse").stdout
    assert path.stat().st_size > 8 * 2**30 and path.stat().st_blocks * 512 < 64 * MIB


def test_profile(tiny: Callable[..., Path], tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    arguments = ("profile", tiny("qwen2"), "--ctx", "64", "--threads", "1")
    shown = oallama(*arguments, "-o", tmp_path / "p.json", env=env).stdout
    assert "CPU" in shown and "GFLOP/s" in shown
    assert Profile.load(tmp_path / "p.json").operators
    began = time.monotonic()
    again = json.loads(oallama(*arguments, "--json", env=env).stdout)
    assert again["devices"][0]["name"] == "CPU" and time.monotonic() - began < 10  # nothing is measured twice


def test_plan_formats(model: Path, planning: tuple[str | Path, ...], plan_file: Path) -> None:
    plan = PlacementPlan.load(plan_file)
    table = oallama("plan", model, *planning).stdout
    assert "RPC0" in table and "TTFT" in table and "layers" in table and max(map(len, table.splitlines())) <= 80
    shown = oallama("plan", model, *planning, "--ubatch", "256", "--json").stdout
    assert PlacementPlan.from_json(shown).hash == plan.hash  # planning is deterministic
    assert oallama("plan", model, *planning, "--ubatch", "256", "--format", "map").stdout == plan.to_backend_map()
    flags = oallama("plan", model, *planning, "--planner", "oato", "--format", "llama.cpp").stdout
    assert re.match(r"-ngl \d+ ", flags)


def test_plan_shows_compute_buffers(model: Path, planning: tuple[str | Path, ...]) -> None:
    shown = oallama("plan", model, *planning, "--planner", "exact", "--memory", "--offline-arenas").stdout
    assert "laid out offline" in shown and max(map(len, shown.splitlines())) <= 80
    rows = [line.split()[:2] for line in shown.splitlines() if line.strip().startswith(("RPC0", "CPU"))]
    assert ["RPC0", "256"] in rows and ["RPC0", "1"] in rows  # a micro-batch, a decode step


def test_plan_for_a_machine_that_is_elsewhere(model: Path, planning: tuple[str | Path, ...], tmp_path: Path) -> None:
    profile = Path(planning[planning.index("--profile") + 1])
    path = tmp_path / "gpu.json"
    path.write_text(profile.read_text().replace("RPC0", "CUDA0").replace('"cpu": "', '"cpu": "another '))
    shown = oallama("plan", model, "--elsewhere", "--profile", path, "--vram", "50%", *SMALL, "--json").stdout
    plan = PlacementPlan.from_json(shown)
    assert plan.devices == ("CUDA0", "CPU") and plan.predicted.devices["CUDA0"].weights > MIB
    assert any("in place of CUDA0" in note for note in plan.predicted.notes)


def test_kinds_of_operators(model: Path) -> None:
    """Of a datasheet's machine, and of this one beside the times in the model's own graphs."""
    shown = oallama("profile", model, "--datasheet", "h200", "--operators", *SMALL).stdout
    assert max(map(len, shown.splitlines())) <= 80 and "affinity" in shown and "computed from a datasheet" in shown
    here = oallama("profile", model, "--device", "CPU", "--operators", "--in-place", "--json", *SMALL).stdout
    content = json.loads(here)
    rows = {row["kind"]: row for row in content["in_place"]["decode"]}
    assert {"attn_q", "ffn_down", "output", "small operators"} <= {*rows}
    for kind in content["decode"]:
        if kind["type"]:
            row = rows[kind["kind"]]
            assert row["number"] == kind["number"] and row["predicted_s"] == kind["seconds"]["CPU"]
            assert kind["saved"] is None and row["error_percent"] is not None
    refused = cli.oallama("profile", model, "--in-place", *SMALL)
    assert refused.returncode == 2 and "--in-place needs --operators" in refused.stderr


def test_plan_script(model: Path, planning: tuple[str | Path, ...]) -> None:
    result = ran(sys.executable, ROOT / "scripts" / "plan.py", model, *planning, "--format", "map")
    assert result.stdout == oallama("plan", model, *planning, "--format", "map").stdout


def test_run_streams_and_times(model: Path, planning: tuple[str | Path, ...], plan_file: Path) -> None:
    common = ("-n", "12", "--temperature", "0")
    alone = oallama("run", model, "Once upon a time", "--no-plan", *SMALL, *common)
    assert "CPU alone" in alone.stderr and re.search(r"12 generated: TTFT .* TPOT .*tokens/s", alone.stderr)
    planned = oallama("run", model, "-", "--plan", plan_file, "--local-rpc", "--threads", "1", *common,
                      stdin="Once upon a time")  # fmt: skip
    assert planned.stdout == alone.stdout and len(planned.stdout) > 12
    under = json.loads(oallama("run", model, "Once upon a time", *planning, *common, "--json").stdout)
    assert under["text"] == alone.stdout.removesuffix("\n") and len(under["token_times_s"]) == 12
    device = under["placement"]["RPC0"]
    assert device["measured"]["total"] <= device["budget"]
    assert abs(device["measured"]["total"] - device["predicted"]["total"]) <= 4 * MIB


def test_without_an_accelerator_a_plan_for_the_cpu_is_made_and_kept(model: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OALLAMA_PLAN_CACHE"}
    env["XDG_CACHE_HOME"] = str(tmp_path)
    command = ("run", model, "Once upon a time", *SMALL, "-n", "4", "--temperature", "0", "--json")
    measured = oallama(*command, env=env)  # its plan is kept if no other work ran beside it
    assert measured.stderr.count("measuring this machine") == 1 and "planned for the CPU alone" in measured.stderr
    shutil.rmtree(tmp_path / "oallama" / "plans", ignore_errors=True)
    made_profile(model, None, SETTINGS).save(tmp_path / "profile.json")
    command += ("--profile", str(tmp_path / "profile.json"))
    first = oallama(*command, env=env)
    assert "planned for the CPU alone" in first.stderr
    (kept,) = tmp_path.glob("oallama/plans/*.json")
    assert PlacementPlan.load(kept).devices == (HOST,)
    again = oallama(*command, env=env)
    assert "measuring" not in again.stderr and json.loads(again.stdout)["text"] == json.loads(first.stdout)["text"]
    predicted = json.loads(again.stdout)["placement"][HOST]["predicted"]
    assert predicted == asdict(PlacementPlan.load(kept).predicted.devices[HOST]) | {"total": predicted["total"]}


def test_the_budget_auto_may_be_no_accelerator(model: Path) -> None:
    assert "planned for the CPU alone" in oallama("run", model, "Hi", "--vram", "auto", *SMALL, "-n", "2").stderr
    assert json.loads(oallama("plan", model, "--vram", "auto", *SMALL, "--json").stdout)["devices"] == [HOST]


def test_chat(model: Path, plan_file: Path) -> None:
    options = ("--plan", plan_file, "--local-rpc", "--threads", "1", "-n", "6", "--system", "Be brief.")
    result = oallama("chat", model, *options, stdin="Hello\n/clear\nHello\n" + "long " * 600 + "\n/exit\nnever asked\n")
    assert result.stdout.count("\n") >= 2
    assert result.stderr.count("error: ") == 1 and "/clear" in result.stderr


def test_a_model_without_a_chat_template_is_refused(model: Path, tmp_path: Path) -> None:
    path, program = tmp_path / "plain.gguf", "gguf.scripts.gguf_new_metadata"
    ran(sys.executable, "-m", program, "--force", "--remove-metadata", "tokenizer.chat_template", model, path)
    result = cli.oallama("chat", path, *SMALL)
    assert result.returncode == 2 and re.fullmatch(r"error: .* has no chat template, .*oallama run .*\n", result.stderr)


def test_ctrl_c_drops_a_line_and_then_ends_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    typed: list[str | type[BaseException]] = ["Hi", KeyboardInterrupt, "Ho", KeyboardInterrupt, KeyboardInterrupt]

    def typing(prompt: str = "") -> str:
        line = typed.pop(0)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", typing)
    assert [chat._ask(), chat._ask(), chat._ask()] == ["Hi", "Ho", None] and not typed


def test_bench(model: Path, planning: tuple[str | Path, ...], baseline_lib: Path, tmp_path: Path) -> None:
    options = [option for option in planning if option not in ("--vram", "50%")]
    result = oallama("bench", model, *options, "--budget", "50%", "--prompts", "8,16", "--gens", "4", "--repeats", "2",
                     "--out", tmp_path)  # fmt: skip
    assert all(name in result.stdout for name in ("oallama", "llama.cpp", "llama.cpp CPU", "baseline"))
    assert max(map(len, result.stdout.splitlines()[:10])) <= 80
    lines = [json.loads(line) for line in (tmp_path / "bench-50pct.jsonl").read_text().splitlines()]
    assert {line["engine"] for line in lines} >= {"oallama", "llama.cpp", "llama.cpp CPU"} and len(lines) == 8
    ours = next(line for line in lines if line["engine"] == "oallama")
    memory = ours["memory"]
    assert abs(sum(memory["predicted_device_bytes"].values()) - sum(memory["measured_device_bytes"].values())) < 4 * MIB
    assert {p.suffix for p in tmp_path.iterdir()} >= {".md", ".csv", ".jsonl"}


AS_IN_A_WHEEL = """
import sys
from pathlib import Path
import oallama.bench
from oallama.cli import main
sys.modules["oallama.bench.baselines"].BUILT = Path("nowhere")
main()
"""


def test_bench_where_unpatched_llama_cpp_is_not_built(model: Path, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OALLAMA_BASELINE_DIR"}
    words = ["bench", model, "--prompts", "8", "--gens", "4", "--repeats", "2", "--json"]
    command = [sys.executable, "-c", AS_IN_A_WHEEL, *map(str, words)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.count("llama.cpp is measured as this engine without a plan") == 1
    lines = json.loads(done.stdout)
    env_of = {line["engine"]: line["env"] for line in lines}
    assert env_of["llama.cpp CPU -fa 1"] == {"OALLAMA_THREADS": "openmp"} and "OALLAMA_THREADS" not in env_of["oallama"]
    assert len({line["lib_dir"] for line in lines}) == 1 and not list(tmp_path.iterdir())
    assert [line["placement"].endswith(", this engine") for line in lines] == [True, True, False]


def test_bench_of_the_cpu_alone(model: Path, baseline_lib: Path, tmp_path: Path) -> None:
    """Beside llama.cpp's CPU with -fa 1 and 0, with a plan given and with one made on the way."""
    options = ("--device", "CPU", "--ctx", "256", "--batch", "64", "--threads", "1")
    oallama("plan", model, *options, "-o", tmp_path / "plan.json")
    sweep = ("--prompts", "8", "--gens", "4", "--repeats", "2", "--out", tmp_path, "--threads", "1", "--json")
    for given in (("--plan", tmp_path / "plan.json"), ("--device", "CPU")):
        lines = json.loads(oallama("bench", model, *given, *sweep).stdout)
        engines = {line["engine"]: line for line in lines}
        assert list(engines) == ["llama.cpp CPU -fa 1", "llama.cpp CPU -fa 0", "oallama"]
        assert engines["oallama"]["vs_baseline"] and not engines["llama.cpp CPU -fa 1"]["plan_hash"]


# ---- serve -----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command, port = [*CLI, "serve", *arguments, "--port"], free_port()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    with process_of([*command, str(port)], **pipes) as process:
        until(lambda: process.poll() is not None or is_up(port), 90)
        assert process.poll() is None, process.communicate()[0][-3000:]
        yield process, port


def is_up(port: int) -> bool:
    try:
        return bool(call(port, "/health")["status"] == "ok")
    except OSError:  # HTTP's errors are such, too
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_under_a_plan(model: Path, plan_file: Path, number: signal.Signals) -> None:
    expected = oallama("run", model, "Once upon a time", "--no-plan", *SMALL, "-n", "8", "--temperature", "0").stdout
    with serving(model, "--plan", plan_file, "--local-rpc", "--threads", "1", "--", "-lv", "5") as (process, port):
        answer = call(port, "/completion", {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0})
        assert answer["content"] == expected.removesuffix("\n")
        reply = call(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
        assert reply["choices"][0]["message"]["role"] == "assistant"
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0, out[-2000:]
    weights = PlacementPlan.load(plan_file).predicted.devices["RPC0"].weights
    loaded = re.search(r"RPC0\S* model buffer size = +([\d.]+) MiB", out)
    assert "by plan" in out and loaded and float(loaded[1]) == pytest.approx(weights / MIB, abs=0.01)


def test_serve_plans_for_as_many_sequences_as_it_serves(model: Path, planning: tuple[str | Path, ...]) -> None:
    """By the same plan as `oallama plan`; the server's buffers are those of the plan."""
    options = [*planning, "--parallel", "4", "--ctx", "2048"]
    made = PlacementPlan.from_json(oallama("plan", model, *options, "--json").stdout)
    assert made.planner["params"]["n_parallel"] == 4 and max(made.predicted.tpot_s) <= 512
    assert "for 4 sequences at once" in oallama("plan", model, *options, "--explain").stdout
    with serving(model, *options, "--", "-lv", "5") as (process, port):
        assert call(port, "/props")["default_generation_settings"]["n_ctx"] == 512
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    for device, memory in made.predicted.devices.items():
        kv, compute = (
            [float(size) for size in re.findall(rf"{device}\S* {kind} buffer size = +([\d.]+) MiB", out)]
            for kind in ("KV", "compute")
        )
        assert sum(kv) == pytest.approx(memory.kv / MIB, abs=0.02)
        assert max(compute, default=0.0) <= memory.compute / MIB + 0.02


def test_serve_without_an_accelerator(model: Path) -> None:
    for options, said in (((), "by plan"), (("--no-plan",), "without a plan on the CPU alone")):
        with serving(model, *SMALL, *options) as (process, port):
            assert call(port, "/completion", {"prompt": "Once", "n_predict": 2})["tokens_predicted"] == 2
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=30)
        assert said in out and ("planned for the CPU alone" in out) == (not options), out[-2000:]


def test_serve_under_a_budget_passes_arguments_on(model: Path, planning: tuple[str | Path, ...]) -> None:
    with serving(model, *planning, "--parallel", "2", "--", "--alias", "my-model", "--metrics") as (process, port):
        assert call(port, "/v1/models")["data"][0]["id"] == "my-model"
        assert process.stdout is not None
        said = next(line for line in process.stdout if line.startswith("serving "))
        assert said == f"serving {model.name} on http://127.0.0.1:{port} (OpenAI API under /v1)\n"
        assert call(port, "/props")["total_slots"] == 2
