"""The benchmark harness: definitions, order of runs, reports, and real worker processes on a tiny model."""

import csv
import io
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oallama.bench import (
    Cell,
    Engine,
    ExpectedTimes,
    LoadParams,
    Result,
    Sweep,
    compare,
    csv_text,
    find_baseline_lib,
    first_prompts,
    jsonl,
    layer_split,
    machine,
    markdown,
    planned,
    print_table,
    run_bench,
    write_plot,
    write_reports,
)
from oallama.bench.baselines import baselines, what_stands_in
from oallama.bench.engines import Worker
from oallama.bench.results import Loaded, Sample
from oallama.bench.stats import average_for, itl, speedup, summarize, tpot
from oallama.bench.sweep import order
from oallama.bench.worker import parse_memory_log
from oallama.data.plan import ContextSettings, DeviceMemory, PlacementPlan, TensorPlacement
from oallama.data.plan import Prediction as PlanPrediction
from oallama.data.predicted import error_percent
from oallama.engine import runtime
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.modelmaker import make_model
from support.paths import ROOT

MIB = 1024 * 1024
CPU = LoadParams(n_threads=1, devices=())


@pytest.fixture(scope="module")
def lib():
    """Folder of a libllama: the installed engine's, else the baseline's."""
    for find in (runtime.lib_dir, find_baseline_lib):
        try:
            return find()
        except OallamaError:
            pass
    pytest.skip("no engine is built")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("bench") / "tiny.gguf", shape="tiny", file_type="F16")


# ---- definitions ----------------------------------------------------------------------------------------------------


def test_tpot_and_itl_leave_out_the_first_token():
    times = [0.5, 0.6, 0.8, 0.9]
    assert tpot(times) == pytest.approx(0.4 / 3)
    assert itl(times) == pytest.approx([0.1, 0.2, 0.1])
    assert tpot([0.5]) is None and itl([0.5]) == []
    sample = Sample(0, tuple(times), (1, 2, 3, 4))
    assert (sample.ttft_s, sample.e2e_s) == (0.5, 0.9)
    assert sample.e2e_s == pytest.approx(sample.ttft_s + 3 * sample.tpot_s)


def test_summary_of_known_values():
    s = summarize([4.0, 1.0, 3.0, 2.0, 5.0])
    assert (s.n, s.p50, s.mean, s.min) == (5, 3.0, 3.0, 1.0)
    assert s.p90 == pytest.approx(4.6) and s.p99 == pytest.approx(4.96)
    assert s.std == pytest.approx(2.5**0.5)
    assert summarize([]) is None and summarize([7.0]).std == 0.0


