"""Logits computed by tensor-parallel ranks on this host (rank_worker.py)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from oallama.cluster.ranks import mpi
from oallama.engine.runtime import with_bindings
from support.processes import ran

RANK_WORKER = (sys.executable, "-m", "support.rank_worker")
# Upstream's tensor parallelism leaves MLA (minicpm3) out.
ARCHITECTURES = ("llama", "qwen2", "qwen3moe")
# flash_attn: split mode tensor needs it. Repacked weights exist on one side only.
CONTEXT = {"n_ctx": 256, "n_ubatch": 64, "flash_attn": 1, "use_extra_bufts": False, "n_threads": 1}


def rank_logits(
    lib: Path, jobs: list[dict[str, Any]], n_ranks: int, folder: Path, **variables: str
) -> list[np.ndarray]:
    """Logits of each job (logits_worker.py), computed by `n_ranks` ranks on this host."""
    for i, job in enumerate(jobs):
        job["out"] = str(folder / f"ranks-{n_ranks}-{i}.npy")
        job["devices"] = [f"RANK{rank}" for rank in range(n_ranks)]
        job["split_mode"] = "tensor"
    file = folder / "jobs.jsonl"
    file.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    program = [*RANK_WORKER, str(file)]
    command = mpi.mpirun([mpi.Host("localhost", n_ranks)], program, {"OALLAMA_RANK_THREADS": "1", **variables})
    environment = {**mpi.environment(), "LLAMA_CPP_LIB_PATH": str(lib)}
    environment["PYTHONPATH"] = with_bindings(os.environ["PYTHONPATH"])
    result = ran(*command, timeout=600, env=environment)
    assert "ranks add up in host memory" not in result.stderr  # refused on a GPU
    return [np.load(job["out"]) for job in jobs]
