"""Finds the CUDA libraries that libggml-cuda.so needs where the system's loader does not.

The loader knows ldconfig's folders, LD_LIBRARY_PATH and the RUNPATH of libggml-cuda.so (cmake/cuda_runpath.cmake): the
toolkit it was built with, and the `nvidia-*` wheels in its own site-packages. Other toolkits and the wheels of other
site-packages (those of the system beside a virtual environment's) are found here, as PyTorch finds them. So is
libggml-base.so, which a module of another package needs. A driver that is too old for these libraries is said.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from oallama.base.printing import say
from oallama.engine.module_packages import add_packages, is_modular
from oallama.errors import OallamaError

BACKEND = "libggml-cuda.so"
# In a site-packages: the wheels of CUDA 13 share one folder, those of CUDA 12 have one each.
_WHEELS = ("nvidia/cu[0-9]*/lib", "nvidia/*/lib")
_IN_TOOLKIT = ("lib64", "lib", "targets/*/lib")
_MISSING = re.compile(r"(?P<name>\S+): cannot open shared object file")
_PATH = "LD_LIBRARY_PATH"
# The oldest driver for each CUDA: NVIDIA's table of "CUDA minor version compatibility".
_OLDEST_DRIVERS = {12: 525, 13: 580}


@dataclass(frozen=True)
class OldDriver:
    """NVIDIA's driver supports CUDA up to `supported`, and the engine needs CUDA `needed`."""

    supported: str
    needed: int

    @property
    def problem(self) -> str:
        return f"NVIDIA's driver supports CUDA {self.supported}, and oallama needs CUDA {self.needed}"

    @property
    def remedy(self) -> str:
        oldest = _OLDEST_DRIVERS.get(self.needed)
        return "install a newer driver" if oldest is None else f"install NVIDIA's driver {oldest} or newer"


@cache
def make_loadable(lib_dir: Path) -> None:
    """Load what the CUDA backend of the engine in `lib_dir` needs and the system's loader does not find.

    Without such a backend this does nothing. Folders are appended to LD_LIBRARY_PATH, for the programs that this
    process starts. Where backends are modules (docs/wheels.md), those of packages count, too, and a library that is
    nowhere costs the GPU and is said.

    Raises:
        OallamaError: if a library is nowhere and the engine needs it; the message says what to install.
    """
    for folder in (lib_dir, *add_packages(lib_dir)):
        if (backend := folder / BACKEND).is_file():
            try:
                if old := _if_too_old(_load(backend, set(), lib_dir)):
                    say(f"no NVIDIA GPU: {old.problem}; {old.remedy}")
            except OallamaError as error:
                if not is_modular(lib_dir):
                    raise
                say(f"no NVIDIA GPU: {error}")


def _load(library: Path, tried: set[str], lib_dir: Path) -> ctypes.CDLL:
    """Load a library, those it needs first."""
    while True:
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            missing = _MISSING.match(str(error))
            if missing is None or missing["name"] in tried:
                raise OallamaError(f"cannot load {library}: {error}") from None
        name = missing["name"]
        tried.add(name)
        folder = next((folder for folder in (lib_dir, *_folders()) if (folder / name).is_file()), None)
        if folder is None:
            raise OallamaError(_advice(name))
        _load(folder / name, tried, lib_dir)  # whoever asks for this name from now on is given this one
        os.environ[_PATH] = ":".join(filter(None, (os.environ.get(_PATH), str(folder))))


def old_driver(lib_dir: Path) -> OldDriver | None:
    """NVIDIA's driver, if it is too old for the CUDA backend that `make_loadable` has loaded."""
    backends = (folder / BACKEND for folder in (lib_dir, *add_packages(lib_dir)))
    for backend in filter(Path.is_file, backends):
        with suppress(OSError):  # not loaded, which was said
            return _if_too_old(ctypes.CDLL(str(backend)))
    return None


def _if_too_old(backend: ctypes.CDLL) -> OldDriver | None:
    """Without a driver CUDA's runtime gives 0: a machine without a GPU lacks nothing."""
    driver, cuda = _version(backend, "cudaDriverGetVersion"), _version(backend, "cudaRuntimeGetVersion") // 1000
    return OldDriver(f"{driver // 1000}.{driver % 1000 // 10}", cuda) if 0 < driver < 1000 * cuda else None


def _version(backend: ctypes.CDLL, function: str) -> int:
    """As CUDA counts: 12040 is 12.4. 0 where the runtime cannot say it."""
    version = ctypes.c_int(0)
    call = getattr(backend, function, None)  # none with a runtime that is linked statically
    return version.value if call is not None and call(ctypes.byref(version)) == 0 else 0


def _folders() -> Iterator[Path]:
    for entry in filter(None, sys.path):
        for pattern in _WHEELS:
            yield from sorted(Path(entry).glob(pattern), reverse=True)
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        toolkits.append(Path(nvcc).resolve().parents[1])
    for root in (*toolkits, *sorted(Path("/usr/local").glob("cuda*"), reverse=True)):
        for pattern in _IN_TOOLKIT:
            yield from sorted(root.glob(pattern))


def _advice(name: str) -> str:
    if name.startswith("libcuda.so"):
        return f"{name} is missing: this oallama was built for NVIDIA GPUs and needs NVIDIA's driver"
    if name.startswith("libnccl.so"):
        return f"{name} is missing: this oallama was built with NCCL; install it, or: pip install nvidia-nccl-cu13"
    major = name.rpartition(".so.")[2].partition(".")[0]
    suffix = "" if major.isdecimal() and int(major) >= 13 else f"-cu{major}"  # wheels of CUDA 13 dropped it
    return (
        f"{name} is missing: this oallama was built for NVIDIA GPUs; install CUDA {major}'s toolkit (CUDA_HOME says "
        f"where it is), or: pip install nvidia-cuda-runtime{suffix} nvidia-cublas{suffix}"
    )
