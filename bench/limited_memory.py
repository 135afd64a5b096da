"""Ranks in less memory than their weights: time and disk reads of a token, against what the disk allows at best.

python bench/limited_memory.py [--model FILE.gguf] [--rounds 5] [--shares 0.5,0.75,1] [--out FILE]

Two ranks of one thread each, with --memory minimal, in a control group that limits memory and page cache. A share is
of the weights; what the programs take without weights is measured first and comes on top. Needs root and control
groups of version 1. Without --model: the paper's LLaMA-3B shape with 6 of 26 layers, Q8_0.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster import OALLAMA, paper_model
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.cluster.ranks.disk import read_rate

GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/blkio")
FOLDER = Path("/var/tmp")  # of the ranks' weights


@contextmanager
def group(limit: int | None) -> Iterator[list[Path]]:
    """Groups of memory and of disk accesses, the first with this limit in bytes."""
    made = [root / f"oallama-{os.getpid()}" for root in GROUPS]
    for folder in made:
        folder.mkdir()
    try:
        if limit:
            (made[0] / "memory.limit_in_bytes").write_text(str(limit))
        yield made
    finally:
        for folder in made:
            folder.rmdir()


def run(model: Path, n_generate: int, groups: list[Path]) -> dict[str, Any]:
    """What ranks in these groups say, and the bytes that they read from disks."""

    def join() -> None:
        for folder in groups:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    command = [OALLAMA, "cluster", "run", str(model), "Once upon a time", "-n", "2", "--memory", "minimal", "--ctx"]
    command += ["256", "--n-generate", str(n_generate), "--temperature", "0", "--json", "--kernels", "oallama"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join, timeout=3600)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return dict(json.loads(done.stdout)) | {"read_bytes": read_bytes(groups[1]), "said": done.stderr.splitlines()}


def read_bytes(folder: Path) -> int:
    """Of all disks, by the group's processes so far."""
    lines = (folder / "blkio.throttle.io_service_bytes").read_text().splitlines()
    return sum(int(line.split()[2]) for line in lines if len(line.split()) == 3 and line.split()[1] == "Read")


def programs_bytes(model: Path) -> int:
    """What the programs take beside the page cache: the most that the group holds of it while ranks answer."""
    most = 0
    with group(None) as groups:

        def join() -> None:
            for folder in groups:
                (folder / "cgroup.procs").write_text(str(os.getpid()))

        command = [OALLAMA, "cluster", "run", str(model), "Once upon a time", "-n", "2", "--memory", "minimal"]
        command += ["--ctx", "256", "--n-generate", "100", "--temperature", "0", "--json", "--kernels", "oallama"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=join) as ranks:
            while ranks.poll() is None:
                stat = dict(line.split() for line in (groups[0] / "memory.stat").read_text().splitlines())
                most = max(most, int(stat["total_rss"]) + int(stat.get("total_shmem", 0)))
                time.sleep(0.05)
    return most


def cells(model: Path, shares: list[float], rounds: int, n_generate: int) -> Iterator[dict[str, Any]]:
    """One entry per share of the weights."""
    weights, programs = model.stat().st_size, programs_bytes(model)
    note(f"the programs take {programs >> 20} MiB")
    found: dict[float, dict[str, Any]] = {}
    for number in range(rounds):
        for share in shares:
            limit, rate = int(programs + share * weights), read_rate(FOLDER)
            with group(limit) as groups:
                first = run(model, 2, groups)
                both = run(model, 2 + n_generate, groups)
            # Loading and the first two tokens are in both.
            read = (both["read_bytes"] - 2 * first["read_bytes"]) / n_generate
            sample = {"tpot_s": both["tpot_s"], "read_bytes": read, "disk_bytes_s": rate, "said": both["said"]}
            entry = found.setdefault(
                share, {"share": share, "weights": weights, "programs": programs, "limit": limit, "samples": []}
            )
            entry["samples"].append(sample)
            note(f"round {number}, {share}: {sample}")
    for entry in found.values():
        for key in ("tpot_s", "read_bytes", "disk_bytes_s"):
            entry[f"median_{key}"] = statistics.median(sample[key] for sample in entry["samples"])
        missing = max(0.0, 1 - entry["share"]) * weights
        entry["floor_s"] = missing / entry["median_disk_bytes_s"]
        yield entry


def main() -> None:
    parser = arguments(__doc__, "limited-memory")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", default="0.5,0.75,1.2", help="of the weights that fit")
    parser.add_argument("--generate", type=int, default=8, help="tokens")
    options = parser.parse_args()
    shares = [float(share) for share in options.shares.split(",")]
    with tempfile.TemporaryDirectory(prefix="oallama-", dir="/var/tmp") as folder:
        model = options.model or paper_model(Path(folder) / "model.gguf", 6)
        record(cells(model, shares, options.rounds, options.generate), options.out, head=describe())


if __name__ == "__main__":
    main()
