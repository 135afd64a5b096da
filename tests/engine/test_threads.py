"""Graphs on the CPU are computed by threads of our own (patch 0030), to the bits of OpenMP's threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.logits import ARCHITECTURES, compute_logits, tokens
from support.processes import busy_cpus, ran_python

N_CPUS = len(os.sched_getaffinity(0))
# 200 tokens by two threads; prints how long the other threads of the process ran, as a share of the main thread's time.
GENERATE = """
import os, sys, threading
from oallama import Llama
depth = int(sys.argv[2])
llm = Llama(sys.argv[1], n_ctx=2048, n_gpu_layers=0, n_threads=2, n_threads_batch=2, flash_attn=True, verbose=False)
def ran():
    folder = "/proc/self/task"
    return {task: int(open(f"{folder}/{task}/schedstat").read().split()[0]) for task in os.listdir(folder)}
llm.eval([1] * depth)
before = ran()
for token in range(200):
    llm.eval([300 + token])
spent = {task: ns - before.get(task, 0) for task, ns in ran().items()}
own = spent.pop(str(threading.get_native_id()))
print(sum(spent.values()) / own)
"""


@pytest.mark.parametrize("n_threads", [2, 5])
def test_logits_are_those_of_openmp(n_threads: int, tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    def jobs() -> list[dict[str, object]]:
        return [
            {"model": str(tiny(arch, "Q4_K_M")), "n_gpu_layers": 0, "n_threads": n_threads} for arch in ARCHITECTURES
        ]

    ours = compute_logits(lib, jobs(), tmp_path)
    (tmp_path / "openmp").mkdir()
    theirs = compute_logits(lib, jobs(), tmp_path / "openmp", {"OALLAMA_THREADS": "openmp"})
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("flash_attn", [0, 1])
def test_logits_are_the_same_beside_other_programs(
    flash_attn: int, tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """Fewer threads compute then, and divide upstream's fused attention behind 512 tokens as all would."""

    def jobs() -> list[dict[str, object]]:
        return [
            {
                "model": str(tiny(arch, "Q4_K_M")),
                "n_gpu_layers": 0,
                "n_threads": N_CPUS,
                "n_ctx": 1024,
                "tokens": tokens(600, seed=3),
                "flash_attn": flash_attn,
            }
            for arch in ("llama", "qwen3moe")
        ]

    theirs = compute_logits(lib, jobs(), tmp_path, {"OALLAMA_THREADS": "openmp"})
    (tmp_path / "ours").mkdir()
    with busy_cpus(N_CPUS):
        ours = compute_logits(lib, jobs(), tmp_path / "ours")
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.skipif(N_CPUS < 2 or os.cpu_count() != N_CPUS, reason="one CPU, or not all of the machine's")
@pytest.mark.parametrize("depth", [8, 600])
def test_one_of_two_threads_computes_where_all_cpus_are_busy(depth: int, tiny: Callable[..., Path]) -> None:
    with busy_cpus(N_CPUS):
        assert float(ran_python(GENERATE, tiny("llama"), str(depth)).stdout) < 0.5
