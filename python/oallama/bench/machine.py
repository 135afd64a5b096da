"""The machine and the code a measurement belongs to: hardware, versions, commit; and what a process used of it."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from oallama.base.proc_file import fields
from oallama.base.processor import processor

PACKAGES = ("oallama", "numpy")
GPU_QUERY = "name,memory.total,driver_version,pcie.link.gen.max,pcie.link.width.max,power.limit,clocks.max.sm"
# Variables that change how an engine runs; a report without them could not be repeated.
ENGINE_VARIABLES = ("GGML_", "CUDA_", "OMP_", "GOMP_", "OALLAMA_")
_PIN = "third_party/llama.cpp/pin.json"


def _checkout() -> Path:
    """Where this package lies in a checkout; for an installed one that of the program that runs, if it is in one."""
    own = Path(__file__).resolve().parents[3]
    of_program = Path(sys.argv[0]).resolve().parent.parent  # bench/*.py
    return of_program if not (own / _PIN).exists() and (of_program / _PIN).exists() else own


REPOSITORY = _checkout()


def describe(argv: list[str] | None = None) -> dict[str, Any]:
    """All of a report's lines have in common; argv: the command line that asked for it (default: this process's)."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "argv": [portable(argument) for argument in (sys.argv if argv is None else argv)],
        **repository(),
        "hardware": hardware(),
        "versions": versions(),
        "variables": {k: portable(v) for k, v in sorted(os.environ.items()) if k.startswith(ENGINE_VARIABLES)},
    }


def save_lines(lines: Iterable[dict[str, Any]], out: Path) -> None:
    """Write measurements as lines of JSON to a new file."""
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def portable(argument: str) -> str:
    """An argument (a path, or --option=path) without the place of the file: that says nothing to who reads a report.

    A path inside the checkout is given relative to it, any other absolute one by its name.
    """
    value = re.sub(r"^--[\w-]+=", "", argument)
    path = Path(value)
    if not path.is_absolute():
        return argument
    name = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path.name
    return f"{argument.removesuffix(value)}{name}"


def repository() -> dict[str, Any]:
    """Commit, dirty flag and pin; None each when oallama does not run from a checkout."""
    pin_file = REPOSITORY / _PIN
    if not pin_file.exists():  # installed: a repository around site-packages would be somebody else's
        return {"commit": None, "dirty": None, "pin": None}
    pin = json.loads(pin_file.read_text())
    bundle = REPOSITORY / "BUNDLE.json"  # scripts/bundle.sh leaves no .git
    if bundle.exists():
        packed = json.loads(bundle.read_text())
        return {
            "commit": packed["commit"],
            "dirty": packed["changed_files"] > 0,
            "pin": {"llama_cpp_python": pin["version"], "llama_cpp": pin["llama_cpp_commit"]},
        }
    # Results of other runs change nothing of this one.
    status = _output("git", "-C", str(REPOSITORY), "status", "--porcelain", "--", ".", ":!bench/results")
    return {
        "commit": _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "pin": {"llama_cpp_python": pin["version"], "llama_cpp": pin["llama_cpp_commit"]},
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def hardware() -> dict[str, Any]:
    """CPU, memory, GPUs, and the load average: a busy machine should be seen in the report."""
    cpu = processor()
    memory = fields(Path("/proc/meminfo")).get("MemTotal", "0").split()[0]
    return {
        "cpu": cpu.name,
        "cpu_numbers": cpu.numbers,
        "instructions": cpu.sets,
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "ram_bytes": int(memory) * 1024,
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, str]]:
    """NVIDIA GPUs as nvidia-smi describes them; empty without one."""
    text = _nvidia_smi(f"--query-gpu={GPU_QUERY}")
    names = GPU_QUERY.split(",")
    return [dict(zip(names, map(str.strip, row.split(",")), strict=False)) for row in (text or "").splitlines()]


def peak_rss_bytes(pid: int) -> int | None:
    """VmHWM of a live process: its largest resident set so far, pages of mapped files included."""
    value = fields(Path(f"/proc/{pid}/status")).get("VmHWM")
    return int(value.split()[0]) * 1024 if value else None


def gpu_process_bytes(pid: int) -> int | None:
    """GPU memory of a process by nvidia-smi, its CUDA context included; None if unknown (in a container, say)."""
    rows = (_nvidia_smi("--query-compute-apps=pid,used_memory") or "").splitlines()
    pairs = [[part.strip() for part in row.split(",")] for row in rows]
    used = [int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == str(pid) and pair[1].isdigit()]
    return sum(used) * 1024 * 1024 if used else None


def _nvidia_smi(query: str) -> str | None:
    return _output("nvidia-smi", query, "--format=csv,noheader,nounits") if shutil.which("nvidia-smi") else None


def _output(*command: str) -> str | None:
    """What a program prints, or None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
