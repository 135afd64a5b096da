"""Streamed weights give, bit for bit, what resident ones give on the same device, whatever the order of events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ARCHITECTURES, compute_logits
from oallama import autoplan, engine
from oallama.bench.engines import Engine, LoadParams, Worker
from oallama.errors import OallamaError
from oallama.rpc import LocalRpcServer
from test_placement import VULKAN, has_vulkan

PROMPTS = (1, 31, 32, 33, 160)
CONTEXT = {"n_ctx": 256, "n_ubatch": 64}
SEED = 11
# Upstream's MUL_MAT_ID corrupts lavapipe's heap.
ON_VULKAN = [arch for arch in ARCHITECTURES if arch != "qwen3moe"]


def table(path: Path, device: str, streamed: Callable[[str], int]) -> str:
    """All on `device`, but for weights that are streamed from `streamed(name)` tokens on (0: resident)."""
    graph = autoplan.read_graph(path, engine.Settings(n_ctx=64))
    targets = {op.weight for op in graph.targets(1)}
    lines = ["# oallama backend map v1", *(f"layer {il} {device}" for il in range(graph.n_layer + 1))]
    for tensor in graph.tensors:
        if tensor.name == "token_embd.weight":
            lines.append(f"tensor {tensor.name} CPU host")
        elif tensor.name in targets and (tokens := streamed(tensor.name)):
            lines.append(f"tensor {tensor.name} CPU stream {tokens}")
        else:
            lines.append(f"tensor {tensor.name} {device} resident")
    return "\n".join(lines) + "\n"


def some(name: str) -> int:
    """Two thirds of the weights, of every size."""
    return int(sum(name.encode()) % 3 > 0)


def tokens(n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(SEED).integers(300, 1000, size=n)]


def jobs(path: Path, device: str, folder: Path, wanted: list[Callable[[str], int]], **job: Any) -> list[dict[str, Any]]:
    """For every prompt: all resident, then every table of `wanted`."""
    result = []
    for i, streamed in enumerate([lambda name: 0, *wanted]):
        file = folder / f"{path.stem}-{i}.map"
        file.write_text(table(path, device, streamed))
        result += [
            {"model": str(path), "table": str(file), "devices": [device], "tokens": tokens(n), **job} for n in PROMPTS
        ]
    return result


def assert_same(found: list[np.ndarray]) -> None:
    resident = found[: len(PROMPTS)]
    for i, streamed in enumerate(found[len(PROMPTS) :]):
        n = PROMPTS[i % len(PROMPTS)]
        assert np.array_equal(resident[i % len(PROMPTS)], streamed), f"{n} tokens, table {i // len(PROMPTS) + 1}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("slots", "jitter_us"), [(2, 0), (3, 400)])
def test_streamed_is_resident_over_rpc(
    arch: str, slots: int, jitter_us: int, tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    env = {"OALLAMA_STREAM_SLOTS": str(slots), "OALLAMA_STREAM_JITTER": str(jitter_us), "GGML_CPU_DISABLE_FUSION": "1"}
    path = tiny(arch, "Q4_0")
    with LocalRpcServer(threads=2, register=False) as server:
        wanted = jobs(path, "RPC0", tmp_path, [lambda name: 1, some], rpc=[server.endpoint], **CONTEXT)
        assert_same(compute_logits(lib, wanted, tmp_path, env))


@pytest.mark.skipif(not has_vulkan(), reason="needs Vulkan with lavapipe")
@pytest.mark.parametrize("arch", ON_VULKAN)
@pytest.mark.parametrize(("slots", "jitter_us"), [(2, 0), (4, 400)])
def test_streamed_is_resident_on_vulkan(
    arch: str, slots: int, jitter_us: int, tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    env = {"OALLAMA_STREAM_SLOTS": str(slots), "OALLAMA_STREAM_JITTER": str(jitter_us), **VULKAN}
    wanted = jobs(tiny(arch, "Q4_0"), "Vulkan0", tmp_path, [lambda name: 1, some], **CONTEXT)
    assert_same(compute_logits(lib, wanted, tmp_path, env))


@pytest.mark.parametrize("slots", [2, 4])
def test_a_dry_run_counts_the_slots(
    slots: int, tiny: Callable[..., Path], lib: Path, rpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OALLAMA_STREAM_SLOTS", str(slots))
    path, device = tiny("llama", "F16"), rpc.devices[0]
    settings = engine.Settings(n_ctx=256, n_ubatch=64, n_batch=64, devices=(device,))
    streamed = table(path, device, lambda name: 1)
    memory = engine.dry_run(path, settings, streamed)[device]
    weights = [t for t in autoplan.read_graph(path, settings).tensors if t.name != "token_embd.weight"]
    assert memory["compute"] > slots * max(t.nbytes for t in weights) > memory["weights"]
    params = LoadParams(
        n_ctx=256, n_ubatch=64, n_batch=64, n_gpu_layers=-1, rpc_servers=(rpc.endpoint,), devices=(device,)
    )
    with Worker(
        Engine("streamed", lib, params, backend_map=streamed, env={"OALLAMA_STREAM_SLOTS": str(slots)})
    ) as worker:
        loaded = worker.load(path, params.resolved(256))
    # Logs give MiB with two decimals.
    assert loaded.device_bytes()[device] == pytest.approx(sum(memory.values()), abs=3 * 0.01 * 2**20)


def test_after_an_abort_in_the_middle_the_context_is_usable(
    tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """Down projections are computed on the host, where llama.cpp asks whether to go on; all others are streamed."""
    path = tiny("llama", "Q4_0")
    file = tmp_path / "mixed.map"
    file.write_text(
        table(path, "RPC0", lambda name: 1).replace("ffn_down.weight CPU stream 1", "ffn_down.weight CPU host")
    )
    with LocalRpcServer(threads=2, register=False) as server:
        job = {
            "model": str(path),
            "table": str(file),
            "devices": ["RPC0"],
            "rpc": [server.endpoint],
            "tokens": tokens(64),
        }
        wanted = [{**job, "abort_at": at, **CONTEXT} for at in (0, 2, 3, 4)]
        whole, *aborted = compute_logits(lib, wanted, tmp_path, {"OALLAMA_STREAM_JITTER": "400"})
    for logits in aborted:
        assert np.array_equal(whole, logits)


def test_streamed_weights_live_on_the_host(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("llama"), rpc.devices[0]
    wrong = table(path, device, lambda name: 1).replace("attn_q.weight CPU stream", f"attn_q.weight {device} stream")
    with pytest.raises(OallamaError, match="streamed weights live on the CPU"):
        engine.dry_run(path, engine.Settings(n_ctx=64, devices=(device,)), wrong)
