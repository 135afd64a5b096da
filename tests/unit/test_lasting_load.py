"""Which part of a CPU other programs need lastingly, from looks at the threads that run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import ran

A_PART = 0.1  # csrc/base/busy_cpus.cpp


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("load") / "lasting_load"
    source = ROOT / "tests/native/lasting_load.cpp"
    ran("c++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc/base'}", source, "-o", path)
    return path


def averages(program: Path, *looks: tuple[float, int]) -> list[float]:
    return [float(line) for line in ran(program, *(str(x) for look in looks for x in look)).stdout.split()]


def test_who_asks_and_then_waits_is_no_lasting_load(program: Path) -> None:
    """A client runs when its request comes, after a pause, and sleeps while the tokens are computed."""
    request = [(2.0, 1), *[(0.005, 0)] * 20]
    assert max(averages(program, *request * 5)) <= A_PART


@pytest.mark.parametrize("token_s", [0.002, 0.005, 0.02, 0.1])
def test_half_of_a_core_is_a_lasting_load(program: Path, token_s: float) -> None:
    looks = averages(program, *[(token_s, i % 2) for i in range(int(1 / token_s))])
    assert looks[-1] > A_PART and max(looks) < 0.6


def test_a_load_that_is_gone_is_forgotten(program: Path) -> None:
    *_, beside, after = averages(program, *[(0.005, 1)] * 400, (0.5, 0))
    assert beside > 0.9 and after == 0
