"""What the GPU host has of what a build and the measurements need, and where: before anything else, in seconds.

python bench/gpu/preflight.py [--out FILE.jsonl] [--env FILE] [--rehearse]

Needs no package. --env: shell lines for the build where things lie in unusual places (cuBLAS of a wheel, a driver
library without its link, Python.h of another folder). Ends with 1 where the engine cannot be built; --rehearse: never.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import shutil
import site
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Log, gpus, nvcc, output

TOOLS = ("c++", "cmake", "ninja", "git", "compute-sanitizer", "ncu", "nvidia-cuda-mps-control", "xz", "cuobjdump")
L2_CACHE_SIZE, MULTIPROCESSORS = 38, 16  # of CUdevice_attribute
WRITTEN = 1 << 30


def toolkits() -> Iterator[Path]:
    """Roots below which CUDA's headers and libraries may lie: nvcc's, then the wheels'."""
    if compiler := nvcc():
        yield Path(compiler).resolve().parents[1]
    yield from sorted(Path("/usr/local").glob("cuda*"))
    for folder in (*sys.path, *site.getsitepackages()):
        yield from sorted(Path(folder).glob("nvidia/*"))


def find(*patterns: str) -> Path | None:
    for root in toolkits():
        for pattern in patterns:
            if found := next(root.glob(pattern), None):
                return found
    return None


def python_header() -> Path | None:
    wanted = Path(sysconfig.get_path("include")) / "Python.h"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    others = (path for root in ("/usr/include", "/usr/local/include", "/opt", "/root")
              for path in sorted(Path(root).glob(f"**/{version}/Python.h")))  # fmt: skip
    return wanted if wanted.exists() else next(others, None)


def driver_library() -> Path | None:
    """The driver itself, which a program loads."""
    listed = [line.rpartition("=> ")[2] for line in output("ldconfig", "-p").splitlines() if "libcuda.so.1 " in line]
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    places = [
        *listed,
        *(f"{folder}/libcuda.so.1" for folder in folders),
        "/usr/local/nvidia/lib64/libcuda.so.1",
        "/usr/local/nvidia/lib/libcuda.so.1",
    ]
    return next((Path(place) for place in places if Path(place).exists()), None)


def attribute(number: int) -> int | None:
    """Of the first GPU, from the driver."""
    path, value, device = driver_library(), ctypes.c_int(), ctypes.c_int()
    if path is None:
        return None
    driver = ctypes.CDLL(str(path))
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    return value.value if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 else None


def host_caches() -> dict[str, str]:
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    return {
        f"L{(index / 'level').read_text().strip()} {(index / 'type').read_text().strip()}":
        (index / "size").read_text().strip()
        for index in sorted(folder.glob("index*"))
    }  # fmt: skip


def memory() -> dict[str, Any]:
    words = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    limit = next((p for p in map(Path, ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"))
                  if p.exists()), None)  # fmt: skip
    return {
        **{name: int(words[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")},
        "control_group": limit.read_text().strip() if limit else None,
        "locked": output("bash", "-c", "ulimit -l"),
    }


def disk(folder: Path, nbytes: int) -> dict[str, Any]:
    """Free bytes, and the speed of writing a file there."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start, block = time.perf_counter(), os.urandom(1 << 24)
        for _ in range(nbytes >> 24):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
    return {"folder": str(folder), "free": shutil.disk_usage(folder).free, "written_bytes_s": nbytes / seconds}


def build_environment(found: dict[str, Path | None]) -> list[str]:
    """Shell lines that lead the build to what is not where it looks."""
    lines, arguments = [], []
    root = next(toolkits(), None)
    if (header := found["cublas_v2.h"]) and root and not header.is_relative_to(root):
        lines.append(f"export CPATH={shlex.quote(str(header.parent))}:${{CPATH:-}}")
    for name, library in (("cublas", found["libcublas"]), ("cublasLt", found["libcublasLt"])):
        if library and root and not library.is_relative_to(root):
            arguments.append(f"-DCUDA_{name}_LIBRARY={library}")
    if found["libcuda to link"] is None and found["libcuda.so.1"]:
        arguments.append(f"-DCUDA_cuda_driver_LIBRARY={found['libcuda.so.1']}")
    header = found["Python.h"]
    if header and header.parent != Path(sysconfig.get_path("include")):
        arguments += [f"-DPython_INCLUDE_DIR={header.parent}", f"-DPython3_INCLUDE_DIR={header.parent}"]
    if arguments:
        lines.append(f'export CMAKE_ARGS={shlex.quote(" ".join(arguments))}" ${{CMAKE_ARGS:-}}"')
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--env", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    compiler = nvcc()
    found = {
        "nvcc": Path(compiler) if compiler else None,
        "cuda_runtime.h": find("include/cuda_runtime.h", "targets/*/include/cuda_runtime.h"),
        "cublas_v2.h": find("include/cublas_v2.h", "targets/*/include/cublas_v2.h"),
        "libcudart_static": find("lib*/libcudart_static.a", "targets/*/lib/libcudart_static.a"),
        "libcublas": find("lib*/libcublas.so*", "targets/*/lib/libcublas.so*"),
        "libcublasLt": find("lib*/libcublasLt.so*", "targets/*/lib/libcublasLt.so*"),
        "libcuda to link": find("lib*/stubs/libcuda.so", "targets/*/lib/stubs/libcuda.so"),
        "libcuda.so.1": driver_library(),
        "Python.h": python_header(),
    }
    missing = [name for name, path in found.items() if path is None and name != "libcuda to link"]
    if found["libcuda to link"] is None and found["libcuda.so.1"] is None:
        missing.append("libcuda to link")
    missing += [name for name in ("c++", "cmake", "xz") if shutil.which(name) is None]
    if not gpus():
        missing.append("a GPU that nvidia-smi sees")
    nbytes = WRITTEN >> 6 if options.rehearse else WRITTEN
    folders = [Path.cwd(), *(p for p in (Path("/dev/shm"),) if p.is_dir())]
    with Log(options.out) as log:
        log.add(
            "preflight",
            missing=missing,
            found={name: str(path) if path else None for name, path in found.items()},
            tools={name: shutil.which(name) for name in TOOLS},
            gpu_l2_bytes=attribute(L2_CACHE_SIZE),
            multiprocessors=attribute(MULTIPROCESSORS),
            host_caches=host_caches(),
            memory=memory(),
            disks=[disk(folder, nbytes) for folder in folders],
            python=sys.version.split()[0],
            sanitizer=output("compute-sanitizer", "--version"),
            runtime=output("uname", "-r"),
        )
    lines = build_environment(found)
    if options.env:
        options.env.write_text("\n".join(lines) + "\n")
    print("\n".join([f"missing: {', '.join(missing) or 'nothing'}", *lines]))
    return 1 if missing and not options.rehearse else 0


if __name__ == "__main__":
    sys.exit(main())
