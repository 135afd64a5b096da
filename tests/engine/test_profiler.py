"""The profiler on real devices: what it measures, what it keeps, what an interruption leaves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oallama.base.processor import Processor
from oallama.data.entries import CLEAN, FEED_FORWARD, Note, SwitchTime
from oallama.data.fusion import chains
from oallama.data.profile import Profile
from oallama.engine import device_list, native
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.planning import OperatorGraph
from oallama.profiling import profiler
from oallama.profiling.fingerprint import cpu_set, fingerprint
from oallama.profiling.recorder import BESIDE_OTHERS, DOUBTS, MEMORY_SHORT, THROTTLED, Recorder
from oallama.profiling.slowdowns import Slowdowns
from oallama.profiling.workload import Task, depths_for, tasks_for
from support.processes import process_of

DEPTHS = (256, 1024)


@pytest.fixture(autouse=True)
def others_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubtful times stay as they are unless a test wants it otherwise: others run beside this one."""
    monkeypatch.setattr(profiler, "cpus_of_others", lambda: 1.0)


def graph_of(path: Path) -> OperatorGraph:
    return autoplan.read_graph(path, Settings(n_ctx=512))


def measure(graph: OperatorGraph, devices: list[str], cache: Path, **options: object) -> tuple[Profile, list[str]]:
    """The profile and what had to be measured for it."""
    measured: list[str] = []
    profile = profiler.profile_machine(
        graph, devices, depths=DEPTHS, cache=cache, progress=lambda _d, _t, text: measured.append(text), **options
    )
    return profile, measured[:-1]


@pytest.mark.parametrize(
    "arch", ["llama", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("qwen3moe", "minicpm3", "qwen2"))]
)
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
        assert all(a.depth % 256 == 0 for a in profile.attention)
    for tier in graph.tiers:
        for chain in chains(graph, tier, "f16"):
            n = 1 if chain.kind == FEED_FORWARD else tier
            assert (profile.chain_time(device, chain.kind, chain.type, chain.ne, n) or 0) > 0
    assert profile.link_time(device, "h2d", 1 << 20) > 0
    assert profile.switch_time(device) is not None


def test_operators_of_recurrent_layers_are_measured_on_every_device(
    tiny: Callable[..., Path], rpc: Any, tmp_path: Path
) -> None:
    """In decode and in a full micro-batch: the delta rule, and what is not small beside it."""
    graph, device = graph_of(tiny("qwen35moe")), rpc.devices[0]
    profile, _ = measure(graph, [device], tmp_path)
    for tier in (min(graph.tiers), max(graph.tiers)):
        shapes = [op.shape for op in graph.operators(tier) if op.shape is not None]
        assert "GATED_DELTA_NET" in {shape.op for shape in shapes}
        for shape in shapes:
            for name in (device, "CPU"):
                assert (profile.shape_time(name, shape.key) or 0) > 0, shape.key


def test_a_second_run_measures_nothing_and_another_model_only_what_is_new(
    tiny: Callable[..., Path], tmp_path: Path
) -> None:
    first, measured = measure(graph_of(tiny("llama")), [], tmp_path)
    assert measured
    assert [load.device for load in first.loads] == ["CPU"] and first.loads[0].cpus >= 0
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
    types = {"depths": DEPTHS, "type_k": "f16", "type_v": "f16"}
    total = len(tasks_for(graph, **types, accelerator=False, tiles=lambda weight: True))
    assert len(rest) == total - 3