def test_speedup_is_a_ratio_of_medians_with_an_interval_around_it():
    r = speedup([2.0, 2.1, 1.9, 2.0, 9.0], [1.0, 1.1, 0.9, 1.0, 1.0])
    assert r.value == pytest.approx(2.0) and r.low <= r.value <= r.high
    assert speedup([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).to_json() == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert speedup([1.0, 2.0], [1.0]).value == 1.5 and speedup([], [1.0]) is None


def test_bursts_count_as_often_as_they_come():
    steady, bursty = [1.0] * 10, [0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 3.0, 3.0, 3.0, 3.0]
    assert average_for([steady, [1.0] * 9 + [3.0]]) is np.median, "one round of ten is no burst"
    average = average_for([steady, bursty])
    assert average is np.mean
    assert speedup(bursty, steady).value == 0.8, "by medians the bursty one looks faster"
    assert speedup(bursty, steady, average=average).value == pytest.approx(1.68)


def test_error_percent_is_positive_when_too_much_was_predicted():
    assert error_percent(110, 100) == pytest.approx(10.0)
    assert error_percent(None, 100) is None and error_percent(0, 0) is None


def test_rounds_give_every_engine_every_position():
    assert [order(2, r) for r in range(4)] == [[0, 1], [1, 0], [1, 0], [0, 1]]
    for n in (1, 3, 4):
        rounds = [order(n, r) for r in range(n)]
        assert all(sorted(o) == list(range(n)) for o in rounds)
        assert {o[0] for o in rounds} == {o[-1] for o in rounds} == set(range(n))


def test_sweep_cells_and_context():
    sweep = Sweep(prompts=(64, 32), depths=(512, 0), gens=(32,))
    assert [str(c) for c in sweep.cells()] == [
        "pp32+tg32 @ d0", "pp64+tg32 @ d0", "pp32+tg32 @ d512", "pp64+tg32 @ d512",
    ]  # fmt: skip
    assert sweep.n_ctx() == 768


@pytest.mark.parametrize(
    "bad", [{"prompts": ()}, {"prompts": (0,)}, {"depths": (-1,)}, {"gens": (1,)}, {"repeats": 0}, {"interleave": "x"}]
)
def test_bad_sweeps_are_refused(bad):
    with pytest.raises(OallamaError, match="expected"):
        Sweep(**bad)


# ---- llama.cpp's memory lines ---------------------------------------------------------------------------------------

LOG = """\
load_tensors:   CPU_Mapped model buffer size =    16.56 MiB
load_tensors: RPC0[127.0.0.1:50171] model buffer size =     8.75 MiB
load_tensors:        CUDA0 model buffer size =  4403.50 MiB
load_tensors:        CUDA0 model buffer size =     0.50 MiB
llama_context:  CUDA_Host  output buffer size =     0.49 MiB
llama_kv_cache:        CPU KV buffer size =     0.00 MiB
llama_kv_cache:      CUDA0 KV buffer size =   512.00 MiB
llama_kv_cache: size =  512.00 MiB (  4096 cells,  32 layers,  1/1 seqs), K (f16):  256.00 MiB, V (f16):  256.00 MiB
llama_memory_recurrent:      CUDA0 RS buffer size =     2.00 MiB
sched_reserve: reserving ...
sched_reserve:      CUDA0 compute buffer size =   300.00 MiB
sched_reserve: reserving ...
sched_reserve:      CUDA0 compute buffer size =   258.50 MiB
sched_reserve:  CUDA_Host compute buffer size =    16.01 MiB
sched_reserve: graph: nodes = 130, splits = 1, input objects = 4, input tensors = 6
"""
END = """\
~llama_context:      CUDA0 compute buffer size of 260.0000 MiB, does not match expectation of 258.5000 MiB
~llama_context:  CUDA_Host compute buffer size is  16.0137 MiB, matches expectation of  16.0137 MiB
"""


def test_memory_lines_add_up_and_the_last_reservation_counts():
    memory = parse_memory_log(LOG.splitlines(keepends=True))
    assert memory["CUDA0"] == {"model": 4404 * MIB, "kv": 514 * MIB, "compute": 258.5 * MIB}
    assert memory["RPC0[127.0.0.1:50171]"] == {"model": 8.75 * MIB}
    assert memory["CUDA_Host"] == {"output": round(0.49 * MIB), "compute": round(16.01 * MIB)}
    assert set(memory) == {"CUDA0", "RPC0[127.0.0.1:50171]", "CUDA_Host", "CPU_Mapped"}
    at_end = parse_memory_log((LOG + END).splitlines())
    assert at_end["CUDA0"]["compute"] == 260 * MIB
    assert at_end["CUDA_Host"]["compute"] == round(16.0137 * MIB)


def test_only_a_device_s_own_memory_counts_as_device_bytes():
    devices = [
        {"name": "CPU", "kind": "cpu", "buffer_type": "CPU"},
        {"name": "RPC1", "kind": "gpu", "buffer_type": "RPC0[127.0.0.1:50171]"},
        {"name": "CUDA0", "kind": "gpu", "buffer_type": "CUDA0"},
    ]
    loaded = Loaded([0.1], {}, devices, parse_memory_log(LOG.splitlines()))
    assert loaded.device_bytes() == {"RPC1": 8.75 * MIB, "CUDA0": (4404 + 514 + 258.5) * MIB}


# ---- reports --------------------------------------------------------------------------------------------------------


def made_up(engine, scale, baseline=False, tokens=(1, 2, 3), cell=Cell(0, 64, 3)):  # noqa: B008
    samples = [
        Sample(r, tuple(scale * t for t in (0.1 + r / 1000, 0.11 + r / 1000, 0.12 + r / 1000)), tokens)
        for r in range(5)
    ]
    loaded = Loaded(
        [1.5],
        {"description": "llama | 8B Q4_K", "size_bytes": 4 << 30, "n_params": 8_030_000_000, "n_layer": 32},
        [{"name": "CUDA0", "kind": "gpu", "buffer_type": "CUDA0"}],
        {"CUDA0": {"model": 100 * MIB}},
    )
    common = {"time": "t", "commit": "c", "dirty": False, "model_file": {"name": "m.gguf"}, "hardware": {"cpu": "X"}}
    return Result(
        engine, "-ngl 9", cell, baseline, {}, {}, "/lib", "hash", {"CUDA0": 99 * MIB}, ExpectedTimes(0.09, 0.01),
        common, loaded, samples,
    )  # fmt: skip


@pytest.fixture
def results():
    failed = made_up("too big", 1.0)
    failed.samples, failed.loaded, failed.error = [], None, "out of memory"
    return [made_up("llama.cpp", 1.0, baseline=True), made_up("oallama", 0.5, tokens=(1, 2, 9)), failed]


def test_json_lines_parse_back(results):
    base, ours, failed = (json.loads(line) for line in jsonl(results, token_times=True).splitlines())
    assert base["baseline"] and base["vs_baseline"] is None and base["commit"] == "c"
    assert ours["ttft_s"]["p50"] == pytest.approx(0.051) and ours["tpot_s"]["p50"] == pytest.approx(0.005)
    assert ours["vs_baseline"]["ttft"]["value"] == pytest.approx(2.0) and ours["vs_baseline"]["same_tokens"] is False
    assert ours["memory"]["error_percent"] == pytest.approx(-1.0)
    assert ours["prediction"]["tpot_error_percent"] == pytest.approx(100.0)
    assert len(ours["samples"]) == 5 and ours["samples"][0]["tokens"] == [1, 2, 9]
    assert failed["error"] == "out of memory" and failed["ttft_s"] is None
    assert "tokens" not in json.loads(jsonl(results).splitlines()[0])["samples"][0]


def test_csv_parses_back(results):
    base, ours, failed = csv.DictReader(io.StringIO(csv_text(results)))
    assert float(ours["speedup_tpot_value"]) == pytest.approx(2.0) and base["speedup_tpot_value"] == ""
    assert ours["n_prompt"] == "64" and int(ours["measured_device_bytes"]) == 100 * MIB
    assert failed["error"] == "out of memory" and failed["ttft_s_p50"] == ""


def test_markdown_table_is_rectangular_and_notes_say_what_is_missing(results):
    text = markdown(results)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 4 and len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    assert "pp64+tg3 @ d0" in table[3] and "2.00x / 2.00x" in table[3] and "baseline" in table[2]
    assert "- too big was left out: out of memory" in text and "oallama gave other tokens" in text


def test_terminal_table_prints(results, capsys):
    print_table(results)
    assert "oallama" in capsys.readouterr().out


def test_reports_are_written_and_an_unwritable_place_is_named(results, tmp_path):
    paths = write_reports(results, tmp_path / "out" / "run.1")
    assert [p.name for p in paths] == ["run.1.md", "run.1.csv", "run.1.jsonl"] and all(p.stat().st_size for p in paths)
    (tmp_path / "file").write_text("")
    with pytest.raises(OallamaError, match="cannot write"):
        write_reports(results, tmp_path / "file" / "run")


def test_plot_is_a_png(results, tmp_path):
    pytest.importorskip("matplotlib")
    png = write_plot(results, tmp_path / "new" / "p.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OallamaError, match="no results"):
        write_plot(results[2:], png)


def test_plot_without_matplotlib_names_the_extra(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OallamaError, match=r"pip install oallama\[plot\]"):
        write_plot(results, tmp_path / "p.png")


# ---- baselines and plans --------------------------------------------------------------------------------------------


def test_missing_baseline_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setenv("OALLAMA_BASELINE_DIR", str(tmp_path))
    for find in (find_baseline_lib, what_stands_in):
        with pytest.raises(OallamaError, match="make baseline"):
            find()


def test_baselines_differ_only_in_placement(tmp_path):
    split, cpu, full = baselines(LoadParams(rpc_servers=("h:1",), n_threads=3), 7, {"RPC0": 5}, tmp_path)
    assert split.baseline and split.params.n_gpu_layers == 7 and split.predicted_bytes == {"RPC0": 5}
    assert cpu.params.devices == () and cpu.params.rpc_servers == () and cpu.params.n_gpu_layers == 0
    assert full.optional and full.params.n_gpu_layers < 0
    assert {e.params.n_threads for e in (split, cpu, full)} == {3}


def a_plan(layers, tensors, devices=("CPU",)):
    return PlacementPlan(
        model={}, planner={"name": "t", "params": {}}, budgets={}, context=ContextSettings(512, 256, 128),
        devices=devices, layers=layers, tensors=tensors,
        predicted=PlanPrediction(
            {d: DeviceMemory(5, 2, 1) for d in devices}, {32: 0.2, 64: 0.4}, {0: 0.01, 128: 0.02}, (32, 32), 1.0
        ),
    )  # fmt: skip


def test_planned_engine_takes_context_table_and_prediction_from_the_plan(tmp_path):
    place = TensorPlacement.whole("F16", 8, "RPC0", "resident")
    plan = a_plan(("RPC0",), {"output.weight": place}, ("RPC0", "CPU"))
    engine = planned(plan, tmp_path, LoadParams(n_threads=2, rpc_servers=("h:1",)))
    assert engine.params.n_ctx == 512 and engine.params.n_ubatch == 128 and engine.params.n_threads == 2
    assert engine.params.devices == ("RPC0",) and engine.predicted_bytes == {"RPC0": 8}
    assert engine.plan_hash == plan.hash and "tensor output.weight RPC0 resident" in engine.backend_map
    assert engine.predict(Cell(depth=0, prompt=48, gen=32)).ttft_s == pytest.approx(0.3)
    assert engine.predict(Cell(depth=0, prompt=48, gen=32)).tpot_s == pytest.approx(0.015)
    assert engine.predict(Cell(depth=1000, prompt=48, gen=32)) == ExpectedTimes(None, None)


# ---- real processes -------------------------------------------------------------------------------------------------


def test_worker_measures_what_it_was_asked_for(lib, model):
    with Worker(Engine("cpu", lib, CPU)) as worker:
        loaded = worker.load(model, CPU.resolved(512))
        assert loaded.load_s[0] > 0 and loaded.model["n_layer"] == 4 and loaded.device_bytes() == {}
        held = [sum(sizes.get(kind, 0) for sizes in loaded.memory.values()) for kind in ("model", "kv", "compute")]
        assert held[0] > 0.9 * loaded.model["size_bytes"] and held[1] > 0 and held[2] > 0
        text = worker.tokenize("Alice was beginning to get very tired of sitting by her sister on the bank.")
        first = worker.run(0, [], text, 5)
        assert len(first.tokens) == 5 and list(first.token_times_s) == sorted(first.token_times_s)
        # The cache is filled again, cut back or cleared between runs: neighbours must not change the outcome.
        deep = worker.run(1, text, text[:4], 5)
        assert worker.run(2, text, text[:4], 5).tokens == deep.tokens
        assert worker.run(3, [], text, 5).tokens == first.tokens
        assert worker.run(4, text, text[:4], 5).tokens == deep.tokens
        worker.observe(loaded)
        assert loaded.peak_rss_bytes > loaded.model["size_bytes"] / 2
        with pytest.raises(OallamaError, match="more than n_ctx"):
            worker.run(5, [], text, 600)
        assert worker.unload()["CPU"]["compute"] > 0
        worker.load(model, CPU.resolved(256))


def one_line_error(call):
    with pytest.raises(OallamaError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_engines_that_cannot_load_say_why_in_one_line(lib, model, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model" * 100)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[: model.stat().st_size // 2])
    sweep = Sweep(prompts=(8,), gens=(2,), repeats=1, warmup=0)
    engine = Engine("mine", lib, CPU)
    message = one_line_error(lambda: run_bench(bad, [engine], sweep))
    assert "'mine'" in message and "magic" in message
    assert "'mine'" in one_line_error(lambda: run_bench(cut, [engine], sweep))
    assert "does not exist" in one_line_error(lambda: run_bench(tmp_path / "no.gguf", [engine], sweep))
    assert "is a directory" in one_line_error(lambda: run_bench(tmp_path, [engine], sweep))
    assert "libllama.so" in one_line_error(lambda: run_bench(model, [Engine("x", tmp_path)], sweep))
    wrong = [("devices", ("X9",)), ("type_k", "f17"), ("rpc_servers", ("127.0.0.1:1",)), ("rpc_servers", ("nonsense",))]
    with Worker(engine) as worker:
        for field, value in wrong:
            params = LoadParams(**{"n_threads": 1, "n_ctx": 256, field: value})
            assert str(value[0] if isinstance(value, tuple) else value) in one_line_error(
                lambda p=params: worker.load(model, p)
            )


def test_a_worker_that_dies_is_reported_with_its_last_words(lib, model):
    with Worker(Engine("mine", lib, CPU)) as worker:
        worker.load(model, CPU.resolved(256))
        os.kill(worker.pid, 9)
        message = one_line_error(lambda: worker.run(0, [], [1, 2], 4))
        assert "'mine'" in message and "SIGKILL, out of memory?" in message and "sched_reserve" in message


def test_a_worker_that_hangs_is_stopped(lib, model):
    worker = Worker(Engine("mine", lib, CPU), run_timeout_s=0.0)
    worker.load(model, CPU.resolved(256))
    assert "no answer to run within 0 s" in one_line_error(lambda: worker.run(0, [], [1, 2], 200))
    assert worker._child.process.poll() is not None


def test_an_engine_without_a_plan_does_not_inherit_the_caller_s(lib, model, monkeypatch):
    monkeypatch.setenv("OALLAMA_BACKEND_MAP", "/nonexistent")
    with Worker(Engine("base", lib, CPU)) as worker:
        worker.load(model, CPU.resolved(256))


def test_an_engine_has_the_instructions_of_its_caller(lib, model, monkeypatch):
    monkeypatch.setenv("OALLAMA_INSTRUCTIONS", "avx2")
    with Worker(Engine("base", lib, CPU)) as worker:
        environment = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
        assert b"OALLAMA_INSTRUCTIONS=avx2" in environment


@pytest.mark.parametrize("interleave", ["loaded", "reload"])
def test_run_bench_end_to_end(lib, model, interleave, monkeypatch):
    calls, progress = [], []
    run = Worker.run
    monkeypatch.setattr(
        Worker, "run", lambda self, round_, *rest: calls.append((round_, self.engine.name)) or run(self, round_, *rest)
    )
    engines = [
        layer_split(CPU, 0, {}, lib),
        Engine("same", lib, CPU, predict=lambda cell: ExpectedTimes(cell.prompt / 1e3)),
        Engine("absent", lib, LoadParams(devices=("X9",)), optional=True),
    ]
    sweep = Sweep(prompts=(8, 16), depths=(0, 16), gens=(4,), repeats=2, interleave=interleave)
    results = run_bench(model, engines, sweep, lambda *step: progress.append(step), argv=["me"])
    assert [(r.engine, str(r.cell)) for r in results[:4]] == [
        ("llama.cpp", "pp8+tg4 @ d0"), ("same", "pp8+tg4 @ d0"), ("absent", "pp8+tg4 @ d0"),
        ("llama.cpp", "pp16+tg4 @ d0"),
    ]  # fmt: skip
    if interleave == "loaded":
        order = ("same", "llama.cpp", "llama.cpp", "same", "same", "llama.cpp")
        assert calls[:6] == list(zip((-1, -1, 0, 0, 1, 1), order, strict=True))
    else:
        assert calls[:2] == [(-1, "llama.cpp"), (0, "llama.cpp")] and calls[8] == (-1, "same")
    assert progress[-1][:2] == (progress[-1][1], progress[-1][1]) and len({p[1] for p in progress}) == 1
    for r in results:
        if r.engine == "absent":
            assert "X9" in r.error and not r.samples
            continue
        assert [s.round for s in r.samples] == [0, 1] and r.warmups and r.deterministic() and r.error is None
        assert len(r.loaded.load_s) == (1 if interleave == "loaded" else 2)
        # The first prompt after each load is the warm-up of the first cell.
        first = [s.ttft_s for s in results[0 if r.engine == "llama.cpp" else 1].warmups]
        assert r.loaded.first_prompts == [(8, ttft_s) for ttft_s in first]
        versus = compare(r, results)
        assert (versus is None) == r.baseline and (versus is None or versus.same_tokens)
    lines = first_prompts(results)
    assert [line.split(" (")[0] for line in lines] == [
        f"{name}: the first prompt after a load" for name in ("llama.cpp", "same")
    ]
    assert all(line in markdown(results) for line in lines)
    row = json.loads(jsonl(results).splitlines()[1])
    assert [first["n_prompt"] for first in row["first_prompts"]] == [8] * len(results[1].loaded.load_s)
    assert row["argv"] == ["me"] and row["params"]["n_ctx"] == 256 and row["prediction"]["ttft_s"] == 0.008
    assert row["hardware"]["cpu"] and row["memory"]["peak_rss_bytes"] and {"commit", "dirty", "pin"} <= set(row)


@pytest.mark.parametrize("interleave", ["loaded", "reload"])
def test_rounds_end_at_the_limit_or_when_it_is_enough(lib, model, interleave):
    def rounds(**more):
        sweep = Sweep((8,), gens=(2,), repeats=6, interleave=interleave, **more)
        (result,) = run_bench(model, [Engine("a", lib, CPU)], sweep)
        return len(result.samples)

    assert rounds(limit_s=0.0) == 1
    assert rounds(enough=lambda results: len(results[0].samples) >= 3) == 3


def test_ctrl_c_leaves_no_process(lib, model, monkeypatch):
    started = []
    load = Worker.load
    monkeypatch.setattr(Worker, "load", lambda self, *rest: started.append(self) or load(self, *rest))

    def interrupt(done, total, what):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(model, [Engine("a", lib, CPU), Engine("b", lib, CPU)], Sweep((8,), gens=(2,)), interrupt)
    assert len(started) == 2 and all(w._child.process.poll() is not None for w in started)


def test_engines_may_not_share_an_rpc_server_while_all_are_loaded(lib, model):
    params = LoadParams(rpc_servers=("127.0.0.1:50052",))
    engines = [Engine("a", lib, params), Engine("b", lib, params)]
    with pytest.raises(OallamaError, match="share an RPC server"):
        run_bench(model, engines, Sweep(prompts=(8,)))


def test_rpc_server_s_memory_is_measured(lib, model):
    with LocalRpcServer(threads=1, register=False) as server:
        params = LoadParams(n_threads=1, rpc_servers=(server.endpoint,))
        sweep = Sweep((8,), (0,), (2,), repeats=1, warmup=0)
        (result,) = run_bench(model, [layer_split(params, 3, None, lib)], sweep)
        moved = replace(params, override_tensor=((r"\.ffn_.*", "CPU"),))
        (less,) = run_bench(model, [layer_split(moved, 3, None, lib)], sweep)
    devices = [d["name"] for d in result.loaded.devices if d["description"] == server.endpoint]
    measured = result.loaded.device_bytes()
    assert devices and 0 < measured[devices[0]] < 200 * MIB
    assert sum(result.loaded.memory[f"RPC0[{server.endpoint}]"].values()) == measured[devices[0]]
    assert 0 < less.loaded.device_bytes()[devices[0]] < measured[devices[0]]


def test_reports_do_not_say_where_files_lay():
    inside = str(machine.REPOSITORY / "bench" / "cells.jsonl")
    argv = ["bench/cells.py", "--out", inside, f"--tables={inside}", "/tmp/x/a=b.jsonl", "--vram=RPC0=2GiB", "--reload"]
    expected = ["bench/cells.py", "--out", "bench/cells.jsonl", "--tables=bench/cells.jsonl"]
    assert machine.describe(argv)["argv"] == [*expected, "a=b.jsonl", "--vram=RPC0=2GiB", "--reload"]


def test_nvidia_smi_is_read(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase $1 in *gpu*) echo 'NVIDIA X, 24564, 550.1, 4, 16, 450.00, 2520';;\n"
        "*) printf '7, 300\\n8, [N/A]\\n7, 20\\n';; esac\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.gpus()[0]["name"] == "NVIDIA X" and machine.gpus()[0]["driver_version"] == "550.1"
    assert machine.gpu_process_bytes(7) == 320 * MIB
    assert machine.gpu_process_bytes(8) is None and machine.gpu_process_bytes(9) is None


@pytest.mark.parametrize(("file", "more"), [("worker.py", {"llama_cpp", "worker_ggml"}), ("worker_ggml.py", set())])
def test_worker_imports_nothing_of_oallama(file, more):
    source = Path(sys.modules[Worker.__module__].__file__).with_name(file).read_text()
    assert set(re.findall(r"^\s*(?:from|import) (\w+)", source, re.M)) <= {*sys.stdlib_module_names, *more}


def test_results_are_dated() -> None:
    """A file without its day is what a script wrote last, and nobody can quote it."""
    results = ROOT / "bench" / "results"
    assert [path.name for path in results.iterdir() if not re.match(r"20\d\d-\d\d-\d\d-\w", path.name)] == []
