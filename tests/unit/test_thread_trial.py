"""How many threads compute beside a program that needs a part of a CPU: what turns out to be faster."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import ran

SOURCES = (ROOT / "tests/native/thread_trial.cpp", ROOT / "csrc/base/thread_trial.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trial") / "thread_trial"
    ran("c++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc/base'}", *SOURCES, "-o", path)
    return path


def shares(program: Path, *arguments: float) -> list[list[float]]:
    """For each pair of milliseconds and each kind of graph the share of graphs that fewer threads computed."""
    lines = ran(program, *map(str, arguments)).stdout.splitlines()
    return [[float(share) for share in line.split()] for line in lines]


def test_what_is_faster_computes(program: Path) -> None:
    assert shares(program, 8.8, 6.6)[0][0] > 0.9
    assert shares(program, 6.6, 8.8)[0][0] < 0.1


def test_a_difference_that_is_noise_changes_nothing(program: Path) -> None:
    assert shares(program, 5.0, 4.9)[0][0] < 0.1


def test_an_answer_that_changes_is_found(program: Path) -> None:
    """The first answer holds for two seconds at most."""
    ((before,), (after,)) = shares(program, 6.6, 8.8, 8.8, 6.6)
    assert before < 0.1 and after > 0.7


def test_kinds_have_answers_of_their_own(program: Path) -> None:
    (found,) = shares(program, 3, 5.0, 4.0)
    assert [share > 0.5 for share in found] == [True, False, True]
    assert all(share > 0.9 or share < 0.1 for share in found)


def test_more_kinds_than_are_remembered_have_all_threads(program: Path) -> None:
    assert {*shares(program, 40, 1.0, 1.0)[0]} == {0.0}


def test_after_a_pause_the_last_answer_goes_first(program: Path) -> None:
    assert [first for (first,) in shares(program, 8.8, 6.6, 0, 20e3, 6.6, 8.8, 0, 20e3)[1::2]] == [1.0, 0.0]


def test_long_graphs_are_not_tried(program: Path) -> None:
    assert shares(program, 150.0, 100.0)[0] == [0.0]
