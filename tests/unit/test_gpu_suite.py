"""The GPU suite keeps its limits of time and bytes; its commands are rehearsed by .ci/run (gpu_suite.sh --rehearse)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import check
import common
import maps
import preflight
import pytest
import stock
import times
from table import promised

from oallama.base.processor import processor
from oallama.errors import OallamaError
from support.paths import ROOT
from support.processes import ran, ran_python

SUITE = (ROOT / "scripts/gpu_suite.sh").read_text()
BUNDLE = (ROOT / "scripts/bundle.sh").read_text()
DOCUMENT = (ROOT / "docs/gpu.md").read_text()
CALL_S, CARRIED_BYTES = 570, 64 << 20  # of the lending tool: what a call may take here, what travels
RETURNED_FILES, RETURNED_BYTES = 8, 16 << 20  # each


def setting(text: str, name: str) -> int:
    found = re.search(rf"^{name}=(\d+)", text, re.MULTILINE)
    assert found is not None, name
    return int(found[1])


def limits() -> dict[int, dict[str, int]]:
    table = ran(ROOT / "scripts/gpu_suite.sh", "--limits")
    found: dict[int, dict[str, int]] = {}
    for line in table.stdout.splitlines():
        call, stage, seconds = line.split()
        found.setdefault(int(call), {})[stage] = int(seconds)
    return found


def test_the_stages_of_a_call_fit_into_it() -> None:
    assert setting(SUITE, "call_seconds") < CALL_S
    for call, stages in limits().items():
        assert sum(stages.values()) <= setting(SUITE, "call_seconds") - 10, f"call {call}"
    documented = re.findall(r"GPU_SUITE_SECONDS=(\d+) bash scripts/gpu_suite.sh (\d)", DOCUMENT)
    assert len(documented) == 2
    for seconds, call in documented:
        assert sum(limits()[int(call)].values()) <= int(seconds), f"call {call}"


def test_what_is_carried_is_below_the_limit() -> None:
    files = ran("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    paths = [ROOT / name for name in files.stdout.split("\0") if name]
    tree = sum(512 + -(-path.stat().st_size // 512) * 512 for path in paths if path.is_file())  # as tar has it
    bundle = setting(BUNDLE, "max_bytes")  # bundle.sh makes no larger one
    engine = setting(SUITE, "part_bytes") * setting(SUITE, "max_parts")
    assert tree + bundle < CARRIED_BYTES
    assert setting(SUITE, "part_bytes") <= RETURNED_BYTES and setting(SUITE, "max_parts") + 1 <= RETURNED_FILES
    # Of gpu_engine.sh with unpatched llama.cpp: ggml-cuda for one architecture packs to 21 MB.
    expected_engine = 44_760_000
    assert expected_engine <= engine and tree + expected_engine < CARRIED_BYTES


def test_there_are_expectations_for_every_stage_that_measures() -> None:
    stages = {stage for call in limits().values() for stage in call}
    assert set(check.KINDS) <= stages and set(check.NEEDS_A_GPU) <= stages
    measured = set(re.findall(r"^\d (\w+) \d+ \|", SUITE, re.MULTILINE))
    assert stages - measured <= set(re.findall(r"^stage_(\w+)\(\) {", SUITE, re.MULTILINE))
    assert measured <= set(check.KINDS) and len(measured) >= 9


def line(what: str, **values: Any) -> dict[str, Any]:
    return {"what": what, "machine": {"gpus": [], "cpu": "x", "commit": "y"}, **values}


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ([line("llama-bench"), line("end", complete=True)], None),
        ([line("end", complete=True)], "no line 'llama-bench'"),
        ([], "no lines"),
        ([line("llama-bench", error="lost")], "llama-bench: lost"),
        ([line("llama-bench"), line("end", complete=False, unfinished=["a set"])], "unfinished: ['a set']"),
        ([{"what": "llama-bench", "machine": {}}], "a line without the machine: llama-bench"),
    ],
)
def test_a_rehearsal_is_judged(found: list[dict[str, Any]], wrong: str | None) -> None:
    said = check.faults("stock", found)
    assert wrong in said if wrong else said == []


def test_what_cupti_saw_is_summed() -> None:
    """In seconds of one pass: kernels that overlap count once, copies by kind, what the host did not at all."""

    def event(category: str, name: str, begin: int, microseconds: int, **args: int) -> dict[str, Any]:
        return {"cat": category, "name": name, "ts": begin, "dur": microseconds, "args": args}

    copy = "Memcpy HtoD (Pinned -> Device)"
    found = times.summary(
        [
            event("kernel", "void k<1>(int)", 0, 10),
            event("kernel", "void k<1>(int)", 5, 10),
            event("kernel", "l", 40, 2),
            event("gpu_memcpy", copy, 10, 20, bytes=4000),
            event("cuda_runtime", "cudaLaunchKernel", 0, 90),
            {"name": "without a category"},
        ],
        passes=2,
    )
    assert found["kernels_s"] == pytest.approx(8.5e-6) and found["copies_s"] == pytest.approx(10e-6)
    assert found["both_s"] == pytest.approx(2.5e-6) and found["first_to_last_s"] == pytest.approx(21e-6)
    assert [kernel["name"] for kernel in found["longest"]] == ["k<1>(int)", "l"]
    assert found["longest"][0]["s"] == pytest.approx(10e-6) and found["longest"][0]["n"] == 1
    assert found["copies"] == {copy: {"s": pytest.approx(10e-6), "bytes": 2000, "n": 0.5}}
    assert times.summary([], 1)["kernels_s"] == 0


def test_the_facts_of_a_machine_need_no_package() -> None:
    # -S: as a python without any package, which is what the preflight of a lent machine finds.
    done = ran(sys.executable, "-S", "-c", "import common; print(common.facts()['cpu'])", cwd=ROOT / "bench/gpu")
    assert done.stdout.strip() == processor().name


def test_a_promise_behind_a_depth_is_that_of_the_plans_request() -> None:
    plan = {
        "model": "m", "name": "auto", "depth": 16384, "predicted_ttft_s": {"128": 0.1, "512": 0.2},
        "predicted_tpot_s": {"0": 0.05, "16896": 0.07},
        "predicted_parts_s": {"prefill": {"targets": 0.25, "copies": 0.05}},
    }  # fmt: skip
    line = {"model": "m", "depth": 16384, "prompt": 512}
    assert promised([plan], line, "auto", "512") == ("300.00", "70.00")
    assert promised([plan], line, "auto", "128")[0] == "-"  # of an empty cache, and of no use here
    empty = {"model": "m", "depth": 0, "prompt": 512}
    assert promised([{**plan, "depth": 0}], empty, "auto", "128") == ("100.00", "50.00")


def test_rounds_end_before_the_stage_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete rounds only; a job that fails is said once and left out; the end says what is missing."""
    out, clock = tmp_path / "lines.jsonl", [1000.0]
    monkeypatch.setenv("STAGE_END", "1100")
    for name in ("time", "monotonic"):
        monkeypatch.setattr(common.time, name, lambda: clock[0])

    def job(seconds: float, error: str | None = None) -> Callable[[], dict[str, Any]]:
        def run() -> dict[str, Any]:
            clock[0] += seconds
            if error:
                raise OallamaError(error)
            return {"value": 1}

        return run

    with common.Log(out) as log:
        log.rounds("set", {"a": job(10), "b": job(20), "c": job(1, "no device")}, 5, model="m")
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    rounds = [(x["name"], x["round"]) for x in lines if x["what"] == "set" and "value" in x]
    assert sorted(rounds) == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
    assert [x["error"] for x in lines if "error" in x] == ["no device"]
    assert lines[-1]["what"] == "end" and not lines[-1]["complete"] and "3 of 5 rounds" in lines[-1]["unfinished"][0]
    assert all({"gpus", "cpu", "commit", "cuda"} <= set(x["machine"]) for x in lines)


