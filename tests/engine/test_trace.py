"""Timelines: what is noted while a model runs, and how it is added up."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama
from oallama.data.plan import PlacementPlan
from oallama.engine import native
from oallama.errors import OallamaError
from oallama.tracing import Span, Stage, Timeline, record_timeline
from oallama.tracing.timeline import intersection, length, union
from support.cli import CLI
from support.hand_plan import divided_plan, hand_plan, streamed_plan
from support.processes import ran
from support.vulkan import VULKAN, has_vulkan


def spans(*rows: tuple[str, str, int, float, float]) -> tuple[Span, ...]:
    return tuple(Span(device, what, "x", nbytes, begin, end) for device, what, nbytes, begin, end in rows)


def test_lanes_are_added_up_by_stage() -> None:
    timeline = Timeline(
        spans(
            ("GPU0", "compute", 0, 0.0, 4.0),
            ("GPU0", "stream", 2_000_000_000, 3.0, 5.0),
            ("GPU0", "upload", 1_000_000_000, 6.0, 7.0),
            ("GPU0", "compute", 0, 7.0, 8.0),
            ("GPU0", "compute", 0, 10.0, 11.0),
        ),
        (Stage("prefill", 0.0, 8.0), Stage("decode", 10.0, 12.0)),
    )
    computing, copies = timeline.use(timeline.stages[0])
    assert (computing.lane, computing.busy_s, computing.idle_s) == ("GPU0", 5.0, 3.0)
    assert (copies.lane, copies.busy_s, copies.nbytes) == ("weights to GPU0", 3.0, 3_000_000_000)
    assert copies.gb_per_s == pytest.approx(1.0) and copies.overlap == pytest.approx(1 / 3)
    decode = timeline.use(timeline.stages[1])
    assert [use.busy_s for use in decode] == [1.0, 0.0] and decode[1].gb_per_s is None


def test_a_device_is_not_beside_itself() -> None:
    rows = ("GPU0", "compute", 0, 0.0, 4.0), ("CPU", "compute", 0, 3.0, 5.0), ("GPU0", "compute", 0, 4.0, 6.0)
    timeline = Timeline(spans(*rows), (Stage("decode", 0.0, 8.0),))
    cpu, gpu = timeline.use(timeline.stages[0])
    assert (cpu.lane, cpu.overlap, gpu.overlapped_s) == ("CPU", 1.0, 2.0)


def test_intervals_are_those_of_a_grid() -> None:
    rng = random.Random(2)
    for _ in range(200):
        sides = [[(b, b + rng.randrange(1, 9)) for b in rng.choices(range(90), k=rng.randrange(6))] for _ in range(2)]
        grids = [np.zeros(100, bool), np.zeros(100, bool)]
        for grid, intervals in zip(grids, sides, strict=True):
            for begin, end in intervals:
                grid[begin:end] = True
        a, b = union(sides[0]), union(sides[1])
        assert length(a) == grids[0].sum() and length(intersection(a, b)) == (grids[0] & grids[1]).sum()


def test_the_trace_events_are_chromes() -> None:
    timeline = Timeline(spans(("GPU0", "compute", 0, 1.0, 1.5)), (Stage("prefill", 0.5, 2.0),))
    events = timeline.to_chrome()["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    shown = [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert shown == [("stages", "prefill", 0.0, 1.5e6), ("GPU0", "x", 0.5e6, 0.5e6)]


def record(path: Path, plan: PlacementPlan, n_prompt: int = 48) -> Timeline:
    llm = Llama(str(path), plan=plan, verbose=False)
    try:
        return record_timeline(llm, n_prompt, 3)
    finally:
        llm.close()


def test_every_streamed_weight_of_a_prefill_is_copied_once(tiny: Callable[..., Path], rpc: Any) -> None:
    path = tiny("llama")
    plan = streamed_plan(path, rpc.devices[0])
    timeline = record(path, plan)
    prefill, decode = timeline.stages
    weights = {name for name, t in plan.tensors.items() if t.mode == "stream"}
    for stage, times in ((prefill, 1), (decode, 3)):
        inside = [s for s in timeline.spans if stage.begin <= s.begin <= stage.end]
        waited = [s.name for s in inside if s.what == "wait"]
        assert sorted(waited) == sorted([*weights] * times)
        assert any(s.what == "compute" and s.device == rpc.devices[0] for s in inside)
    streamed = [s for s in timeline.spans if s.what == "stream"]
    assert all(s.nbytes == plan.tensors[s.name].nbytes and s.begin < s.end for s in streamed)
    # Both slots are filled once more, for a micro-batch that never comes; the first two were filled before.
    assert abs(len(streamed) - 4 * len(weights)) <= plan.stream_slots


def test_both_sides_of_a_divided_weight_compute_at_once(tiny: Callable[..., Path], rpc: Any) -> None:
    path, (device,) = tiny("llama"), rpc.devices
    for plan, beside in ((hand_plan(path, device), False), (divided_plan(path, device), True)):
        timeline = record(path, plan, n_prompt=200)
        computing = [u for stage in timeline.stages for u in timeline.use(stage) if u.lane in (device, "CPU")]
        assert len(computing) == 4 and all(u.busy_s > 0 for u in computing)
        assert [u.overlapped_s > 0 for u in computing] == [beside] * 4


@pytest.mark.skipif(not has_vulkan(), reason="needs Vulkan with lavapipe")
@pytest.mark.parametrize("queue", ["0", "1"])
def test_copies_run_beside_computing_on_a_device_that_can(
    queue: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """In a process of its own: this one has no Vulkan. queue: the device keeps the order."""
    path, plan, out = tiny("llama"), tmp_path / "plan.json", tmp_path / "trace.json"
    streamed_plan(path, "Vulkan0").save(plan)
    command = [*CLI, "trace", path, "--plan", plan, "--n-prompt", "64", "--out", out, "--json"]
    result = ran(*command, env=VULKAN | {"OALLAMA_STREAM_QUEUE": queue})
    lanes = {(row["stage"], row["lane"]): row for row in json.loads(result.stdout)["lanes"]}
    assert lanes["prefill", "weights to Vulkan0"]["overlap"] > 0  # how much is a matter of how busy the processor is
    assert json.loads(out.read_text())["traceEvents"]


def test_off_means_that_nothing_is_noted(tiny: Callable[..., Path]) -> None:
    llm = Llama(str(tiny("llama")), n_ctx=64, verbose=False)
    native.core().trace_take()
    llm.eval([1, 2, 3])
    assert native.core().trace_take() == []
    with pytest.raises(OallamaError, match="exceed the context of"):
        record_timeline(llm, 250, 10)
    llm.close()
