"""The architectures of the package of CUDA: every GPU finds the code that ggml picks kernels for."""

from __future__ import annotations

import re
import sys

import pytest

from support.paths import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFINES = tomllib.loads((ROOT / "packages" / "cuda13" / "pyproject.toml").read_text())["tool"]["scikit-build"]["cmake"]
ARCHS = DEFINES["define"]["CMAKE_CUDA_ARCHITECTURES"].split(";")
PAGE = (ROOT / "docs" / "wheels.md").read_text()
# Compute capabilities of GPUs in x86-64 machines that CUDA 13.0 knows.
GPUS = (75, 80, 86, 89, 90, 100, 103, 120)


def loaded(gpu: int, archs: list[str]) -> tuple[int, str] | None:
    """What the driver takes: code of the same generation that is not newer, else the newest PTX, else nothing."""
    split = [(int(number), kind) for number, _, kind in (arch.partition("-") for arch in archs)]
    code = [n for n, kind in split if kind != "virtual" and n // 10 == gpu // 10 and n <= gpu]
    # ggml builds 12.0 for that very chip.
    code = [n for n in code if n < 120 or n == gpu]
    ptx = [n for n, kind in split if kind != "real" and n < 120 and n <= gpu]
    if code:
        return max(code), "code"
    return (max(ptx), "PTX") if ptx else None


def chosen(gpu: int, archs: list[str]) -> int:
    """The architecture that ggml picks kernels for: ggml_cuda_highest_compiled_arch."""
    return max(int(arch.partition("-")[0]) for arch in archs if int(arch.partition("-")[0]) <= gpu)


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_runs_the_kernels_that_ggml_picks(gpu: int) -> None:
    found = loaded(gpu, ARCHS)
    assert found is not None
    assert found[0] == chosen(gpu, ARCHS)


def test_mixtures_ask_for_the_compiled_architecture() -> None:
    """Their kernel's launch bounds are those of its code (patch 0027): 8.9 with code of 8.0 has those of 8.0."""
    source = (ROOT / "third_party/llama.cpp/patched/ggml/src/ggml-cuda/mmvq.cu").read_text()
    (body,) = re.findall(r"^int get_mmvq_mmid_max_batch\(.*?^}$", source, re.MULTILINE | re.DOTALL)
    asked = body.index("cc = ggml_cuda_highest_compiled_arch(cc);")
    assert not re.search(r"\bcc [<>=]=", body[:asked])


def test_ptx_of_an_older_generation_is_not_enough() -> None:
    """With 9.0 as code only, a GPU of 10.0 would translate PTX of 7.5 and be asked for kernels of 9.0."""
    archs = ["75-virtual", "80-real", "90-real"]
    assert loaded(100, archs) == (75, "PTX")
    assert chosen(100, archs) == 90


@pytest.mark.parametrize("gpu", GPUS)
def test_the_page_says_what_a_gpu_gets(gpu: int) -> None:
    number = f"{gpu // 10}.{gpu % 10}"
    (row,) = re.findall(rf"^\| [^|]*\b{re.escape(number)}\b[^|]*\|[^|]*\| ([^|]*) \|$", PAGE, re.MULTILINE)
    which, kind = loaded(gpu, ARCHS) or (0, "")
    if which == gpu:
        assert row == "own"
    else:
        assert row.startswith(f"{'PTX' if kind == 'PTX' else 'that'} of {which // 10}.{which % 10}")
