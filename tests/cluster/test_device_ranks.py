"""Sums in device memory between ranks, on the CPU's device everywhere and on NVIDIA GPUs where there are any.

Several ranks share one GPU when there are fewer. "eager": they look for each other's flags on the device all the same,
which is what ranks on different GPUs do.
"""

from __future__ import annotations

from functools import partial

import pytest

from oallama.engine import device_list
from support.mpi_ranks import SURVIVE, Ranks

pytestmark = pytest.mark.alone
NO_CUDA = pytest.mark.skipif(
    not any(d.backend == "CUDA" for d in device_list.devices()), reason="no CUDA device on this machine"
)
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])]
MODES = ["", "eager"]
TIMEOUT = 4.0

on_devices = pytest.mark.parametrize("device", DEVICES)
in_modes = pytest.mark.parametrize("mode", MODES, ids=["shared", "eager"])


@pytest.fixture
def run(ranks: Ranks) -> Ranks:
    return partial(ranks, program="support.device_worker", limit=120.0)


@pytest.mark.slow
@on_devices
@in_modes
@pytest.mark.parametrize("hosts", ["aa", "aaaa", "ab", "aaabbc"])
def test_bits_are_those_of_host_memory(run: Ranks, device: str, mode: str, hosts: str) -> None:
    """Every algorithm, type and size: the same bits on all ranks, and as through host memory."""
    reports = run(f"sums:{device}:{mode}", hosts)
    for report in reports.values():
        assert report.pop("many") == [sum(rank + i for rank in range(len(hosts))) for i in range(200)]
    for case, (codes, found, expected, error) in reports[0].items():
        assert (codes, error) == ([0, 0], ""), case
        assert found == expected, case
        assert {report[case][1] for report in reports.values()} == {found}, case


@on_devices
@in_modes
def test_mismatch(run: Ranks, device: str, mode: str) -> None:
    """Ranks at different operations: an error on all, no group works after it."""
    for report in run(f"mismatch:{device}:{mode}", "aaa", *SURVIVE).values():
        for case, found in report.items():
            assert found["codes"] == [-1], case
            assert ("make a new one" if "again" in case else "not at the same operation") in found["error"], case


@on_devices
@in_modes
def test_abort(run: Ranks, device: str, mode: str) -> None:
    for report in run(f"abort:{device}:{mode}", "aaa", *SURVIVE).values():
        assert "aborted by rank 2: changed its mind" in report["error"] and report["seconds"] < 2


@on_devices
@in_modes
def test_a_rank_that_does_not_come(run: Ranks, device: str, mode: str) -> None:
    """It is named after the timeout of 4 s."""
    for rank, report in run(f"stuck:{device}:{mode}", "aaa", *SURVIVE).items():
        assert "rank 2 of host a" in report["error"] and "is alive but has not come for 4." in report["error"]
        assert rank == 2 or TIMEOUT - 0.2 <= report["seconds"] < TIMEOUT + 1.5


@on_devices
@pytest.mark.parametrize(
    "mode", [pytest.param("", id="shared", marks=pytest.mark.slow), pytest.param("eager", id="eager")]
)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("hosts", "victim"), [("aaa", 1), ("aabb", 0)])
def test_lost_rank(run: Ranks, device: str, mode: str, how: str, hosts: str, victim: int) -> None:
    """A rank that dies or stops (of two hosts: an LM) is named by the others within the timeout of 4 s."""
    for report in run(f"lost:{device}:{mode}:{victim}:{how}", hosts, *SURVIVE, missing=victim).values():
        assert f"rank {victim} " in report["error"], report["error"]
        assert report["seconds"] < 0.2 + TIMEOUT + 2.0


@on_devices
def test_refused(run: Ranks, device: str) -> None:
    """A rank that has no device: everybody is told why, and host memory still works."""
    for report in run(f"refused:{device}:", "aab").values():
        assert report["none"] == [-1, "rank 2: its values are in host memory"]
        assert report["unknown"][0] == -1 and report["unknown"][1].startswith("rank 2: ")
        assert "CUDA" in report["unknown"][1]
        assert report["sum"] == [-1, "values in device memory need open_device() first", 0, 3.0]
        assert report["then"][:2] == [0, -1] and "opened its devices before" in report["then"][2]
