"""The measured choice: real plans in real processes, their order, what is recorded, and what cannot be measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from oallama.bench.engines import Engine, LoadParams, Worker
from oallama.bench.planned import planned
from oallama.bench.results import Cell, ExpectedTimes, Loaded, Result, Sample
from oallama.bench.sweep import Sweep
from oallama.data.plan import HOST, DeviceMemory, PlacementPlan, Segment, TensorPlacement
from oallama.data.predicted import predicted_times
from oallama.engine import runtime
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import verify as verify_module
from oallama.loading.verify import request_seconds, verify
from oallama.views.verification import render_verification
from support.hand_plan import hand_plan


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", "F16")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server that only the workers know; its device is their RPC0."""
    with LocalRpcServer(threads=1, register=False) as server:
        yield server.endpoint


@pytest.fixture(scope="module")
def on_cpu(model: Path) -> PlacementPlan:
    return hand_plan(model, HOST, name="cpu")


class FakeBench:
    """Stands in for `run_bench`: engine i takes `seconds[i]` for a prompt and a tenth of it for every token after."""

    def __init__(self, seconds: Sequence[float | None]) -> None:
        self.seconds = seconds

    def __call__(
        self, path: Any, engines: Sequence[Engine], sweep: Sweep, progress: Any, **timeouts: float
    ) -> list[Result]:
        self.engines, self.sweep = engines, sweep
        (cell,) = sweep.cells()
        return [self._result(e, cell, s) for e, s in zip(engines, self.seconds, strict=True)]

    def _result(self, engine: Engine, cell: Cell, s: float | None) -> Result:
        result = Result(engine.name, "", cell, False, {}, {}, "", engine.plan_hash, None, ExpectedTimes(), {})
        if s is None:
            result.error = f"engine {engine.name!r}: boom"
            return result
        gpu = {"buffer_type": "B", "name": "RPC0", "kind": "gpu"}
        result.loaded = Loaded([0.1], {}, [gpu], {"B": {"model": 70, "kv": 7}})
        for round_, factor in enumerate((0.9, 1.0, 1.2)[: self.sweep.repeats]):
            times = tuple(factor * s * (1 + i / 10) for i in range(cell.gen))
            result.samples.append(Sample(round_, times, (1,) * cell.gen))
        return result


def fake(monkeypatch: pytest.MonkeyPatch, *seconds: float | None) -> FakeBench:
    bench = FakeBench(seconds)
    monkeypatch.setattr(verify_module, "run_bench", bench)
    return bench


# ---- real processes --------------------------------------------------------------------------------------------------


def test_plans_on_cpu_and_rpc_are_measured(model: Path, on_cpu: PlacementPlan, endpoint: str, tmp_path: Path) -> None:
    plans = [hand_plan(model, "RPC0", name="rpc"), on_cpu, hand_plan(model, "RPC0", on_host="none", name="all")]
    said: list[tuple[float, float, str]] = []
    done = verify(model, plans, rpc_servers=[endpoint], n_threads=1, rounds=2, progress=lambda *step: said.append(step))
    assert {p.hash for p in done} == {p.hash for p in plans}
    times = [p.measured["request_s"] for p in done]
    assert times == sorted(times) and times[0] > 0
    for plan in done:
        m = plan.measured
        assert (m["n_prompt"], m["n_generate"], m["rounds"], m["interleave"]) == (16, 8, 2, "reload")
        assert len(m["rounds_s"]) == 2 and m["request_s"] == pytest.approx(sum(m["rounds_s"]) / 2, rel=1e-4)
        assert m["request_s"] == pytest.approx(m["ttft_s"] + 7 * m["tpot_s"], rel=max(1e-6, m["spread"]))
        if plan.devices == (HOST,):
            assert m["device_bytes"] == {}
        else:
            weights = plan.predicted.devices["RPC0"].weights
            assert weights <= m["device_bytes"]["RPC0"] < weights + (64 << 20)
        plan.save(tmp_path / "plan.json")
        assert PlacementPlan.load(tmp_path / "plan.json") == plan
    assert said[-1][0] == said[-1][1] and any("rpc" in text for *_, text in said)


def test_a_plan_that_cannot_load_is_reported_last(model: Path, on_cpu: PlacementPlan) -> None:
    absent = hand_plan(model, "CUDA7", name="absent")
    good, bad = verify(model, [absent, on_cpu], n_threads=1, rounds=1, workload=(4, 2))
    assert (good.hash, bad.hash) == (on_cpu.hash, absent.hash)
    assert good.measured["interleave"] == "loaded" and good.measured["n_prompt"] == 4
    assert "CUDA7" in bad.measured["error"] and set(bad.measured) == {"error", "others_cpus"}
    with pytest.raises(OallamaError, match=r"none of 1 plans could be measured.*CUDA7"):
        verify(model, [absent], n_threads=1, rounds=1)


# ---- what is run -----------------------------------------------------------------------------------------------------


