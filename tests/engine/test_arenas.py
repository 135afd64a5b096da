"""Compute buffers: what they hold, how little would do, and that another layout changes no logit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.data.plan import HOST, PlacementPlan
from oallama.engine import native, skeleton
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.planning import Workload
from oallama.planning.arenas import Arena, graphs_of
from support.hand_plan import hand_plan
from support.ledger import device_bytes
from support.logits import ARCHITECTURES, compute_logits
from support.made_profile import made_profile
from support.vulkan import VULKAN, has_vulkan

Block = tuple[int, int, int]
SETTINGS = Settings(n_ctx=512, n_batch=256, n_ubatch=128, flash_attn="on", devices=())


@st.composite
def block(draw: st.DrawFn) -> Block:
    first = draw(st.integers(0, 12))
    return 32 * draw(st.integers(1, 8)), first, first + draw(st.integers(1, 6))


def live_bytes(blocks: list[Block]) -> int:
    """Most bytes alive at one time."""
    times = {first for _, first, _ in blocks}
    return max((sum(n for n, first, last in blocks if first <= t < last) for t in times), default=0)


def end_of(blocks: list[Block], offsets: list[int]) -> int:
    return max((offset + n for (n, _, _), offset in zip(blocks, offsets, strict=True)), default=0)


def assert_disjoint(blocks: list[Block], offsets: list[int]) -> None:
    placed = list(zip(blocks, offsets, strict=True))
    for i, ((n, first, last), offset) in enumerate(placed):
        for (m, other_first, other_last), other in placed[:i]:
            if first < other_last and other_first < last:
                assert offset + n <= other or other + m <= offset, (placed[i], other)


def optimum(blocks: list[Block]) -> int:
    """The smallest arena: some order, each block as low as it goes, gives it."""

    def lowest(order: tuple[int, ...]) -> int:
        placed: list[tuple[Block, int]] = []
        for i in order:
            n, first, last = blocks[i]
            others = sorted((o, o + m) for (m, f, e), o in placed if first < e and f < last)
            at = 0
            for begin, end in others:
                if begin < at + n and at < end:
                    at = end
            placed.append((blocks[i], at))
        return max(at + b[0] for b, at in placed)

    return min(map(lowest, permutations(range(len(blocks)))))


@settings(max_examples=200)
@given(st.lists(block(), max_size=40))
def test_offsets_keep_blocks_apart(blocks: list[Block]) -> None:
    offsets = native.core().offline_offsets(blocks)
    assert_disjoint(blocks, offsets)
    assert all(offset % 32 == 0 for offset in offsets)
    assert live_bytes(blocks) <= end_of(blocks, offsets) <= sum(n for n, _, _ in blocks)


@settings(max_examples=100)
@given(st.lists(block(), min_size=1, max_size=5))
def test_bound_optimum_greedy_are_in_order(blocks: list[Block]) -> None:
    found = end_of(blocks, native.core().offline_offsets(blocks))
    assert live_bytes(blocks) <= optimum(blocks) <= found


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_arenas_are_the_compute_buffers(arch: str, flash: str, tiny: Callable[..., Path]) -> None:
    path = tiny(arch)
    context = replace(SETTINGS, flash_attn=flash)
    arenas = read(path, context, graphs_of(context))
    assert arenas[0].online == skeleton.dry_run(path, context)[HOST]["compute"]
    for arena in arenas:
        blocks = list(arena.blocks)
        offsets = native.core().offline_offsets(blocks)
        assert_disjoint(blocks, offsets)
        assert arena.bound == live_bytes(blocks) <= arena.online
        assert arena.offline == end_of(blocks, offsets)


def read(path: Path, context: Settings, graphs: list[tuple[int, int]], table: str | None = None) -> list[Arena]:
    return [Arena.from_engine(raw) for raw in skeleton.read_arenas(path, context, graphs, table)]


def tables(path: Path, device: str, on_host: str) -> list[str]:
    """The same placement, laid out by ggml and offline."""
    online = hand_plan(path, device, on_host).to_backend_map()
    return [online, online.replace("\n", "\narenas offline\n", 1)]


@pytest.mark.parametrize("on_host", ["ffn", "attn_output"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_offline_arenas_are_what_a_load_takes(arch: str, on_host: str, tiny: Callable[..., Path], rpc) -> None:
    path, device = tiny(arch), rpc.devices[0]
    context = replace(SETTINGS, devices=(device,))
    online, offline = tables(path, device, on_host)
    arenas = read(path, context, graphs_of(context)[:1], online)
    assert {arena.device for arena in arenas} == {device, HOST}
    for table, layout in ((online, lambda a: a.online), (offline, lambda a: min(a.online, a.offline))):
        found = skeleton.dry_run(path, context, table)
        for name in (device, HOST):
            assert found[name]["compute"] == sum(layout(a) for a in arenas if a.device == name), (name, table[:60])


@pytest.mark.parametrize("flash", [0, 1])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_layout_changes_no_logit(arch: str, flash: int, tiny: Callable[..., Path], lib: Path, rpc, tmp_path) -> None:
    """Prefill in whole and odd micro-batches and decode, on the CPU and cut between two devices."""
    path, jobs = tiny(arch), []
    for device, on_host in ((HOST, ""), (rpc.devices[0], "ffn"), (rpc.devices[0], "attn_output")):
        for layout, table in enumerate(tables(path, device, on_host)):
            file = tmp_path / f"{device.partition('[')[0]}-{on_host}-{layout}.map"
            file.write_text(table)
            accelerator = {} if device == HOST else {"devices": [device], "rpc": [rpc.endpoint]}
            jobs += [
                {"model": str(path), "table": str(file), "flash_attn": flash, "n_ubatch": n, **accelerator}
                for n in (64, 17)
            ]
    found = compute_logits(lib, jobs, tmp_path, {"GGML_CPU_DISABLE_FUSION": "0"})
    for i in range(0, len(jobs), 4):
        for online, offline in zip(found[i : i + 2], found[i + 2 : i + 4], strict=True):
            assert np.isfinite(online).all()
            assert np.array_equal(online, offline), jobs[i + 2]


@pytest.mark.slow
@pytest.mark.skipif(not has_vulkan(), reason="needs Vulkan with lavapipe")
@pytest.mark.parametrize("arch", ["llama", "minicpm3"])
def test_layout_changes_no_logit_and_no_fusion_on_vulkan(
    arch: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """A backend turns a fusion off when its result would overwrite what it reads: the operators run are compared."""
    path, logits, operators = tiny(arch), [], []
    for layout, table in enumerate(tables(path, "Vulkan0", "ffn")):
        file = tmp_path / f"{layout}.map"
        file.write_text(table)
        job = {"table": str(file), "devices": ["Vulkan0"], "n_ctx": 128, "n_ubatch": 24, "flash_attn": 1, "n_decode": 2}
        jobs = [{"model": str(path), "tokens": list(range(300, 324)), **job}]
        log = tmp_path / f"{layout}.log"
        logits += compute_logits(lib, jobs, tmp_path, {**VULKAN, "GGML_VK_PERF_LOGGER": "1"}, log)
        operators.append(Counter(re.findall(r"^(\w[^:\n]*): (\d+) x ", log.read_text(), re.MULTILINE)))
    assert any("RMS_NORM_MUL" in name for name, _ in operators[0])
    assert operators[0] == operators[1]
    assert np.array_equal(*logits)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_a_plan_with_offline_arenas_keeps_its_promise(arch: str, tiny: Callable[..., Path], rpc) -> None:
    """More weights within the same budget, and a load that decodes takes the bytes that were predicted."""
    path, device = tiny(arch), rpc.devices[0]
    context = replace(SETTINGS, devices=(device,), n_threads=2)
    graph = autoplan.read_graph(path, context)
    profile, workload = made_profile(path, device, context), Workload(128, 32)
    needed = skeleton.dry_run(path, context)[device]
    budget = needed["kv"] + needed["compute"] + needed["weights"] // 2
    plans = {}
    for offline in (False, True):
        choices = Choices(device, profile, "exact", workload, fixed_ubatch=True, streams=False, offline_arenas=offline)
        plans[offline] = autoplan.plan_graph(path, graph, budget, context, choices)
    online, plan = plans[False], plans[True]
    assert not online.offline_arenas and plan.offline_arenas
    assert PlacementPlan.from_json(plan.to_json()) == plan and "arenas offline\n" in plan.to_backend_map()
    assert plan.predicted.devices[device].weights >= online.predicted.devices[device].weights
    assert plan.predicted.devices[device].compute < online.predicted.devices[device].compute
    loaded = replace(context, **vars(plan.context))
    assert device_bytes(path, loaded, plan, device) == plan.predicted.devices[device].total <= budget
    with pytest.raises(OallamaError, match="offline arenas"):
        plan.to_llama_cpp_flags()
    stock = autoplan.plan_graph(path, graph, budget, context, replace(choices, planner="layers"))
    assert not stock.offline_arenas


def test_a_malformed_line_is_refused(tiny: Callable[..., Path]) -> None:
    table = hand_plan(tiny("llama"), HOST).to_backend_map() + "arenas online\n"
    with pytest.raises(OallamaError, match="expected 'arenas offline'"):
        skeleton.dry_run(tiny("llama"), SETTINGS, table)
