"""Streamed weights give, bit for bit, what resident ones give on the same device, whatever the order of events."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama
from oallama.bench.engines import Engine, LoadParams, Worker
from oallama.engine import native, runtime, skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan, start
from oallama.loading.autoplan import Choices
from oallama.planning import Workload, uncertainty
from support.hand_plan import streamed_plan
from support.logits import ARCHITECTURES, compute_logits, nmse
from support.made_profile import made_profile
from support.processes import ran, ran_python
from support.streaming import PROMPTS, assert_same, jobs, some, table, tokens
from support.vulkan import VULKAN, has_vulkan

FEWER = (33, 160)
CONTEXT = {"n_ctx": 256, "n_ubatch": 64, "flash_attn": 1}
# Upstream's MUL_MAT_ID corrupts lavapipe's heap.
ON_VULKAN = [arch for arch in ARCHITECTURES if arch != "qwen3moe"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    ("slots", "jitter_us", "prompts"), [pytest.param(2, 0, PROMPTS, marks=pytest.mark.slow), (3, 400, FEWER)]
)
def test_streamed_is_resident_over_rpc(
    arch: str,
    slots: int,
    jitter_us: int,
    prompts: tuple[int, ...],
    tiny: Callable[..., Path],
    lib: Path,
    tmp_path: Path,
) -> None:
    env = {"OALLAMA_STREAM_JITTER": str(jitter_us), "GGML_CPU_DISABLE_FUSION": "1"}
    path = tiny(arch, "Q4_0")
    with LocalRpcServer(threads=2, register=False) as server:
        wanted = jobs(path, "RPC0", tmp_path, slots, prompts, rpc=[server.endpoint], **CONTEXT)
        assert_same(compute_logits(lib, wanted, tmp_path, env), prompts)


@pytest.mark.parametrize("arch", ["llama", *(pytest.param(a, marks=pytest.mark.slow) for a in ARCHITECTURES[1:])])
def test_long_prompts_are_streamed_over_rpc(arch: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    """One and four full micro-batches."""
    prompts = (512, 2048)
    context = {"n_ctx": 2304, "n_ubatch": 512, "flash_attn": 1}
    with LocalRpcServer(threads=2, register=False) as server:
        wanted = jobs(tiny(arch, "Q4_0"), "RPC0", tmp_path, 2, prompts, rpc=[server.endpoint], **context)
        assert_same(compute_logits(lib, wanted, tmp_path, {"GGML_CPU_DISABLE_FUSION": "1"}), prompts)


@pytest.mark.parametrize("streams", [True, False])
def test_a_plan_takes_larger_micro_batches_for_long_prompts(
    streams: bool,
    tiny: Callable[..., Path],
    rpc: Any,
    lib: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the choice to logits: weights that pass once for 2048 tokens, in a batch that grows with the micro-batch."""
    monkeypatch.setattr(uncertainty, "_EXTRAPOLATED", {2: 0.0})
    path, device = tiny("llama", "Q4_0"), rpc.devices[0]
    asked = Settings(n_ctx=2304, n_batch=512, n_threads=1)
    times = made_profile(path, device, asked)
    hidden = tuple(replace(overlap, share=1.0) for overlap in times.overlaps)
    uploads = tuple(replace(d, op_offload=not streams) for d in times.devices)
    times = replace(times, overlaps=hidden, devices=uploads)
    how = {"planner": "exact", "workload": Workload(2048, 2), "streams": streams, "repack": False}
    choices = Choices(device=device, profile=times, **how)  # type: ignore[arg-type]
    plan = start.plan_model(path, "30%", asked, choices)
    assert ("stream" if streams else "upload") in {tensor.mode for tensor in plan.tensors.values()}
    assert 512 < plan.context.n_ubatch == plan.context.n_batch
    assert start.plan_model(path, "30%", asked, replace(choices, fixed_ubatch=True)).context.n_ubatch == 512
    (tmp_path / "plan.map").write_text(plan.to_backend_map())
    with LocalRpcServer(threads=2, register=False) as server:
        common = {"model": str(path), "tokens": tokens(2048), "n_ctx": 2304, "flash_attn": 1}
        placed = {"table": str(tmp_path / "plan.map"), "devices": ["RPC0"], "rpc": [server.endpoint]}
        alone = {**common, "n_gpu_layers": 0, "n_ubatch": 512, "use_extra_bufts": False}
        in_plan = {**common, **placed, "n_ubatch": plan.context.n_ubatch}
        expected, found = compute_logits(lib, [alone, in_plan], tmp_path)
    assert nmse(found, expected) < 1e-9


