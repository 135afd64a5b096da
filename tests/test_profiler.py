"""The profiler on real devices: what it measures, what it keeps, what an interruption leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ARCHITECTURES
from oallama import autoplan, engine
from oallama.errors import OallamaError
from oallama.planning import OperatorGraph
from oallama.profiling import profiler
from oallama.profiling.fingerprint import fingerprint
from oallama.profiling.profile import Profile
from oallama.profiling.workload import tasks_for

DEPTHS = (64, 256)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_MAX_SECONDS", 0.02)
    monkeypatch.setattr(profiler, "_MAX_COLD_BYTES", 1 << 20)


def graph_of(path: Path) -> OperatorGraph:
    return autoplan.read_graph(path, engine.Settings(n_ctx=512))


def measure(graph: OperatorGraph, devices: list[str], cache: Path, **options: object) -> tuple[Profile, list[str]]:
    """The profile and what had to be measured for it."""
    measured: list[str] = []
    profile = profiler.profile_machine(
        graph, devices, depths=DEPTHS, cache=cache, progress=lambda _d, _t, text: measured.append(text), **options
    )
    return profile, measured[:-1]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_target_operator_and_attention_is_measured_on_every_device(
    arch: str, tiny: Callable[..., Path], rpc, tmp_path: Path
) -> None:
    graph, device = graph_of(tiny(arch)), rpc.devices[0]
    profile, _ = measure(graph, [device], tmp_path)
    for name in (device, "CPU"):
        for tier in graph.tiers:
            for op in graph.targets(tier):
                tensor = graph.tensor[op.weight or ""]
                estimate = profile.op_time(name, op.op, tensor.type, tensor.ne[:3], op.n_tokens, op.n_used)
                assert estimate.source == "measured" and estimate.seconds > 0
            shape = graph.attention[0]
            assert shape is not None
            for depth in DEPTHS:
                if depth >= tier:
                    assert profile.attention_time(name, shape, tier, depth).source == "measured"
        assert (profile.other_op_time(name, 1, graph.tensor["token_embd.weight"].ne[0]) or 0) > 0
    assert profile.link_time(device, "h2d", 1 << 20) > 0
    assert profile.switch_time(device) is not None


def test_a_second_run_measures_nothing_and_another_model_only_what_is_new(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    first, measured = measure(graph_of(tiny("llama")), [], tmp_path)
    assert measured
    again, measured = measure(graph_of(tiny("llama")), [], tmp_path)
    assert measured == [] and again == first
    both, measured = measure(graph_of(tiny("qwen3moe")), [], tmp_path)
    assert 0 < len(measured) < len(tasks_for(graph_of(tiny("qwen3moe")), depths=DEPTHS, type_k="f16", type_v="f16",
                                             accelerator=False))  # fmt: skip
    assert set(first.operators) < set(both.operators)


def test_an_interruption_leaves_a_usable_partial_cache(tiny: Callable[..., Path], tmp_path: Path) -> None:
    graph, calls = graph_of(tiny("llama")), 0

    def interrupt(_done: float, _total: float, _text: str) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiler.profile_machine(graph, [], depths=DEPTHS, cache=tmp_path, progress=interrupt)
    _, rest = measure(graph, [], tmp_path)
    total = len(tasks_for(graph, depths=DEPTHS, type_k="f16", type_v="f16", accelerator=False))
    assert len(rest) == total - 3


def test_a_damaged_cache_is_measured_anew(tiny: Callable[..., Path], tmp_path: Path) -> None:
    graph = graph_of(tiny("llama"))
    measure(graph, [], tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    _, measured = measure(graph, [], tmp_path)
    assert measured


def test_a_cache_that_cannot_be_written_is_said(tiny: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OallamaError, match="cannot write profile"):
        measure(graph_of(tiny("llama")), [], tmp_path / "file")


def test_an_unknown_device_is_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(OallamaError, match=r"unknown device 'CUDA7'; devices here: .*CPU"):
        measure(graph_of(tiny("llama")), ["CUDA7"], tmp_path)


def test_other_threads_are_another_fingerprint(tiny: Callable[..., Path], tmp_path: Path) -> None:
    profile, _ = measure(graph_of(tiny("llama")), [], tmp_path, n_threads=1)
    assert profile.is_stale(fingerprint(["CPU"], 1)) == []
    assert any("n_threads" in line for line in profile.is_stale(fingerprint(["CPU"], 2)))


def test_decode_times_grow_with_bytes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A probe that timed nothing would not see a weight sixteen times larger."""
    bench = engine.core().OpBench("CPU", 1, True, 64 << 20)
    small = bench.mul_mat(type="q8_0", k=1024, m=256, n_tokens=1, n_expert=0, n_used=0, max_s=0.3)
    large = bench.mul_mat(type="q8_0", k=1024, m=4096, n_tokens=1, n_expert=0, n_used=0, max_s=0.3)
    assert large["median_s"] > 4 * small["median_s"]
