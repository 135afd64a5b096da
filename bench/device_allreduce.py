"""All-reduce of values in device memory, inside one host: the CUDA stage against staging through host memory.

python bench/device_allreduce.py [--ranks 2,4] [--sizes 8K,..,16M] [--repeats 5] [--device cuda] [-o FILE.jsonl]

Ranks are processes under mpirun, one after the other on the GPUs there are: with one GPU all share it, so the time of a
sum includes the GPU's turning from process to process. Both ways alternate; a sample is the mean of 20 back-to-back
operations on the slowest rank. One JSON line per number of ranks and bytes. `--device cpu` rehearses.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allreduce import parse_size

from oallama.bench.machine import REPOSITORY, describe
from oallama.bench.script import arguments, numbers, record
from oallama.cluster.ranks import mpi

SIZES = "8K,16K,64K,256K,1M,4M,16M"


def main() -> None:
    parser = arguments(__doc__, "device-allreduce")
    parser.add_argument("--ranks", type=numbers, default=(2, 4))
    parser.add_argument("--sizes", default=SIZES, help="bytes of float32 (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    sizes = ",".join(str(parse_size(text)) for text in options.sizes.split(","))
    lines = measured(options.ranks, options.device, f"times:{options.device}:{sizes}:{options.repeats}")
    record(lines, options.out, each={"machine": describe()}, quiet=True)


def measured(ranks: tuple[int, ...], name: str, job: str) -> Iterator[dict[str, Any]]:
    print("ranks   bytes   device ms   staged ms   staged/device")
    for n_ranks in ranks:
        for cell in measure(n_ranks, job):
            device, staged = (statistics.median(cell[name]) for name in ("device_s", "staged_s"))
            times = f"{device * 1e3:11.3f} {staged * 1e3:11.3f} {staged / device:15.2f}"
            print(f"{n_ranks:5} {cell['n_bytes'] // 1024:6}K {times}")
            yield {"ranks": n_ranks, "device": name, **cell}


def measure(n_ranks: int, job: str) -> list[dict[str, Any]]:
    """The cells of one mpirun."""
    with tempfile.TemporaryDirectory() as folder:
        worker = (sys.executable, "-m", "support.device_worker", job, "a" * n_ranks, folder)
        flags = ("--mca", "mpi_yield_when_idle", "1")
        variables = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY / "tests")}
        command = mpi.mpirun([mpi.Host("localhost", n_ranks)], worker, variables, flags=flags)
        done = subprocess.run(command, env=mpi.environment(), capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            sys.exit(f"{n_ranks} ranks failed:\n{done.stdout}{done.stderr}")
        cells: list[dict[str, Any]] = json.loads((Path(folder) / "0.json").read_text())
        return cells


if __name__ == "__main__":
    main()