def test_two_devices_of_a_map_share_one_copy_of_the_inputs(
    tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """llama.cpp would give each of several micro-batches a copy; streams and divided weights are for one."""
    path = tiny("llama", "Q4_0")
    second = r"(?m)^(layer 1|tensor blk\.1\.\S+) RPC0"
    texts = [
        re.sub(second, r"\1 RPC1", table(path, "RPC0", wanted)) for wanted in (lambda name: 0, lambda name: 1, some)
    ]
    files = [tmp_path / f"{i}.map" for i in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    with LocalRpcServer(threads=1, register=False) as a, LocalRpcServer(threads=1, register=False) as b:
        endpoints = [a.endpoint, b.endpoint]

        def copies(table: Path | None) -> set[str]:
            command = [runtime.program("llama-bench"), "-m", path, "--rpc", ",".join(endpoints), "-dev", "RPC0/RPC1"]
            command += ["-ngl", "99", "-p", "64", "-ub", "32", "-n", "0", "-r", "1", "-v"]
            result = ran(*command, env={"OALLAMA_BACKEND_MAP": str(table or "")})
            return set(re.findall(r"sched copies = (\d+)", result.stderr))

        assert copies(None) == {"4"}  # else this test shows nothing
        assert [copies(file) for file in files] == [{"1"}] * 3
        job = {"model": str(path), "devices": ["RPC0", "RPC1"], "rpc": endpoints, "tokens": tokens(160), **CONTEXT}
        wanted = [{**job, "table": str(file)} for file in files]
        resident, *streamed = compute_logits(lib, wanted, tmp_path, {"GGML_CPU_DISABLE_FUSION": "1"})
    assert all(np.array_equal(resident, found) for found in streamed)


@pytest.mark.skipif(not has_vulkan(), reason="needs Vulkan with lavapipe")
@pytest.mark.parametrize(
    ("arch", "slots", "jitter_us", "prompts", "queue"),
    [
        ("qwen2", 2, 0, (33,), 0),
        ("qwen2", 2, 400, (33,), 1),
        *(pytest.param(arch, 2, 0, PROMPTS, 1, marks=pytest.mark.slow) for arch in ON_VULKAN),
        *(pytest.param(arch, 4, 400, FEWER, queue, marks=pytest.mark.slow) for arch in ON_VULKAN for queue in (0, 1)),
    ],
)
def test_streamed_is_resident_on_vulkan(
    arch: str,
    slots: int,
    jitter_us: int,
    prompts: tuple[int, ...],
    queue: int,
    tiny: Callable[..., Path],
    lib: Path,
    tmp_path: Path,
) -> None:
    """queue: the device keeps the order of copies and computing, as on CUDA.

    lavapipe does all in the order in which it is handed over, so this tries who hands over what, not the events.
    """
    env = {"OALLAMA_STREAM_JITTER": str(jitter_us), "OALLAMA_STREAM_QUEUE": str(queue), **VULKAN}
    wanted = jobs(tiny(arch, "Q4_0"), "Vulkan0", tmp_path, slots, prompts, **CONTEXT)
    assert_same(compute_logits(lib, wanted, tmp_path, env), prompts)


@pytest.mark.parametrize("slots", [2, 4])
def test_a_dry_run_counts_the_slots(slots: int, tiny: Callable[..., Path], lib: Path, rpc: Any) -> None:
    path, device = tiny("llama", "F16"), rpc.devices[0]
    settings = Settings(n_ctx=256, n_ubatch=64, n_batch=64, devices=(device,))
    streamed = table(path, device, lambda name: 1, slots)
    memory = skeleton.dry_run(path, settings, streamed)[device]
    graph = autoplan.read_graph(path, settings)
    order = [graph.tensor[op.weight].nbytes for op in graph.targets(1) if op.weight]
    # Weight i goes through slot i modulo slots; each slot is as large as the largest that goes through it.
    sizes = sum(max(order[i::slots]) for i in range(slots))
    resident = skeleton.dry_run(path, settings, table(path, device, lambda name: 0))[device]
    assert sizes < memory["compute"] <= sizes + resident["compute"] + 2**16 and memory["weights"] < 2**16
    params = LoadParams(
        n_ctx=256, n_ubatch=64, n_batch=64, n_gpu_layers=-1, rpc_servers=(rpc.endpoint,), devices=(device,)
    )
    with Worker(Engine("streamed", lib, params, backend_map=streamed)) as worker:
        loaded = worker.load(path, params.resolved(256))
    # Logs give MiB with two decimals.
    assert loaded.device_bytes()[device] == pytest.approx(sum(memory.values()), abs=3 * 0.01 * 2**20)


def test_a_dry_run_counts_what_batches_of_all_sizes_stream(tiny: Callable[..., Path], rpc: Any) -> None:
    """A smaller batch streams fewer weights, so that larger ones come into other slots."""
    path, device = tiny("llama", "F16"), rpc.devices[0]
    plan, rng = streamed_plan(path, device), np.random.default_rng(4)
    for _ in range(6):
        tensors = {
            name: replace(t, segments=(replace(t.segments[0], stream_from=int(rng.choice((1, 2, 40, 64)))),))
            if t.mode == "stream"
            else t
            for name, t in plan.tensors.items()
        }
        mixed = replace(plan, tensors=tensors, stream_slots=int(rng.integers(2, 5)))
        settings = Settings(n_ctx=256, n_batch=256, n_ubatch=256, devices=(device,), flash_attn="on")
        counted = skeleton.dry_run(path, settings, mixed.to_backend_map())[device]
        with contextlib.closing(Llama(str(path), plan=mixed, n_ctx=256, verbose=False)) as llm:
            for n in (1, 39, 40, 63, 64, 1, 2, 63):
                llm.reset()
                llm.eval(tokens(n))
            assert llm.placement()[device].measured.compute == counted["compute"]


@pytest.mark.parametrize(
    "device", ["RPC0", pytest.param("Vulkan0", marks=pytest.mark.skipif(not has_vulkan(), reason="needs lavapipe"))]
)
def test_after_an_abort_in_the_middle_the_context_is_usable(
    device: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """Down projections are computed on the host, where llama.cpp asks whether to go on; all others are streamed."""
    path = tiny("llama", "Q4_0")
    file = tmp_path / "mixed.map"
    file.write_text(
        table(path, device, lambda name: 1).replace("ffn_down.weight CPU stream 1", "ffn_down.weight CPU host")
    )
    env = {"OALLAMA_STREAM_JITTER": "400"}
    if device == "Vulkan0":
        env |= {"OALLAMA_STREAM_QUEUE": "1", **VULKAN}
    with contextlib.ExitStack() as stack:
        endpoints: list[str] = []
        if device == "RPC0":
            endpoints = [stack.enter_context(LocalRpcServer(threads=2, register=False)).endpoint]
        job = {"model": str(path), "table": str(file), "devices": [device], "rpc": endpoints, **CONTEXT}
        wanted = [{**job, "tokens": tokens(64), "abort_at": at} for at in (0, 2, 3, 4)]
        whole, *aborted = compute_logits(lib, wanted, tmp_path, env)
    for logits in aborted:
        assert np.array_equal(whole, logits)


# ---- what can go wrong ---------------------------------------------------------------------------------------------


def streaming_llama(path: Path, device: str, **more: Any) -> Llama:
    return Llama(str(path), plan=streamed_plan(path, device), verbose=False, **more)


def last_logits(llm: Llama, n: int) -> np.ndarray:
    """Of n tokens in an empty cache."""
    llm.reset()
    llm.eval(tokens(n))
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()


@pytest.mark.parametrize("damage", ["cut off", "overwritten"])
def test_a_file_that_changes_while_it_is_streamed_is_an_error(
    damage: str, tiny: Callable[..., Path], rpc: Any, tmp_path: Path
) -> None:
    """Not garbage and not a crash; the context is usable once the file is whole again."""
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny("llama").read_bytes())
    llm = streaming_llama(path, rpc.devices[0], use_mmap=False)
    before = path.stat()
    tail = path.read_bytes()[4096:]
    expected = last_logits(llm, 40)
    assert np.isfinite(expected).all() and expected.std() > 0.01
    if damage == "cut off":
        os.truncate(path, 4096)
    else:
        os.utime(path)
    with pytest.raises(OallamaError, match=r"model\.gguf.*(shorter|changed) while it was streamed"):
        for _ in range(3):  # what was copied ahead is still good
            last_logits(llm, 40)
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(tail)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert np.array_equal(expected, last_logits(llm, 40))
    llm.close()


def test_several_contexts_stream_in_turn(tiny: Callable[..., Path], rpc: Any) -> None:
    paths = [tiny("llama"), tiny("llama"), tiny("qwen2")]
    alone = []
    for path in paths:
        llm = streaming_llama(path, rpc.devices[0])
        alone.append(last_logits(llm, 40))
        llm.close()
    assert not np.array_equal(alone[0], alone[2])
    together = [streaming_llama(path, rpc.devices[0]) for path in paths]
    for _ in range(3):
        for llm, expected in zip(together, alone, strict=True):
            assert np.array_equal(expected, last_logits(llm, 40))
    for llm in together:
        llm.close()


def test_devices_without_pinned_memory_say_so(tiny: Callable[..., Path], rpc: Any) -> None:
    llm = streaming_llama(tiny("llama"), rpc.devices[0])
    llm.eval(tokens(8))
    (lane,) = (entry for entry in native.core().stream_lanes() if entry["device"] == rpc.devices[0])
    assert lane["pinned_nbytes"] == 0 and not lane["staging_pinned"] and lane["slots_nbytes"] > 0
    assert lane["note"] == "the device has no pinned memory"
    llm.close()
    assert not any(entry["device"] == rpc.devices[0] for entry in native.core().stream_lanes())


PINNED = """
import json, sys
from oallama import Llama
from oallama.engine import native
llm = Llama(sys.argv[1], plan=sys.argv[2], verbose=False, use_mmap=sys.argv[3:] != ["read"])
for _ in range(2):  # the second time from the pool
    llm.reset()
    llm.eval(list(range(300, 340)))
(lane,) = native.core().stream_lanes()
print(json.dumps([lane, llm._ctx.get_logits_ith(-1)[:1000]]))
"""


@pytest.fixture
def on_vulkan(tiny: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path, int]:
    """A model, the file of a plan that streams it to Vulkan, and the bytes that are streamed."""
    if not has_vulkan():
        pytest.skip("needs Vulkan with lavapipe")
    streamed = streamed_plan(tiny("llama"), "Vulkan0")
    streamed.save(tmp_path / "plan.json")
    whole = sum(t.nbytes for t in streamed.tensors.values() if t.mode == "stream")
    return tiny("llama"), tmp_path / "plan.json", whole


@pytest.mark.parametrize("queue", [0, 1])
def test_pinned_memory_up_to_its_limit(queue: int, on_vulkan: tuple[Path, Path, int]) -> None:
    """With all weights, some of them or none in the pool the logits are the same."""
    path, plan, whole = on_vulkan
    found = {}
    for limit in (1 << 30, whole // 2, 0):
        env = VULKAN | {"OALLAMA_PIN_LIMIT": str(limit), "OALLAMA_STREAM_QUEUE": str(queue)}
        result = ran_python(PINNED, path, plan, env=env)
        found[limit] = json.loads(result.stdout)
    lanes = {limit: lane for limit, (lane, _) in found.items()}
    assert lanes[1 << 30]["pinned_nbytes"] == whole and lanes[1 << 30]["note"] == ""
    assert 0 < lanes[whole // 2]["pinned_nbytes"] <= whole // 2 and "beyond the limit" in lanes[whole // 2]["note"]
    assert lanes[0]["pinned_nbytes"] == 0
    assert len({json.dumps(logits) for _, logits in found.values()}) == 1 and np.std(found[0][1]) > 0.01


CUT_OFF = """
import os, sys
import numpy as np
from pathlib import Path
from oallama import Llama, OallamaError
path = Path(sys.argv[1])
whole = path.read_bytes()
llm = Llama(str(path), plan=sys.argv[2], verbose=False, use_mmap=True)
def logits():
    llm.reset()
    llm.eval(list(range(5, 45)))
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()
before, about = logits(), path.stat()
os.truncate(path, len(whole) - 4096)
for _ in range(2):
    try:
        logits()
    except OallamaError as error:
        print(error)
with path.open("r+b") as file:
    file.seek(len(whole) - 4096)
    file.write(whole[-4096:])
os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
print(np.array_equal(before, logits()) and float(before.std()) > 0.01)
"""


def test_a_file_that_is_cut_off_is_an_error_of_a_queue(on_vulkan: tuple[Path, Path, int], tmp_path: Path) -> None:
    """The device keeps the order; weights are read anew each time."""
    path, plan, _ = on_vulkan
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    env = VULKAN | {"OALLAMA_STREAM_QUEUE": "1", "OALLAMA_PIN_LIMIT": "0"}
    *errors, same = ran_python(CUT_OFF, copy, plan, env=env).stdout.splitlines()
    assert len(errors) == 2 and all("streamed" in error for error in errors)
    assert same == "True"


def test_weights_that_are_read_into_pinned_memory_are_not_pinned_again(on_vulkan: tuple[Path, Path, int]) -> None:
    path, plan, whole = on_vulkan
    mapped, read = (json.loads(ran_python(PINNED, path, plan, *how, env=VULKAN).stdout) for how in ((), ("read",)))
    assert mapped[0]["pinned_nbytes"] == whole and read[0]["pinned_nbytes"] == 0
    assert mapped[1] == read[1] and np.std(read[1]) > 0.01


PINNED_AHEAD = """
import json, sys, time
from oallama import Llama
from oallama.engine import native
for _ in range(5):  # contexts that end while weights are being read
    Llama(sys.argv[1], plan=sys.argv[2], verbose=False).close()
llm = Llama(sys.argv[1], plan=sys.argv[2], verbose=False)
end = time.monotonic() + 60
while native.core().stream_lanes()[0]["pinned_nbytes"] < int(sys.argv[3]) and time.monotonic() < end:
    time.sleep(0.01)
(lane,) = native.core().stream_lanes()
print(json.dumps(lane))
"""


def test_weights_are_pinned_and_read_before_the_first_prompt(on_vulkan: tuple[Path, Path, int]) -> None:
    path, plan, whole = on_vulkan
    result = ran_python(PINNED_AHEAD, path, plan, str(whole), env=VULKAN)
    assert json.loads(result.stdout)["pinned_nbytes"] == whole


def test_streamed_weights_live_on_the_host(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("llama"), rpc.devices[0]
    wrong = table(path, device, lambda name: 1).replace("attn_q.weight CPU stream", f"attn_q.weight {device} stream")
    with pytest.raises(OallamaError, match="streamed weights live on the CPU"):
        skeleton.dry_run(path, Settings(n_ctx=64, devices=(device,)), wrong)