def test_a_stage_that_is_stopped_says_so(tmp_path: Path) -> None:
    program = """if True:
        import os, signal, sys
        from common import Log, Path
        with Log(Path(sys.argv[1])) as log:
            log.add("first")
            os.kill(os.getpid(), signal.SIGTERM)
            log.add("never")
    """
    out = tmp_path / "lines.jsonl"
    ran_python(program, out, cwd=ROOT / "bench/gpu")
    first, end = (json.loads(text) for text in out.read_text().splitlines())
    assert first["what"] == "first"
    assert (end["complete"], end["unfinished"]) == (False, ["stopped at the limit of the stage"])


def test_variables_are_those_that_the_pinned_source_reads() -> None:
    folder = ROOT / "third_party/llama.cpp/patched/ggml/src/ggml-cuda"
    source = "".join(path.read_text() for path in (folder / "ggml-cuda.cu", folder / "common.cuh"))
    names = {name for variables in stock.VARIANTS.values() for name in variables} | {"GGML_CUDA_DEVICES"}
    for name in names:
        assert f'getenv("{name}")' in source, name


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_ready_made_maps_can_be_loaded(arch: str, tiny: Callable[..., Path], rpc: Any) -> None:
    from oallama.engine import skeleton
    from oallama.engine.load_settings import Settings
    from oallama.loading import autoplan

    path, device = tiny(arch), rpc.devices[0]
    settings = Settings(n_ctx=256, devices=(device,), flash_attn="on")
    graph = autoplan.read_graph(path, settings)
    table = maps.mixed(graph, device)
    for word in ("resident", "host", "upload", "stream", "segment"):
        assert word in table
    assert skeleton.dry_run(path, settings, table)[device]["weights"] > 0
    halves = maps.halves(graph, ("A", "B"))
    assert "layer 0 A" in halves and f"layer {graph.n_layer} B" in halves


def test_the_build_is_led_to_libraries_in_unusual_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "toolkits", lambda: iter([Path("/usr/local/cuda-13")]))
    usual = {
        "cublas_v2.h": Path("/usr/local/cuda-13/include/cublas_v2.h"), "libcublas": None, "libcublasLt": None,
        "libcuda to link": Path("/usr/local/cuda-13/lib64/stubs/libcuda.so"), "libcuda.so.1": None, "Python.h": None,
    }  # fmt: skip
    assert preflight.build_environment(usual) == []
    wheel = Path("/site/nvidia/cu13")
    unusual = usual | {
        "cublas_v2.h": wheel / "include/cublas_v2.h", "libcublas": wheel / "lib/libcublas.so.13",
        "libcuda to link": None, "libcuda.so.1": Path("/usr/lib/libcuda.so.1"), "Python.h": Path("/opt/inc/Python.h"),
    }  # fmt: skip
    text = "\n".join(preflight.build_environment(unusual))
    for wanted in (
        "export CPATH=/site/nvidia/cu13/include:",
        "-DCUDA_cublas_LIBRARY=/site/nvidia/cu13/lib/libcublas.so.13",
        "-DCUDA_cuda_driver_LIBRARY=/usr/lib/libcuda.so.1",
        "-DPython_INCLUDE_DIR=/opt/inc",
    ):
        assert wanted in text


def test_shellcheck() -> None:
    try:
        done = subprocess.run(["shellcheck", ROOT / "scripts/gpu_suite.sh", ROOT / "scripts/bundle.sh"], check=False)
    except FileNotFoundError:
        pytest.skip("no shellcheck here")
    assert done.returncode == 0