def test_fastest_first_failures_last(monkeypatch: pytest.MonkeyPatch, model: Path, on_cpu: PlacementPlan) -> None:
    plans = [replace(on_cpu, planner={"name": str(i), "params": {}}) for i in range(4)]
    fake(monkeypatch, 3.0, None, 1.0, 2.0)
    done = verify(model, plans, rounds=3)
    assert [p.planner["name"] for p in done] == ["2", "3", "0", "1"]
    assert [p.hash for p in done] == [plans[i].hash for i in (2, 3, 0, 1)]
    first = done[0].measured
    assert (first["ttft_s"], first["tpot_s"]) == pytest.approx((1.0, 0.1))
    assert first["request_s"] == pytest.approx(1.7) and first["spread"] == pytest.approx(0.3)
    assert first["steady"]
    assert first["device_bytes"] == {"RPC0": 77} and first["created"]
    assert "boom" in done[-1].measured["error"]


def test_time_ends_when_it_is_clear_and_beside_bursts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(verify_module.time, "monotonic", lambda: now)
    enough = verify_module._enough_within(5.0)

    def results(*series: list[float]) -> list[Result]:
        found = [Result(str(i), "", Cell(0, 1, 2), False, {}, {}, "", None, None, ExpectedTimes(), {}) for i in (0, 1)]
        for result, times in zip(found, series, strict=True):
            result.samples += [Sample(i, (s / 2, s), (1, 1)) for i, s in enumerate(times)]
        return found

    alike, clear = results([1.0] * 6, [1.03, 0.97] * 3), results([1.0] * 6, [2.0] * 6)
    bursts, clear_bursts = results([1.0] * 6, [0.7, 1.5] * 3), results([1.0] * 6, [2.0, 3.0] * 3)
    assert [enough(each) for each in (alike, clear, bursts, clear_bursts)] == [False, True, False, False]
    now = 6.0
    assert [enough(each) for each in (alike, clear, bursts, clear_bursts)] == [True, True, False, True]


def test_the_workload_is_short_and_request_time_the_plans_own(
    monkeypatch: pytest.MonkeyPatch, model: Path, on_cpu: PlacementPlan
) -> None:
    long = replace(
        on_cpu,
        context=replace(on_cpu.context, n_ctx=8192),
        predicted=replace(on_cpu.predicted, workload=(2000, 400), ttft_s={1: 0.0, 500: 5.0, 2000: 50.0}),
    )
    bench = fake(monkeypatch, 2.0)
    (plan,) = verify(model, [long], rounds=1)
    assert bench.sweep.cells() == [Cell(0, 512, 32)]
    # Predicted at 512 tokens: 5.36 s, at 2000: 50 s; TPOT at depth 528: 1.528 s, at 2200: 3.2 s.
    ttft, tpot = 2.0 * 0.9 * 50 / 5.36, 0.2 * 0.9 * 3.2 / 1.528
    assert plan.measured["request_s"] == pytest.approx(ttft + 399 * tpot)
    assert (plan.measured["n_prompt"], plan.measured["n_generate"]) == (512, 32)
    bench = fake(monkeypatch, 2.0)
    verify(model, [replace(on_cpu, predicted=replace(on_cpu.predicted, workload=(4000, 1)))], rounds=1)
    assert bench.sweep.cells() == [Cell(0, 254, 2)], "a prompt longer than the context, a single token"
    bench = fake(monkeypatch, 2.0)
    verify(model, [on_cpu], rounds=1, workload=(100, 50))
    assert bench.sweep.cells() == [Cell(0, 100, 50)]


def test_plans_share_what_they_can(monkeypatch: pytest.MonkeyPatch, model: Path, on_cpu: PlacementPlan) -> None:
    rpc = hand_plan(model, "RPC0")

    def interleave(*plans: PlacementPlan) -> str:
        bench = fake(monkeypatch, *([1.0] * len(plans)))
        verify(model, plans, rpc_servers=("h:1", "h:2"), rounds=1)
        for engine, plan in zip(bench.engines, plans, strict=True):
            assert engine.optional and engine.params.rpc_servers == (("h:1", "h:2") if "RPC0" in plan.devices else ())
        return bench.sweep.interleave

    def needs(nbytes: int) -> PlacementPlan:
        return replace(on_cpu, predicted=replace(on_cpu.predicted, devices={HOST: DeviceMemory(nbytes, 0, 0)}))

    assert interleave(on_cpu, rpc) == "loaded"
    assert interleave(rpc, rpc, on_cpu) == "reload"  # one server, two clients
    monkeypatch.setattr(verify_module, "available_bytes", lambda: 1000)
    assert interleave(needs(400), needs(400)) == "loaded"
    assert interleave(needs(500), needs(500)) == "reload"


def test_the_memory_of_logits_is_as_planned(model: Path, on_cpu: PlacementPlan) -> None:
    """A plan that has no memory for all rows' logits is measured without it, too."""
    context = replace(on_cpu.context, n_outputs_max=1)
    used = {}
    for plan in (on_cpu, replace(on_cpu, context=context)):
        engine = planned(plan, runtime.lib_dir(), LoadParams(n_threads=1))
        with Worker(engine) as worker:
            loaded = worker.load(model, engine.params.resolved(256))
            assert len(worker.run(0, [], [301, 302, 303], 3).tokens) == 3
        used[plan.context.n_outputs_max] = sum(
            sizes["compute"] for sizes in loaded.memory.values() if "compute" in sizes
        )
    n_vocab, n_rows = 1000, on_cpu.context.n_ubatch
    assert used[0] - used[1] > 0.5 * n_vocab * n_rows * 4


