"""Checks of what was built and installed: the engine, its kernels, programs, Python packages."""

from __future__ import annotations

import ctypes
import json
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from oallama.engine import runtime
from oallama.engine.module_packages import add_packages
from oallama.errors import OallamaError

from .finding import Finding

BUILD = "make setup"
BACKENDS = ("cpu", "rpc", "vulkan", "cuda")
# Of a CPU backend, in the order of llama.cpp's own text. Others say what every CPU of the last ten years has.
_TOLD = ("AVX", "AVX2", "F16C", "FMA", "AVX_VNNI", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX_INT8", "NEON", "SVE")
PROGRAMS = {"llama-server": "oallama serve", "llama-quantize": "oallama quantize", "llama-bench": "oallama bench"}
# Import -> what pip installs for it, and what needs it.
PACKAGES = {
    "mpi4py": ("oallama[cluster]", "oallama cluster run"),
    "matplotlib": ("oallama[plot]", "--plot"),
    "asyncssh": ("oallama[cluster]", "oallama cluster join"),
    "aiohttp": ("oallama[load]", "oallama bench serve"),
    "huggingface_hub": ("huggingface-hub", "Llama.from_pretrained"),
}


def engine() -> Finding:
    """Versions of oallama and of what it patches, and the backends that were built."""
    return Finding("engine", "ok", f"{version()}; backends {', '.join(backends())}")


def version() -> str:
    """Of oallama, llama-cpp-python and llama.cpp."""
    pin = json.loads(runtime.pin_file().read_text())
    upstream = f"llama-cpp-python {pin['version']}, llama.cpp {pin['llama_cpp_commit']}"
    return f"oallama {metadata.version('oallama')}, {upstream}"


def backends() -> list[str]:
    """ggml's backends that the engine was built with."""
    return [backend for backend in BACKENDS if has_backend(backend)]


def kernels() -> Finding:
    """Instruction sets that the CPU backend was built for."""
    found = cpu_features(runtime.llama_cpp().llama_print_system_info().decode())
    module = cpu_module()
    said = f"{module + ': ' if module else ''}{' '.join(found) or 'plain C++'}"
    if "AVX2" in found or "NEON" in found:
        return Finding("CPU kernels", "ok", said)
    return Finding("CPU kernels", "note", said, "the CPU computes slowly: the engine uses neither AVX2 nor NEON")


def cpu_module() -> str:
    """Which of several CPU backends this process has loaded, as "zen4"; empty where the engine has one for this CPU."""
    found = re.search(r"/libggml-cpu-([\w.]+)\.so$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return found[1] if found else ""


def cpu_features(system_info: str) -> list[str]:
    """Instruction sets that llama.cpp's text says are used, as "CPU : SSE3 = 1 | AVX = 1 | .."."""
    used = set(re.findall(r"(\w+) = 1\b", system_info))
    return [name for name in _TOLD if name in used]


def has_backend(name: str) -> bool:
    """Whether the engine was built with a backend of ggml, as "cuda". Of "cpu" it may have one per instruction set."""
    folders = (runtime.lib_dir(), *add_packages(runtime.lib_dir()))
    return any(any(folder.glob(f"libggml-{name}{rest}.so")) for folder in folders for rest in ("", "-*"))


def has_vulkan_loader() -> bool:
    """Whether the system has the library that the Vulkan backend needs."""
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return False
    return True


def rpc() -> Finding:
    """Whether other hosts' devices can be used, and this one's offered."""
    try:
        program = runtime.program("ggml-rpc-server")
    except OallamaError:
        return Finding("RPC", "missing", "not built", "no devices of other hosts, no --local-rpc", BUILD)
    return Finding("RPC", "ok", f"{program.name} is built")


def programs() -> Finding:
    """llama.cpp's programs that commands of oallama start."""
    lacking = [name for name in PROGRAMS if not _is_built(name)]
    if not lacking:
        return Finding("programs", "ok", ", ".join(PROGRAMS))
    effect = f"{', '.join(PROGRAMS[name] for name in lacking)} will not run"
    return Finding("programs", "missing", f"not built: {', '.join(lacking)}", effect, BUILD)


def _is_built(name: str) -> bool:
    try:
        runtime.program(name)
    except OallamaError:
        return False
    return True


def packages() -> Finding:
    """Optional Python packages."""
    lacking = [name for name in PACKAGES if find_spec(name) is None]
    there = [name for name in PACKAGES if name not in lacking]
    if not lacking:
        return Finding("packages", "ok", ", ".join(there))
    needed_by = ", ".join(PACKAGES[name][1] for name in lacking)
    remedy = " ".join(["pip install", *(f"'{PACKAGES[name][0]}'" for name in lacking)])
    return Finding("packages", "missing", f"no {', '.join(lacking)}", f"needed by {needed_by}", remedy)
