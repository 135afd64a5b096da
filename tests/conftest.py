"""Shared fixtures: the four architectures as tiny models, the two builds of libllama, a loopback RPC device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama.engine import runtime
from oallama.modelmaker import make_model

ROOT = Path(__file__).parents[1]
ARCHITECTURES = ("llama", "minicpm3", "qwen2", "qwen3moe")
# Of the environment of programs that may use AMX where the CPU has it; tests are the same on all machines else.
AMX = {"OALLAMA_AMX": "1"}
# Any valid token ids do: all tiny vocabularies have at least a thousand tokens.
TOKENS = [int(t) for t in np.random.default_rng(7).integers(300, 1000, size=70)]


def pytest_configure(config: pytest.Config) -> None:
    """Hide NVIDIA GPUs from tests that are about other devices; `-m cuda` runs those that are about them.

    AMX is off but for tests that ask for it: with it a CPU rounds differently, and more types have two layouts.

    A shell's background job (`make test &`) ignores Ctrl-C and hands that on: programs under test must not.
    """
    if config.getoption("-m") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OALLAMA_AMX"] = "0"
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def process_of(command: Sequence[str | Path], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process with text pipes that does not outlive the block, whatever happens in it."""
    with subprocess.Popen([str(word) for word in command], text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(arch, file_type="Q8_0")`: path of a tiny model, made once a session."""
    folder = tmp_path_factory.mktemp("models")

    def get(arch: str, file_type: str = "Q8_0") -> Path:
        path = folder / f"{arch}-{file_type}.gguf"
        if not path.exists():
            make_model(path, arch=arch, shape="tiny", file_type=file_type)
        return path

    return get


@pytest.fixture(scope="session")
def baseline_lib() -> Path:
    """Folder of the unpatched libllama from the same pin."""
    folder = Path(os.environ.get("OALLAMA_BASELINE_DIR") or ROOT / "build" / "baseline" / "bin")
    if not (folder / "libllama.so").exists():
        pytest.fail(f"no unpatched llama.cpp in {folder}: run `make baseline`")
    return folder


def compute_logits(
    lib: Path, jobs: list[dict[str, Any]], folder: Path, env: dict[str, str] | None = None, log: Path | None = None
) -> list[np.ndarray]:
    """Logits of each job (tests/logits_worker.py) on the libllama in `lib`, computed in a process of its own.

    log: takes what the process writes to stderr.
    """
    for i, job in enumerate(jobs):
        job.setdefault("tokens", TOKENS)
        job.setdefault("n_decode", 4)
        job["out"] = str(folder / f"{lib.name}-{i}.npy")
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "logits_worker.py")],
        input="".join(json.dumps(job) + "\n" for job in jobs),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(lib), **(env or {})},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    if log:
        log.write_text(result.stderr)
    return [np.load(job["out"]) for job in jobs]


@pytest.fixture(scope="session")
def lib() -> Path:
    """Folder of the patched libllama."""
    return runtime.lib_dir()


@pytest.fixture(scope="session")
def rpc() -> Iterator[Any]:
    """A loopback RPC device with two threads, registered in this process for the whole session."""
    from oallama.engine.rpc import LocalRpcServer

    with LocalRpcServer(threads=2) as server:
        yield server
