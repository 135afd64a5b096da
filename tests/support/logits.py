"""Logits of tiny models, computed by a process of its own (logits_worker.py), and how near two of them are."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from oallama.engine.runtime import with_bindings
from support.processes import ran

ARCHITECTURES = ("llama", "minicpm3", "qwen2", "qwen3moe")
# Of the environment of programs that may use AMX where the CPU has it; tests are the same on all machines else.
AMX = {"OALLAMA_AMX": "1"}


# Any valid token ids do: all tiny vocabularies have at least a thousand tokens.
def tokens(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(300, 1000, size=n)]


TOKENS = tokens(70, seed=7)


def compute_logits(
    lib: Path, jobs: list[dict[str, Any]], folder: Path, env: dict[str, str] | None = None, log: Path | None = None
) -> list[np.ndarray]:
    """Logits of each job (logits_worker.py) on the libllama in `lib`, computed in a process of its own.

    log: takes what the process writes to stderr.
    """
    for i, job in enumerate(jobs):
        job.setdefault("tokens", TOKENS)
        job.setdefault("n_decode", 4)
        job["out"] = str(folder / f"{lib.name}-{i}.npy")
    given = "".join(json.dumps(job) + "\n" for job in jobs)
    environment = {"LLAMA_CPP_LIB_PATH": str(lib), "PYTHONPATH": with_bindings(os.environ["PYTHONPATH"]), **(env or {})}
    result = ran(sys.executable, "-m", "support.logits_worker", input=given, env=environment)
    if log:
        log.write_text(result.stderr)
    return [np.load(job["out"]) for job in jobs]


MAX_NMSE = 1e-3
# Below this gap between the two best logits, rounding may swap them; logits have a standard deviation of about 3.
NOISE = 0.25


def nmse(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a - b) ** 2).sum() / (b**2).sum())


def greedy_differences(a: np.ndarray, b: np.ndarray, noise: float = NOISE) -> int:
    """Rows whose best token differs although the reference's margin exceeds the noise."""
    best = np.sort(b, axis=1)
    clear = best[:, -1] - best[:, -2] > noise
    assert clear.any(), "no row has a clear best token: the comparison would be empty"
    return int((a.argmax(axis=1) != b.argmax(axis=1))[clear].sum())
