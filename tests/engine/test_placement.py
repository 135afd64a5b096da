"""Placement keeps the model: random placements over {CPU, Vulkan on lavapipe, RPC} give the CPU's logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama.bench.maps import backend_map
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.loading import autoplan
from support.logits import ARCHITECTURES, MAX_NMSE, TOKENS, compute_logits, greedy_differences, nmse
from support.placements import placed_jobs
from support.vulkan import VULKAN, has_vulkan


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_cpu_and_rpc_mixes_are_bit_identical(
    arch: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repacking off: an RPC server computes with plain buffers, so the CPU must, too. Fusion off: ggml-cpu fuses a norm
    with its multiplication only when both are in one split, and rounds differently then."""
    monkeypatch.setenv("GGML_CPU_DISABLE_FUSION", "1")
    path = tiny(arch, "Q4_0")
    common = {"use_extra_bufts": False, "n_threads": 2}
    with LocalRpcServer(threads=2, register=False) as a, LocalRpcServer(threads=2, register=False) as b:
        jobs = [{"model": str(path), "n_gpu_layers": 0, **common}]
        jobs += placed_jobs(path, ["RPC0", "RPC1"], [a.endpoint, b.endpoint], tmp_path, **common)
        reference, *placed = compute_logits(lib, jobs, tmp_path)
    for job, result in zip(jobs[1:], placed, strict=True):
        assert np.array_equal(result, reference), f"{job['table']}: NMSE {nmse(result, reference):.1e}"


@pytest.mark.skipif(not has_vulkan(), reason="no Vulkan backend or no software Vulkan device on this machine")
@pytest.mark.parametrize(
    "arch", [arch if arch == "llama" else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES]
)
def test_mixes_with_vulkan_keep_the_model(
    arch: str, tiny: Callable[..., Path], lib: Path, tmp_path: Path, record_property: Any
) -> None:
    path = tiny(arch, "Q8_0")
    # Upstream's Vulkan MUL_MAT_ID for more than a few tokens corrupts the heap on lavapipe (Mesa 22.3), placed or not.
    common = {"tokens": TOKENS[:40], "n_ubatch": 4 if arch == "qwen3moe" else 64}
    with LocalRpcServer(threads=2, register=False) as server:
        jobs = [{"model": str(path), "n_gpu_layers": 0, **common}]
        jobs += placed_jobs(path, ["Vulkan0", "RPC0"], [server.endpoint], tmp_path, **common)
        reference, *placed = compute_logits(lib, jobs, tmp_path, VULKAN)
    for job, result in zip(jobs[1:], placed, strict=True):
        error = nmse(result, reference)
        record_property("nmse", error)
        assert error <= MAX_NMSE, job["table"]
        assert greedy_differences(result, reference) == 0, job["table"]
        assert not np.array_equal(result, reference), "identical to the bit: did Vulkan compute anything?"


@pytest.mark.skipif(not has_vulkan(), reason="no Vulkan backend or no software Vulkan device on this machine")
def test_host_tensors_are_never_uploaded_and_upload_tensors_are(
    tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """Everything on the CPU with a device in sight: upstream's op_offload uploads weights for 32 tokens and more."""
    path = tiny("llama")
    graph = autoplan.read_graph(path, Settings(n_ctx=64))
    jobs: list[dict[str, Any]] = [{"model": str(path), "n_gpu_layers": 0, "use_extra_bufts": False}]
    for mode in ("host", "upload"):
        table = tmp_path / f"{mode}.map"
        table.write_text(backend_map(graph, "CPU", lambda tensor, mode=mode: f"CPU {mode}"))
        jobs.append({**jobs[0], "table": str(table), "devices": ["Vulkan0"]})
    cpu, host, upload = compute_logits(lib, jobs, tmp_path, {**VULKAN, "GGML_CPU_DISABLE_FUSION": "1"})
    assert np.array_equal(host, cpu)
    assert not np.array_equal(upload, cpu) and nmse(upload, cpu) <= MAX_NMSE