def test_two_processes_at_once_keep_each_others_times(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The second begins before the first has saved, and saves after it."""
    mine, theirs = graph_of(tiny("llama")), graph_of(tiny("qwen3moe"))
    begun = False

    def another_process(*_: object) -> None:
        nonlocal begun
        if not begun:
            begun = True
            measure(theirs, [], tmp_path)

    profiler.profile_machine(mine, [], depths=DEPTHS, cache=tmp_path, progress=another_process)
    assert begun and [measure(graph, [], tmp_path)[1] for graph in (mine, theirs)] == [[], []]


def test_a_damaged_cache_is_measured_anew(tiny: Callable[..., Path], tmp_path: Path) -> None:
    graph = graph_of(tiny("llama"))
    measure(graph, [], tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    _, measured = measure(graph, [], tmp_path)
    assert measured


def test_a_cache_that_cannot_be_written_is_said_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What was measured holds all the same."""
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "profile.json"
    recorder = Recorder(Profile(created="now", fingerprint={}, devices=()), path)
    for device in ("CPU", "RPC0"):
        recorder.add([SwitchTime(device, 1.0)])
        recorder.save()
    assert [switch.device for switch in recorder.profile.switches] == ["CPU", "RPC0"]
    assert capfd.readouterr().err.count("cannot write profile") == 1


def test_a_repeat_that_waits_for_its_cpu_is_not_clean() -> None:
    """Four programs to a CPU: no repeat of an operator that outlasts many time slices has its CPUs to itself."""
    weight = {"type": "f16", "k": 2048, "m": 2048, "n_tokens": 2048, "n_expert": 0, "n_used": 0, "realisation": ""}
    probe = profiler.Probe("CPU", len(cpu_set()))
    with ExitStack() as others:
        for _ in range(4 * len(cpu_set())):
            others.enter_context(process_of([sys.executable, "-c", "while True: pass"]))
        (entry,) = probe.measure(Task("mul_mat", tuple(sorted(weight.items())), 1.0))
    assert entry.clean < CLEAN and 0 < entry.best_s <= entry.median_s
    assert [note.text for note in probe.notes] == [BESIDE_OTHERS]


def test_a_measurement_in_which_the_machine_was_slowed_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = {"type": "f16", "k": 256, "m": 256, "n_tokens": 1, "n_expert": 0, "n_used": 0, "realisation": ""}
    task = Task("mul_mat", tuple(sorted(weight.items())), 1.0)
    probe = profiler.Probe("CPU", 1, max_s=0.01)

    def doubts(before: Slowdowns, after: Slowdowns) -> set[str]:
        states = iter([before, after])
        monkeypatch.setattr(profiler.Slowdowns, "now", lambda: next(states))
        probe.measure(task)
        return {note.text for note in probe.notes} - {BESIDE_OTHERS}

    assert doubts(Slowdowns(5, 1.0, 10.0), Slowdowns(5, 1.04, 11.0)) == set()
    assert doubts(Slowdowns(5, 1.0, 10.0), Slowdowns(6, 1.04, 11.0)) == {THROTTLED}
    assert doubts(Slowdowns(5, 1.0, 10.0), Slowdowns(5, 1.06, 11.0)) == {MEMORY_SHORT}


@pytest.mark.alone
def test_what_a_child_takes_can_be_ours() -> None:
    """A device's server is a child that works for this process; any other child's work is other work."""
    others_s = native.core().others_s

    with ExitStack() as children:
        for _ in cpu_set():
            children.enter_context(process_of([sys.executable, "-c", "while True: pass"]))
        before = others_s(), others_s(children_are_ours=True)
        time.sleep(0.5)
        after = others_s(), others_s(children_are_ours=True)
    assert after[0] - before[0] > after[1] - before[1] + 0.2


def test_doubtful_times_are_replaced_when_the_machine_is_quiet(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = graph_of(tiny("llama"))
    profile, _ = measure(graph, [], tmp_path)
    (file,) = tmp_path.glob("*.json")
    doubted = tuple(Note("CPU", f"attention n=1 depth={depth}", BESIDE_OTHERS) for depth in DEPTHS)
    replace(profile, notes=doubted).save(file)
    assert measure(graph, [], tmp_path)[1] == []
    monkeypatch.setattr(profiler, "cpus_of_others", lambda: 0.0)
    again, measured = measure(graph, [], tmp_path)
    assert measured == ["CPU: attention n=1 depth=1024", "CPU: attention n=1 depth=256"]  # the longest first
    assert len(again.attention) == len(profile.attention)


@pytest.mark.parametrize("doubt", DOUBTS)
def test_what_is_disturbed_on_a_quiet_machine_too_is_measured_twice_and_no_more(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doubt: str
) -> None:
    """A hypervisor may take CPUs away whenever they are used, and a link may never be still."""
    graph, measures = graph_of(tiny("llama")), profiler.Probe.measure

    def measured(probe: profiler.Probe, task: Task) -> list[Any]:
        entries = measures(probe, task)
        probe.notes = (Note("CPU", task.describe(), doubt),) if task.kind == "attention" else ()
        return entries

    monkeypatch.setattr(profiler.Probe, "measure", measured)
    monkeypatch.setattr(profiler, "DOUBTFUL_AT_ONCE", 100)
    monkeypatch.setattr(profiler, "cpus_of_others", lambda: 0.0)
    first, _ = measure(graph, [], tmp_path)
    assert {note.text for note in first.notes} == {doubt}
    monkeypatch.setattr(profiler, "_HYPERVISOR_CPUS", -1.0)  # another program had begun meanwhile
    assert {*measure(graph, [], tmp_path)[0].notes} == {*first.notes}
    monkeypatch.setattr(profiler, "_HYPERVISOR_CPUS", 1e9)
    second, again = measure(graph, [], tmp_path)
    assert len(again) == len(first.notes) and {note.text for note in second.notes} == {DOUBTS[doubt]}
    assert measure(graph, [], tmp_path)[1] == []


def test_an_unknown_device_is_named(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(OallamaError, match=r"unknown device 'CUDA7'; devices here: .*CPU"):
        measure(graph_of(tiny("llama")), ["CUDA7"], tmp_path)


def test_other_threads_are_another_fingerprint(tiny: Callable[..., Path], tmp_path: Path) -> None:
    profile, _ = measure(graph_of(tiny("llama")), [], tmp_path, n_threads=1)
    assert profile.is_stale(fingerprint(["CPU"], 1)) == []
    assert any("n_threads" in line for line in profile.is_stale(fingerprint(["CPU"], 2)))


def test_another_generation_of_one_name_is_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for model in (1, 17):
        named = Processor("EPYC", f"family 25 model {model}")
        monkeypatch.setattr("oallama.profiling.fingerprint.processor", lambda named=named: named)
        found.append(fingerprint(["CPU"], 1)["cpu"])
    assert [text.partition(" x")[0] for text in found] == ["EPYC (family 25 model 1)", "EPYC (family 25 model 17)"]


def test_other_instructions_are_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fingerprint(["CPU"], 1)
    monkeypatch.setenv("OALLAMA_INSTRUCTIONS", "avx2")
    assert fingerprint(["CPU"], 1) == plain | {"instructions": "avx2"}


def test_decode_times_grow_with_bytes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A probe that timed nothing would not see a weight sixteen times larger."""
    bench = native.core().OpBench("CPU", 1, True, 64 << 20)
    small = bench.mul_mat(type="q8_0", k=1024, m=256, n_tokens=1, n_expert=0, n_used=0, max_s=0.3)
    large = bench.mul_mat(type="q8_0", k=1024, m=4096, n_tokens=1, n_expert=0, n_used=0, max_s=0.3)
    assert large["median_s"] > 4 * small["median_s"]


# ---- what a device cannot do or hold ---------------------------------------------------------------------------------


def test_depths_are_those_that_llama_cpp_attends_to() -> None:
    assert depths_for(100) == [256]
    assert depths_for(1000) == [256, 1024]
    assert depths_for(6000) == [256, 1024, 4096, 6144]
    assert depths_for(1 << 20) == [256, 1024, 4096, 8192, 16384]


def test_a_form_that_a_device_lacks_is_not_measured(tiny: Callable[..., Path]) -> None:
    graph = graph_of(tiny("minicpm3"))
    tasks = tasks_for(
        graph, depths=(100, 300), type_k="f16", type_v="f16", accelerator=True, attends=lambda a: not a["flash"]
    )
    attention = [task.args for task in tasks if task.kind == "attention"]
    assert attention and not any(a["flash"] for a in attention)
    assert {a["depth"] for a in attention} == {256, 512}  # padded


def test_tiled_weights_are_measured_where_our_kernels_compute_them(tiny: Callable[..., Path]) -> None:
    graph = graph_of(tiny("llama"))
    tasks = tasks_for(graph, depths=(256,), type_k="f16", type_v="f16", accelerator=False, tiles=lambda weight: True)
    found: dict[int, set[str]] = {}
    for a in (task.args for task in tasks if task.kind == "mul_mat"):
        found.setdefault(a["n_tokens"], set()).add(a["realisation"])
    assert {1, 32, 512} <= set(found) and set(map(frozenset, found.values())) == {frozenset({"plain", "tiled"})}


def test_what_sees_one_row_of_a_prompt_is_measured_for_steps_of_several_sequences(tiny: Callable[..., Path]) -> None:
    """The output head, and a feed-forward of the last layer that no other layer has the like of."""
    graph = autoplan.read_graph(tiny("llama"), Settings(n_ctx=1024, n_seq_max=4))
    tasks = tasks_for(graph, depths=(256,), type_k="f16", type_v="f16", accelerator=False)
    shapes = {(op.weight, graph.tensor[op.weight or ""]) for op in graph.targets(1)}
    for name, tensor in shapes:
        counts = {
            a["n_tokens"]
            for a in (task.args for task in tasks if task.kind == "mul_mat")
            if (a["type"], a["k"], a["m"]) == (tensor.type, *tensor.ne[:2])
        }
        assert counts >= {1, 4, 32}, name


def test_our_kernels_take_some_types_on_cpus() -> None:
    core = native.core()
    assert core.tiles("CPU", "q4_K") and not core.tiles("CPU", "f16")


def test_what_does_not_fit_is_noted_and_tried_again(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unfused attention of many tokens at depth: its scores take 32 MiB, and half of that once more in F16."""
    graph, large = graph_of(tiny("llama")), 4096

    def run() -> Profile:
        return profiler.profile_machine(graph, [], depths=(256, large), cache=tmp_path)

    def times(profile: Profile, flash: bool) -> set[int]:
        return {a.depth for a in profile.attention if a.n_tokens == 512 and a.flash == flash}

    monkeypatch.setenv("OALLAMA_HOST_MEMORY", str(64 << 20))
    profile = run()
    assert times(profile, False) == {512} and times(profile, True) == {512, large}
    (note,) = (note for note in profile.notes if "depth=4096 unfused" in note.task and "n=512" in note.task)
    assert "not measured: it needs" in note.text and "can be used" in note.text
    assert any("not measured" in line for line in profile.remarks(["CPU"]))
    monkeypatch.delenv("OALLAMA_HOST_MEMORY")
    again = run()
    assert times(again, False) == {512, large}
    assert not [note for note in again.notes if "not measured" in note.text]
    monkeypatch.setenv("OALLAMA_HOST_MEMORY", "1")
    with pytest.raises(OallamaError, match=r"profiling CPU, .*needs .* of memory"):
        profiler.profile_machine(graph, [], depths=(256,), cache=tmp_path / "none")


def test_weights_are_colder_than_a_gpus_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """72 MB on an RTX 4090, 126 MB on a B200; on the CPU and what computes there the host's cache counts."""
    monkeypatch.delenv("OALLAMA_QUICK_PROFILE")
    cpu = device_list.device("CPU")
    gpu = replace(cpu, name="CUDA0", description="NVIDIA GeForce RTX 4090", type="gpu", backend="CUDA")
    assert profiler.cold_bytes(gpu) >= 4 * (126 << 20)
    lavapipe = replace(gpu, description="llvmpipe (LLVM 15, 256 bits)", backend="Vulkan")
    assert profiler.cold_bytes(lavapipe) == profiler.cold_bytes(cpu)
    # Where memory is short there are fewer copies, and a note says so.
    bench = native.core().OpBench("CPU", 1, False, 256 << 20)
    weight = {"type": "f16", "k": 1024, "m": 1024, "n_tokens": 1, "n_expert": 0, "n_used": 0}
    bench.mul_mat(**weight, max_s=0.01)
    assert not bench.warm
    monkeypatch.setenv("OALLAMA_HOST_MEMORY", str(64 << 20))
    bench.mul_mat(**{**weight, "n_tokens": 2}, max_s=0.01)
    assert not bench.warm  # the copies are there already
    bench.mul_mat(**{**weight, "k": 2048}, max_s=0.01)
    assert bench.warm
