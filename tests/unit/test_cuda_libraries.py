"""CUDA's libraries are found in wheels and toolkits the loader does not know; made ones stand for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oallama.engine.cuda_libraries import _advice
from support.paths import ROOT
from support.processes import ran, ran_python

MAJOR = 99  # of no CUDA that a machine could have
ONE_FOLDER = {"cudart": "nvidia/cu13/lib", "cublasLt": "nvidia/cu13/lib", "cublas": "nvidia/cu13/lib"}
FOLDER_EACH = {"cudart": "nvidia/cuda_runtime/lib", "cublasLt": "nvidia/cublas/lib", "cublas": "nvidia/cublas/lib"}
TOOLKIT = dict.fromkeys(ONE_FOLDER, "lib64")

# Loads the engine's library as runtime.py does, then runs a program that needs it, too.
FIND = """
import ctypes, subprocess, sys
from pathlib import Path
from oallama.engine.cuda_libraries import make_loadable
from oallama.errors import OallamaError
try:
    make_loadable(Path(sys.argv[1]))
except OallamaError as error:
    sys.exit(f"refused: {error}")
assert ctypes.CDLL(sys.argv[1] + "/libggml-cuda.so").answer() == 42
sys.exit(subprocess.run([sys.argv[1] + "/../bin/program"]).returncode - 42)
"""


def compile_library(folder: Path, name: str, needs: list[Path], *flags: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    called = [need.name.split(".")[0].replace("-", "_") for need in needs]
    calls = " + ".join(f"{one}()" for one in called) or "14"
    function = "answer" if name == "libggml-cuda.so" else name.split(".")[0].replace("-", "_")
    declared = "".join(f"int {one}(void);" for one in called)
    source = path.with_suffix(".c")
    source.write_text(f"{declared} int {function}(void) {{ return {calls}; }}\n")
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-Wl,--allow-shlib-undefined", *flags]
    subprocess.run([*command, str(source), *map(str, needs), "-o", str(path)], check=True)
    return path


def made_cuda(root: Path, layout: dict[str, str]) -> list[Path]:
    """The libraries that ggml-cuda links, none with a RUNPATH: cublas (28) needs cudart (14) and cublasLt (14)."""
    cudart = compile_library(root / layout["cudart"], f"libcudart.so.{MAJOR}", [])
    lt = compile_library(root / layout["cublasLt"], f"libcublasLt.so.{MAJOR}", [])
    return [cudart, compile_library(root / layout["cublas"], f"libcublas.so.{MAJOR}", [cudart, lt])]


def made_engine(site: Path, needs: list[Path]) -> Path:
    """An oallama/lib as in a site-packages, with RUNPATH $ORIGIN, and a program beside it."""
    lib = site / "oallama/lib"
    backend = compile_library(lib, "libggml-cuda.so", needs, "-Wl,-rpath,$ORIGIN")
    (site / "oallama/bin").mkdir()
    source = lib / "main.c"
    source.write_text("int answer(void); int main(void) { return answer(); }\n")
    command = ["cc", str(source), str(backend), "-Wl,-rpath,$ORIGIN/../lib", "-Wl,--allow-shlib-undefined"]
    subprocess.run([*command, "-o", str(site / "oallama/bin/program")], check=True)
    return lib


def find(lib: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), environment.pop("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", FIND, str(lib)], env=env | environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("layout", [ONE_FOLDER, FOLDER_EACH], ids=["cu13", "cu12"])
def test_wheels_of_another_site_packages_are_found(layout: dict[str, str], tmp_path: Path) -> None:
    lib = made_engine(tmp_path / "ours", made_cuda(tmp_path / "theirs", layout))
    result = find(lib, PYTHONPATH=str(tmp_path / "theirs"))
    assert result.returncode == 0, result.stderr


def test_a_toolkit_is_found(tmp_path: Path) -> None:
    lib = made_engine(tmp_path / "ours", made_cuda(tmp_path / "toolkit", TOOLKIT))
    result = find(lib, CUDA_HOME=str(tmp_path / "toolkit"))
    assert result.returncode == 0, result.stderr


def test_without_cuda_one_line_says_what_to_install(tmp_path: Path) -> None:
    cuda = made_cuda(tmp_path / "toolkit", TOOLKIT)
    lib = made_engine(tmp_path / "ours", cuda)
    result = find(lib)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"refused: libcudart.so.{MAJOR} is missing: ") and "CUDA_HOME" in line and "pip" in line
    cuda[1].with_name(f"libcublasLt.so.{MAJOR}").unlink()  # what cublas needs, not the engine
    result = find(lib, CUDA_HOME=str(tmp_path / "toolkit"))
    assert f"refused: libcublasLt.so.{MAJOR} is missing: " in result.stderr


def test_a_broken_library_is_named(tmp_path: Path) -> None:
    cuda = made_cuda(tmp_path / "toolkit", TOOLKIT)
    lib = made_engine(tmp_path / "ours", cuda)
    cuda[0].write_bytes(b"no library")
    result = find(lib, CUDA_HOME=str(tmp_path / "toolkit"))
    assert f"refused: cannot load {cuda[0]}: " in result.stderr


# ---- a package with the backend as a module --------------------------------------------------------------------------

# The folders that the engine is told of, and what the module answers.
PACKAGES = """
import ctypes, os, sys
from pathlib import Path
from oallama.engine.cuda_libraries import make_loadable
make_loadable(Path(sys.argv[1]))
for folder in filter(None, os.environ.get("OALLAMA_MODULES", "").split(":")):
    print(folder, ctypes.CDLL(folder + "/libggml-cuda.so").answer())
