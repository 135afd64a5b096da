"""What a machine, or a control group on it, still has for programs."""

from __future__ import annotations

from pathlib import Path

from oallama.base.host_memory import available_bytes

KIB = 1024


def machine(root: Path, available_kib: int, group: str = "/") -> Path:
    for folder in ("proc/self", "sys/fs/cgroup"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 9000 kB\nMemAvailable:   {available_kib} kB\n")
    (root / "proc/self/cgroup").write_text(f"1:name=systemd:/old\n0::{group}\n")
    return root


def limited(root: Path, group: str, limit: str, used: int, of_files: int) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {of_files - 3}\nactive_file 3\nslab 9\n")


def test_of_the_machine(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, 700)) == 700 * KIB
    assert available_bytes(tmp_path / "nowhere") is None


def test_of_a_control_group(tmp_path: Path) -> None:
    """The one with the least room counts, of all that the process is in."""
    machine(tmp_path, 700, "/slice/unit")
    limited(tmp_path, "slice/unit", "max", 10, 5)
    assert available_bytes(tmp_path) == 700 * KIB
    limited(tmp_path, "slice", "500000", 400_000, 30_000)
    assert available_bytes(tmp_path) == 130_000
    limited(tmp_path, "slice/unit", "300000", 400_000, 1000)
    assert available_bytes(tmp_path) == 0
    machine(tmp_path, 700, "/elsewhere")
    assert available_bytes(tmp_path) == 700 * KIB


def test_of_this_machine() -> None:
    found = available_bytes()
    assert found is not None and 0 <= found < 1 << 50
