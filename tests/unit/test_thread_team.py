"""Threads that compute and wait together (csrc/base/thread_team.h): they meet, they sleep, they survive a fork."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import busy_cpus, ran
from support.sanitizers import skip_without, without_random_addresses

SOURCES = [
    ROOT / "tests/native/team_threads.cpp",
    *(ROOT / "csrc/base" / f"{name}.cpp" for name in ("busy_cpus", "thread_team", "thread_waits")),
]
FLAGS = ["-std=c++17", "-O2", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc/base'}"]
OPENMP = ("OALLAMA_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("team") / "team_threads"
    ran("c++", *FLAGS, *SOURCES, "-o", path)
    return path


@pytest.fixture(autouse=True)
def _threads_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OPENMP:
        monkeypatch.delenv(name, raising=False)


def test_threads_see_what_others_wrote_before_a_barrier(program: Path) -> None:
    assert ran(program, "sums", "300").stdout == "0 wrong\n"


def test_a_barrier_is_needed(program: Path) -> None:
    assert subprocess.run([program, "unwaited", "300"], timeout=60, stdout=subprocess.DEVNULL).returncode == 1


def test_two_threads_on_one_cpu_sleep(program: Path) -> None:
    """2000 barriers: one that spins until the kernel takes its CPU away would wait for milliseconds at each."""
    assert int(ran(program, "one-cpu", "50").stdout) > 1500


def test_a_process_that_forks_goes_on(program: Path) -> None:
    ran(program, "fork", timeout=60)


def test_threads_are_bound_on_request(program: Path) -> None:
    own = sorted(os.sched_getaffinity(0))
    free = ran(program, "bound", "2").stdout.splitlines()
    assert [sorted(map(int, line.split())) for line in free] == [own, own]
    bound = ran(program, "bound", str(len(own)), env={"OALLAMA_BIND_THREADS": "1"}).stdout.split()
    assert bound == [*map(str, own)]


def test_cpus_that_others_need_are_not_free(program: Path) -> None:
    own = len(os.sched_getaffinity(0))
    if own != os.cpu_count():
        pytest.skip("the kernel counts threads on CPUs that are not ours, too")
    with busy_cpus(own):
        assert int(ran(program, "free").stdout) <= 0


def test_a_process_on_a_few_cpus_does_not_count_others(program: Path) -> None:
    few = subprocess.run(
        ["taskset", "-c", str(min(os.sched_getaffinity(0))), program, "free"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert int(few.stdout) > 1000 or os.cpu_count() == 1


@pytest.mark.parametrize(
    "variables",
    [{"OALLAMA_THREADS": "openmp"}, {"OMP_PROC_BIND": "true"}, {"GOMP_CPU_AFFINITY": "0"}],
    ids=lambda v: next(iter(v)),
)
def test_openmp_is_used_where_it_is_wanted(program: Path, variables: dict[str, str]) -> None:
    done = subprocess.run([program, "sums"], env=os.environ | variables, timeout=60, capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout == "OpenMP's threads are in use\n"


@pytest.mark.parametrize(("mode", "found"), [("sums", False), ("unwaited", True)])
def test_no_race_is_found(mode: str, found: bool, tmp_path: Path) -> None:
    skip_without("thread")
    ran("clang++", *FLAGS, "-g", "-fsanitize=thread", *SOURCES, "-o", tmp_path / "program")
    command = [*without_random_addresses(), tmp_path / "program", mode, "50"]
    env = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(command, env=env, timeout=120, capture_output=True, text=True)
    assert (done.returncode == 66 and "data race" in done.stderr) if found else (done.returncode == 0), done.stderr
