"""Ranks in less memory than their weights: time and disk reads of a token, against the disk's own speed.

python bench/limited_memory.py [--model FILE.gguf] [--rounds 5] [--shares 0.5,0.75,1] [--out FILE]

Two ranks of one thread each, with --memory minimal, in a control group that limits memory and page cache. A share is
of the weights; what the programs take without weights is measured first and comes on top. Reads are the whole disk's,
so nothing else may run. Needs root and control groups of version 1. Without --model: the paper's LLaMA-3B shape with 6
of 26 layers, Q8_0.
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

GROUPS = Path("/sys/fs/cgroup/memory")
FOLDER = Path("/var/tmp")  # of the ranks' weights


@contextmanager
def group(limit: int | None) -> Iterator[Path]:
    """A control group with this limit of memory in bytes."""
    made = GROUPS / f"oallama-{os.getpid()}"
    made.mkdir()
    try:
        if limit:
            (made / "memory.limit_in_bytes").write_text(str(limit))
        yield made
    finally:
        made.rmdir()


def ranks(model: Path, n_generate: int, group: Path, **pipes: Any) -> subprocess.Popen[str]:
    """Two ranks that answer, in the group."""
    command = [OALLAMA, "cluster", "run", str(model), "Once upon a time", "-n", "2", "--memory", "minimal", "--ctx"]
    command += ["256", "--n-generate", str(n_generate), "--temperature", "0", "--json", "--kernels", "oallama"]
    command += ["--split", "1,1"]
    return subprocess.Popen(command, text=True, preexec_fn=lambda: _join(group), **pipes)


def _join(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def run(model: Path, n_generate: int, group: Path) -> dict[str, Any]:
    """What ranks in this group say, and what was read from the disk meanwhile."""
    before = read_bytes()
    with ranks(model, n_generate, group, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        answer, said = process.communicate(timeout=3600)
    if process.returncode:
        raise SystemExit(said[-2000:])
    return dict(json.loads(answer)) | {"read_bytes": read_bytes() - before, "said": said.splitlines()}


def read_bytes() -> int:
    """Of the disk of the ranks' weights, by everybody, since the machine started."""
    device = os.stat(FOLDER).st_dev
    for line in Path("/proc/diskstats").read_text().splitlines():
        words = line.split()
        if (int(words[0]), int(words[1])) == (os.major(device), os.minor(device)):
            return 512 * int(words[5])
    raise SystemExit(f"the disk of {FOLDER} is not in /proc/diskstats")


def programs_bytes(model: Path) -> int:
    """The most memory that the group holds beside the page cache while ranks answer."""
    most = 0
    with group(None) as made, ranks(model, 100, made, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            stat = dict(line.split() for line in (made / "memory.stat").read_text().splitlines())
            most = max(most, int(stat["total_rss"]) + int(stat["total_shmem"]))
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
            with group(limit) as made:
                short, long = (run(model, n, made) for n in (2, 2 + n_generate))
            # Loading and the first two tokens are in both.
            read = (long["read_bytes"] - short["read_bytes"]) / n_generate
            sample = {"tpot_s": long["tpot_s"], "read_bytes": read, "disk_bytes_s": rate, "said": long["said"]}
            entry = found.setdefault(
                share, {"share": share, "weights": weights, "programs": programs, "limit": limit, "samples": []}
            )
            entry["samples"].append(sample)
            note(f"round {number}, {share}: {sample}")
    for entry in found.values():
        for key in ("tpot_s", "read_bytes", "disk_bytes_s"):
            entry[f"median_{key}"] = statistics.median(sample[key] for sample in entry["samples"])
        entry["read_s"] = entry["median_read_bytes"] / entry["median_disk_bytes_s"]
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
