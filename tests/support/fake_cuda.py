"""A backend with the CPU's arithmetic and CUDA's names."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from oallama.engine import runtime
from support.paths import NATIVE, ROOT
from support.weave_cuda import headers, host_sources, places

needs_headers = pytest.mark.skipif(headers() is None or shutil.which("c++") is None, reason="no CUDA headers")


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, ggml, lib = tmp_path_factory.mktemp("fake"), ROOT / "third_party/llama.cpp/patched/ggml", runtime.lib_dir()
    library = folder / "libggml-fake-cuda.so"
    command = ["c++", "-std=c++17", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-fPIC", "-shared"]
    for external in (headers(), ggml / "include", ggml / "src"):
        command += ["-isystem", str(external)]
    command += [f"-I{place}" for place in places()]
    sources = [path for path in host_sources() if path.parent.name == "cuda"]
    command += map(str, (NATIVE / "fake_cuda_backend.cpp", NATIVE / "weave_cuda_fake.cpp", *sources))
    command += [f"-L{lib}", "-lggml-base", "-lggml", f"-Wl,-rpath,{lib}", "-o", str(library)]
    subprocess.run(command, check=True)
    return library