"""


def made_package(site: Path, engine_id: str, code: str = "", needs: list[Path] | None = None) -> Path:
    """A package whose module needs these libraries, without a RUNPATH; its folder."""
    (site / "made-1.0.dist-info").mkdir(parents=True)
    (site / "made-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: made\nVersion: 1.0\n")
    (site / "made-1.0.dist-info/entry_points.txt").write_text("[oallama.modules]\nmade = made:folder\n")
    folder = site / "modules"
    (site / "made.py").write_text(f"def folder():\n    {code or f'return {str(folder)!r}'}\n")
    compile_library(folder, "libggml-cuda.so", needs or [])
    (folder / "engine_id").write_text(engine_id + "\n")
    return folder


def modular_engine(site: Path) -> Path:
    lib = site / "oallama/lib"
    compile_library(lib, "libggml-base.so", [])
    compile_library(lib, "libggml-cpu-x64.so", [])
    (site / "oallama/engine_id").write_text("0123456789abcdef\n")
    return lib


def with_package(lib: Path, site: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "python"), str(site)])
    return ran_python(PACKAGES, lib, env={"PYTHONPATH": path, "LD_LIBRARY_PATH": "", "CUDA_HOME": "", **environment})


def test_a_module_of_a_package_finds_ggml_and_cuda(tmp_path: Path) -> None:
    lib, site = modular_engine(tmp_path / "ours"), tmp_path / "theirs"
    cuda = made_cuda(site, ONE_FOLDER)
    folder = made_package(site, "0123456789abcdef", needs=[lib / "libggml-base.so", *cuda])
    result = with_package(lib, site)
    assert result.stdout == f"{folder} 56\n" and result.stderr == ""


def test_a_folder_that_is_named_already_is_named_once(tmp_path: Path) -> None:
    lib, site = modular_engine(tmp_path / "ours"), tmp_path / "theirs"
    folder = made_package(site, "0123456789abcdef")
    assert with_package(lib, site, OALLAMA_MODULES=str(folder)).stdout == f"{folder} 14\n"


@pytest.mark.parametrize(
    ("engine_id", "code", "said"),
    [
        ("fedcba9876543210", "", "made is not used: it is of another release; pip install --upgrade oallama made"),
        ("0123456789abcdef", "raise RuntimeError('no room')", "made is not used: no room"),
        ("0123456789abcdef", "return '/nowhere'", "made is not used: [Errno 2] No such file or directory"),
    ],
)
def test_a_package_that_does_not_fit_is_left_out(engine_id: str, code: str, said: str, tmp_path: Path) -> None:
    lib, site = modular_engine(tmp_path / "ours"), tmp_path / "theirs"
    made_package(site, engine_id, code)
    result = with_package(lib, site)
    assert result.stdout == "" and said in result.stderr and result.stderr.count("\n") == 1


def test_an_engine_with_linked_backends_loads_no_packages(tmp_path: Path) -> None:
    lib, site = modular_engine(tmp_path / "ours"), tmp_path / "theirs"
    (lib / "libggml-cpu-x64.so").rename(lib / "libggml-cpu.so")
    made_package(site, "0123456789abcdef")
    result = with_package(lib, site)
    assert (result.stdout, result.stderr) == ("", "")


def test_an_engine_without_cuda_needs_nothing(tmp_path: Path) -> None:
    assert ran_python(FIND.split("assert")[0], tmp_path, env={"PYTHONPATH": str(ROOT / "python")}).stderr == ""


# What a runtime of CUDA says of the driver and of itself.
VERSIONS = """
int cudaDriverGetVersion(int * version) { *version = %d; return 0; }
int cudaRuntimeGetVersion(int * version) { *version = %d; return 0; }
"""


@pytest.mark.parametrize(
    ("driver", "version", "said"),
    [
        (12020, 13000, ["supports CUDA 12.2, and oallama needs CUDA 13; install NVIDIA's driver 580 or newer"]),
        (12020, 99000, ["supports CUDA 12.2, and oallama needs CUDA 99; install a newer driver"]),
        (13000, 13020, []),  # any driver of a major version runs that of all its minor ones
        (13010, 12080, []),
        (0, 13000, []),  # no driver
    ],
)
def test_a_driver_that_is_too_old_is_said(driver: int, version: int, said: list[str], tmp_path: Path) -> None:
    cuda = made_cuda(tmp_path / "toolkit", TOOLKIT)
    source = cuda[0].with_suffix(".c")
    source.write_text(source.read_text() + VERSIONS % (driver, version))
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{cuda[0].name}", str(source), "-o", str(cuda[0])], check=True
    )
    result = find(made_engine(tmp_path / "ours", cuda), CUDA_HOME=str(tmp_path / "toolkit"))
    assert result.returncode == 0, result.stderr
    assert [line.partition("NVIDIA's driver ")[2] for line in result.stderr.splitlines()] == said


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("libcudart.so.13", "pip install nvidia-cuda-runtime nvidia-cublas"),
        ("libcublas.so.12", "pip install nvidia-cuda-runtime-cu12 nvidia-cublas-cu12"),
        ("libnccl.so.2", "pip install nvidia-nccl-cu13"),
        ("libcuda.so.1", "needs NVIDIA's driver"),
    ],
)
def test_advice(name: str, wanted: str) -> None:
    assert _advice(name).startswith(f"{name} is missing: ") and _advice(name).endswith(wanted)


@pytest.mark.parametrize("layout", [ONE_FOLDER, FOLDER_EACH, TOOLKIT], ids=["cu13", "cu12", "toolkit"])
def test_the_runpath_of_the_build_finds_them_without_python(
    layout: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cmake/cuda_runpath.cmake in a project of its own: a program in bin/ starts with wheels or with the toolkit."""
    site = tmp_path / "site"
    root = tmp_path / "toolkit" if layout is TOOLKIT else site
    cudart, cublas = made_cuda(root, layout)
    # As NVIDIA's own, which looks beside itself and, in CUDA 12's wheels, for the runtime.
    runpath = "-Wl,-rpath,$ORIGIN:$ORIGIN/../../cuda_runtime/lib"
    compile_library(cublas.parent, cublas.name, [cudart, cublas.with_name(f"libcublasLt.so.{MAJOR}")], runpath)
    project = tmp_path / "project"
    project.mkdir()
    (project / "answer.c").write_text(
        "int libcudart(void); int libcublas(void); int answer(void) { return libcudart() + libcublas(); }\n"
    )
    (project / "main.c").write_text("int answer(void); int main(void) { return answer() != 42; }\n")
    (project / "CMakeLists.txt").write_text(f"""cmake_minimum_required(VERSION 3.21)
project(runpath LANGUAGES C)
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN;$ORIGIN/../lib")
include({ROOT}/cmake/cuda_runpath.cmake)
add_library(ggml-cuda SHARED answer.c)
target_link_libraries(ggml-cuda PRIVATE {cudart} {cublas})
target_link_options(ggml-cuda PRIVATE -Wl,--allow-shlib-undefined)
oallama_cuda_runpath(ggml-cuda {tmp_path}/toolkit/lib64/libcudart.so {tmp_path}/toolkit/lib64/libcublas.so)
add_executable(program main.c)
target_link_libraries(program PRIVATE ggml-cuda)
target_link_options(program PRIVATE -Wl,--allow-shlib-undefined)
install(TARGETS ggml-cuda LIBRARY DESTINATION oallama/lib)
install(TARGETS program RUNTIME DESTINATION oallama/bin)
""")
    build = project / "build"
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    for command in (
        ["cmake", "-S", project, "-B", build, "-DCMAKE_C_FLAGS=-L.", f"-DCMAKE_INSTALL_PREFIX={site}"],
        ["cmake", "--build", build, "--target", "install"],
        [site / "oallama/bin/program"],
    ):
        ran(*command)
