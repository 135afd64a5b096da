"""What Linux tells of heat, clocks and short memory, read from folders that look like its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from oallama.profiling.slowdowns import Slowdowns, frequency


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_counts_of_all_cpus_and_the_time_that_some_program_waited(tmp_path: Path) -> None:
    write(tmp_path, {
        "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "3\n",
        "sys/devices/system/cpu/cpu11/thermal_throttle/core_throttle_count": "4\n",
        "sys/devices/system/cpu/cpufreq/thermal_throttle/core_throttle_count": "100\n",  # is no CPU
        "proc/pressure/memory": "some avg10=1.00 avg60=0.50 avg300=0.10 total=2500000\n"
                                "full avg10=0.00 avg60=0.00 avg300=0.00 total=1000000\n",
    })  # fmt: skip
    found = Slowdowns.now(tmp_path)
    assert (found.throttled, found.memory_stall_s) == (7, 2.5)
    assert Slowdowns(7, 3.5, found.at_s + 4).memory_stall(found) == pytest.approx(0.25)


@pytest.mark.parametrize("files", [
    {},
    {"proc/pressure/memory": "", "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": ""},
    {"proc/pressure/memory": "some total=", "sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count": "?"},
], ids=["none", "empty", "odd"])  # fmt: skip
def test_a_machine_that_does_not_tell(tmp_path: Path, files: dict[str, str]) -> None:
    write(tmp_path, files)
    found = Slowdowns.now(tmp_path)
    assert (found.throttled, found.memory_stall_s) == (0, 0.0)
    assert found.memory_stall(found) == 0.0 and frequency(tmp_path) is None


def test_clocks_as_a_share_of_the_highest(tmp_path: Path) -> None:
    write(tmp_path, {
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "1000000",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "4000000",
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "3000000",
        "sys/devices/system/cpu/cpu1/cpufreq/cpuinfo_max_freq": "4000000",
    })  # fmt: skip
    assert frequency(tmp_path) == 0.5
