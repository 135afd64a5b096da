"""Graphs on the CPU are computed by threads of our own (patch 0030), to the bits of OpenMP's threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.logits import ARCHITECTURES, compute_logits


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
