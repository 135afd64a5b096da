"""Backends as modules (docs/wheels.md): nobody links them, the best one is loaded, and each computes as upstream's."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oallama.engine import runtime
from support.logits import AMX, ARCHITECTURES, compute_logits, nmse
from support.paths import ROOT
from support.processes import ran, ran_python

CSRC = ROOT / "csrc"
UPSTREAM_MODULES = ROOT / "build" / "baseline-all" / "bin"  # scripts/baseline.sh all
LOADED = """
from oallama.engine import native
native.core().devices()
print(*sorted({line.split()[-1] for line in open("/proc/self/maps") if "libggml-" in line}))
"""


def test_every_function_that_is_looked_for_by_name_is_listed() -> None:
    listed = set(re.findall(r"OA_FUNCTION\((oa[\w:]+)\)", (CSRC / "weave/cpu/cpu_functions.cpp").read_text()))
    sources = [*CSRC.rglob("*.cpp"), *CSRC.rglob("*.h"), *(ROOT / "third_party/llama.cpp/patches").glob("*.patch")]
    wanted = {name for path in sources for name in re.findall(r"OA_OF_CPU\((oa[\w:]+)\)", path.read_text())}
    assert len(wanted) > 10 and wanted == listed


def symbols(path: Path, which: str) -> set[str]:
    said = subprocess.run(["nm", "-D", which, path], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in said.splitlines()}


@pytest.mark.engine
@pytest.mark.parametrize("backend", ["cpu", "rpc", "vulkan"])
def test_nothing_needs_what_only_a_backend_has(backend: str) -> None:
    """Where backends are linked this would go unnoticed, and a wheel would not load."""
    lib = runtime.lib_dir()
    (of_backend, *_) = [*lib.glob(f"libggml-{backend}.so"), *lib.glob(f"libggml-{backend}-*.so"), None]
    if of_backend is None:
        pytest.skip(f"no {backend} backend in this build")
    own = symbols(of_backend, "--defined-only")
    others = [*lib.glob("*.so"), *(lib.parent / "bin").iterdir(), *lib.parent.glob("*.so")]
    others = [path for path in others if not path.name.startswith(f"libggml-{backend}")]
    elsewhere = set().union(*(symbols(path, "--defined-only") for path in others))
    needed = {path.name: (symbols(path, "--undefined-only") & own) - elsewhere for path in others}
    # What registers a linked backend, and the program that serves before it touches one (csrc/rpc/rpc_program.cpp).
    allowed = {"libggml.so": {"ggml_backend_cpu_reg", "ggml_backend_rpc_reg", "ggml_backend_vk_reg"},
               "ggml-rpc-server": {"oa_rpc_server_main"}}  # fmt: skip
    wrong = {name: found - allowed.get(name, set()) for name, found in needed.items()}
    assert own and not any(wrong.values()), wrong


@pytest.fixture
def modules() -> list[Path]:
    """CPU backends of an engine that has several, as a wheel's, which this CPU can run: the best one first."""
    found = sorted(runtime.lib_dir().glob("libggml-cpu-*.so"))
    if not found:
        pytest.skip("the backends of this build are linked (scripts/release.sh makes the other kind)")
    scores = {path: ctypes.CDLL(str(path)).ggml_backend_score() for path in found}
    return sorted((path for path in found if scores[path]), key=lambda path: -scores[path])


def folder_with(libraries: Path, module: str, root: Path) -> Path:
    """A folder below root with `libraries`, but one CPU backend only; libgomp of a wheel lies where they look."""
    folder = root / "oallama" / "lib"
    folder.mkdir(parents=True)
    for path in libraries.glob("*.so*"):
        if not path.name.startswith("libggml-cpu-") or path.name.startswith(module):
            (folder / path.name).symlink_to(path.resolve())
    (root / "oallama.libs").symlink_to(libraries.parents[1] / "oallama.libs")
    return folder


@pytest.mark.engine
def test_the_best_module_for_this_cpu_is_loaded(modules: list[Path]) -> None:
    loaded = [Path(path) for path in ran_python(LOADED).stdout.split()]
    cpus = [path.name for path in loaded if path.name.startswith("libggml-cpu-")]
    assert cpus == [modules[0].name] and any(path.name == "libggml-rpc.so" for path in loaded)


@pytest.mark.engine
def test_modules_of_another_folder(modules: list[Path], tmp_path: Path) -> None:
    """OALLAMA_MODULES adds backends; an empty entry does not mean the current folder."""
    more = tmp_path / "more" / "libggml-blas.so"
    here = tmp_path / "here" / "libggml-blas.so"
    for path in (more, here):
        path.parent.mkdir()
        shutil.copy(modules[0].with_name("libggml-rpc.so"), path)
    said = ran_python(LOADED, env={"OALLAMA_MODULES": f":{more.parent}:"}, cwd=here.parent).stdout.split()
    assert str(more) in said and str(here) not in said and str(modules[0]) in said


@pytest.mark.engine
def test_modules_compute_as_upstreams(modules: list[Path], tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Bit for bit, each instruction set that this CPU has; and all of them nearly the same."""
    if not UPSTREAM_MODULES.is_dir():
        pytest.skip("no unpatched modules (scripts/baseline.sh all)")

    def jobs() -> list[dict[str, object]]:
        types = ("F16", "Q4_K_M")
        return [
            {"model": str(tiny(arch, t)), "flash_attn": 1, "n_gpu_layers": 0} for arch in ARCHITECTURES for t in types
        ]

    first: list[np.ndarray] = []
    for module in modules:
        ours, theirs = (
            compute_logits(
                folder_with(libraries, module.name, tmp_path / f"{side}-{module.stem}"), jobs(), tmp_path, AMX
            )
            for side, libraries in (("ours", runtime.lib_dir()), ("theirs", UPSTREAM_MODULES))
        )
        for job, a, b in zip(jobs(), ours, theirs, strict=True):
            assert np.isfinite(a).all() and np.array_equal(a, b), f"{module.name} {job}"
        first = first or ours
        assert all(nmse(a, b) < 1e-2 for a, b in zip(ours, first, strict=True)), module.name
    # The comparison can fail: the last one has no FMA, and rounds otherwise than the first.
    assert not all(np.array_equal(a, b) for a, b in zip(ours, first, strict=True))


# As qemu knows them, and what is loaded for them.
PROCESSORS = {"Nehalem": "sse42", "SandyBridge": "sandybridge", "IvyBridge": "ivybridge", "Haswell": "haswell"}


@pytest.mark.engine
@pytest.mark.parametrize("processor", PROCESSORS)
def test_older_processors_get_their_module(processor: str, modules: list[Path], tiny: Callable[..., Path]) -> None:
    """Looking at modules for newer ones does them no harm."""
    qemu = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
    if qemu is None:
        pytest.skip("no qemu (apt-get install qemu-user-static)")
    program = (
        "import sys; from oallama import Llama; from oallama.doctor.installed import cpu_module\n"
        "llm = Llama(sys.argv[1], n_ctx=64, n_threads=1, verbose=False)\n"
        "llm.eval([400, 401])\n"
        "print(cpu_module())"
    )
    command = [qemu, "-cpu", processor, Path(sys.executable).resolve(), "-c", program, tiny("llama")]
    assert ran(*command, env={"PYTHONPATH": sysconfig.get_path("purelib")}).stdout.split()[-1] == PROCESSORS[processor]