def test_registered_servers_are_the_default(monkeypatch: pytest.MonkeyPatch, model: Path, rpc: Any) -> None:
    bench = fake(monkeypatch, 1.0)
    verify(model, [hand_plan(model, "RPC0")], rounds=1)
    assert rpc.endpoint in bench.engines[0].params.rpc_servers


def test_bad_input(monkeypatch: pytest.MonkeyPatch, model: Path, on_cpu: PlacementPlan) -> None:
    other = replace(on_cpu, predicted=replace(on_cpu.predicted, workload=(1, 2)))
    split = TensorPlacement("f16", 2, (Segment(HOST, "host", (0, 1), 1), Segment(HOST, "host", (1, 2), 1)))
    beyond = replace(on_cpu, tensors={**on_cpu.tensors, "output.weight": split})
    for plans, options, words in (
        ([], {}, "no plans to verify"),
        ([on_cpu, other], {}, "different workloads"),
        ([on_cpu], {"rounds": 0}, "repeats >= 1"),
        ([on_cpu], {"workload": (4, 1)}, "at least 2"),
        ([on_cpu], {"workload": (300, 2)}, "too small"),
        ([beyond], {}, "none of 1 plans.*must begin with"),
    ):
        with pytest.raises(OallamaError, match=words):
            verify(model, plans, **options)
    with pytest.raises(OallamaError, match="does not exist"):
        verify(model.with_name("none.gguf"), [on_cpu])
    fake(monkeypatch, 1.0)
    good, bad = verify(model, [beyond, on_cpu])
    assert good.hash == on_cpu.hash and "must begin with" in bad.measured["error"]


# ---- predictions -----------------------------------------------------------------------------------------------------


def test_predictions_for_any_workload(on_cpu: PlacementPlan) -> None:
    assert predicted_times(on_cpu, 50, 20) == pytest.approx((0.5, 1.06))
    assert predicted_times(on_cpu, 200, 0) == pytest.approx((2.0, 1.2))
    blank = replace(on_cpu, predicted=replace(on_cpu.predicted, ttft_s={}, tpot_s={}))
    assert predicted_times(blank, 50, 20) == (None, None)
    assert request_seconds(blank, 1.0, 0.5, 8, 4) == pytest.approx(2 * 1.0 + 7 * 0.5)
    silent = replace(on_cpu, predicted=replace(on_cpu.predicted, workload=(0, 8)))
    assert request_seconds(silent, 1.0, 0.5, 1, 8) == pytest.approx(7 * 0.5, rel=0.01), "no prompt, no TTFT"


def test_table_shows_predicted_beside_measured(on_cpu: PlacementPlan) -> None:
    fields = {"rounds": 3, "n_prompt": 50, "n_generate": 20, "interleave": "loaded", "device_bytes": {}, "created": ""}
    run = {"ttft_s": 0.4, "tpot_s": 1.06, "request_s": 8.0, "spread": 0.031, **fields}
    console = Console(width=80)
    with console.capture() as captured:
        failed = replace(on_cpu, planner={"name": "oato", "params": {}}).with_measured({"error": "engine: no memory"})
        console.print(render_verification([on_cpu.with_measured(run), failed]))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    words = [line.split() for line in lines]
    at = next(i for i, w in enumerate(words) if w[:1] == ["cpu"])
    assert words[at] == ["cpu", on_cpu.hash[:8], "TTFT", "50", "500.0", "ms", "400.0", "ms", "+25", "%"]
    assert words[at + 1] == ["TPOT", "1.06", "s", "1.06", "s", "+0", "%"]
    assert words[at + 2][:5] == ["16+8", "7.30", "s", "8.00", "s"] and words[at + 2][-2:] == ["3", "%"]
    text = " ".join(captured.get().split())
    assert "failed" in text and "engine: no memory" in text and "50+20 tokens, 3 rounds" in text
    for bad in (None, {"tpot_s": 1.0}):
        with pytest.raises(OallamaError, match="was not measured"):
            render_verification([replace(on_cpu, measured=bad)])


def test_measured_of_the_wrong_kind_does_not_fit_the_schema(on_cpu: PlacementPlan) -> None:
    content = json.loads(on_cpu.with_measured({"ttft_s": 1.0, "note": "kept"}).to_json())
    assert PlacementPlan.from_json(json.dumps(content)).measured["note"] == "kept"
    for name, value in (("ttft_s", -1), ("rounds", 0), ("device_bytes", {"CPU": "x"}), ("interleave", "sometimes")):
        content["measured"] = {name: value}
        with pytest.raises(OallamaError, match=f"measured/{name}"):
            PlacementPlan.from_json(json.dumps(content))
