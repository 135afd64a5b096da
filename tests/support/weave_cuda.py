"""csrc/weave/cuda as a library for tests and benchmarks: compiled for a GPU, or with threads for kernels."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from support.paths import NATIVE, ROOT

WEAVE = ROOT / "csrc" / "weave"
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}


def structs() -> dict[str, Any]:
    """Those of csrc/weave/protocol.h, as they stand there."""
    found: dict[str, Any] = {"uint32_t": ctypes.c_uint32, "float": ctypes.c_float}
    text = re.sub(r"//.*", "", (WEAVE / "protocol.h").read_text())
    for name, body in re.findall(r"^struct (\w+) \{\n(.*?)^\};", text, re.MULTILINE | re.DOTALL):
        lines = re.findall(r"^ +(\w+) +([\w, ]+);", body, re.MULTILINE)
        if all(kind in found for kind, _ in lines):
            fields = [(field, found[kind]) for kind, names in lines for field in names.split(", ")]
            found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


Handle, OpenTask, Rows, AttendTask = map(structs().get, ("Handle", "OpenTask", "SequenceRows", "AttendTask"))


def task_of(
    layer: int,
    rows: list[tuple[Any, int, int]],
    arrays: tuple[np.ndarray | None, ...],
    scale: float,
    max_bias: float = 0.0,
    softcap: float = 0.0,
) -> list[Any]:
    """Arguments of functions that attend: the task, its sequences, pointers to the arrays (sinks, q, k, v, out, ..)."""
    _, q, k, v = arrays[:4]
    assert q is not None and k is not None and v is not None
    sizes = len(q), len(rows), q.shape[1], k.shape[1], q.shape[2], v.shape[2]
    task = AttendTask(layer, *sizes, scale, max_bias, softcap, 0, 0, 1)
    pointers = [ctypes.c_void_p(a.ctypes.data) if a is not None else None for a in arrays]
    return [ctypes.byref(task), (Rows * len(rows))(*(Rows(*r) for r in rows)), *pointers]


def nvcc() -> str | None:
    return shutil.which("nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")


def places() -> list[Path]:
    """Of headers that csrc/weave/cuda includes."""
    csrc = ROOT / "csrc"
    return [csrc / "base", WEAVE, WEAVE / "cpu", WEAVE / "cuda", ROOT / "third_party/llama.cpp/patched/ggml/include"]


def host_sources() -> list[Path]:
    """What g++ compiles of csrc/weave/cuda, of the rest of the engine for it, and the functions for tests on top."""
    return [*WEAVE.glob("cuda/*.cpp"), ROOT / "csrc" / "base" / "graph_run.cpp", *NATIVE.glob("*_for_tests_cuda.cpp")]


def build(folder: Path, *flags: str, arch: str = "native") -> Path:
    """csrc/weave/cuda as a library for an architecture (sm_90; native: of the GPU here). Raises CalledProcessError."""
    library = folder / "libweave_cuda.so"
    sources = [*WEAVE.glob("cuda/*.cu"), *host_sources()]
    includes = [f"-I{path}" for path in places()]
    options = [
        f"-arch={arch}",
        "-std=c++17",
        "-O2",
        "-lineinfo",
        "-use_fast_math",
        "-Xcompiler",
        "-fPIC",
        "--threads=0",
    ]
    compiler = nvcc()
    assert compiler is not None, "no nvcc"
    command = [compiler, *options, *includes, *flags, "-shared", *map(str, sources), "-lcuda", "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def load(library: Path) -> Any:
    """The functions of tests/native/api_for_tests_cuda.cpp."""
    lib = ctypes.CDLL(str(library))
    lib.wc_error.restype = ctypes.c_char_p
    lib.wc_sender_way.restype = ctypes.c_char_p
    for name in ("wc_receiver_new", "wc_sender_new", "wc_graph_sender_new"):
        getattr(lib, name).restype = ctypes.c_void_p
    for name in ("wc_cold_graphs", "wc_sender_attend", "wc_task_seconds"):
        getattr(lib, name).restype = ctypes.c_double
    return lib


def has_gpu() -> bool:
    try:
        return bool(subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).stdout)
    except (OSError, subprocess.TimeoutExpired):
        return False


def headers() -> Path | None:
    compiler = nvcc()
    found = Path(compiler).resolve().parents[1] / "include" if compiler else Path("/usr/local/cuda/include")
    return found if (found / "cuda_runtime.h").is_file() else None


def build_fake(folder: Path) -> Path:
    library = folder / "libweave_fake.so"
    command = ["c++", "-std=c++17", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-fPIC", "-shared"]
    command += ["-isystem", str(headers()), *(f"-I{place}" for place in places())]
    command += [str(source) for source in (NATIVE / "weave_cuda_fake.cpp", *host_sources())]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library
