"""All-reduce of values in device memory, inside one host: the CUDA stage against staging through host memory.

python bench/device_allreduce.py [--ranks 2,4] [--sizes 8K,..,16M] [--repeats 5] [--device cuda] [-o FILE.jsonl]

Ranks are processes under mpirun, one after the other on the GPUs there are: with one GPU all share it, so the time of a
sum includes the GPU's turning from process to process. Both ways alternate; a sample is the mean of 20 back-to-back
operations on the slowest rank. One JSON line per number of ranks and bytes. `--device cpu` rehearses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests" / "device_worker.py"
SIZES = "8K,16K,64K,256K,1M,4M,16M"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default=SIZES, help="bytes of float32 (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "python"), str(ROOT / "bench")]
    from allreduce import parse_size

    from oallama.bench.machine import describe, save_lines

    machine = describe(sys.argv)
    sizes = ",".join(str(parse_size(text)) for text in options.sizes.split(","))
    print("ranks   bytes   device ms   staged ms   staged/device")
    lines = []
    for n_ranks in map(int, options.ranks.split(",")):
        for cell in measure(n_ranks, f"times:{options.device}:{sizes}:{options.repeats}"):
            device, staged = (statistics.median(cell[name]) for name in ("device_s", "staged_s"))
            times = f"{device * 1e3:11.3f} {staged * 1e3:11.3f} {staged / device:15.2f}"
            print(f"{n_ranks:5} {cell['n_bytes'] // 1024:6}K {times}")
            lines.append({"ranks": n_ranks, "device": options.device, **cell, "machine": machine})
    if options.out:
        save_lines(lines, options.out)


def measure(n_ranks: int, job: str) -> list[dict[str, Any]]:
    """The cells of one mpirun."""
    from oallama.cluster.ranks import mpi

    with tempfile.TemporaryDirectory() as folder:
        worker = (sys.executable, str(WORKER), job, "a" * n_ranks, folder)
        flags = ("--mca", "mpi_yield_when_idle", "1")
        command = mpi.mpirun([mpi.Host("localhost", n_ranks)], worker, {"OPENBLAS_NUM_THREADS": "1"}, flags=flags)
        done = subprocess.run(command, env=mpi.environment(), capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            sys.exit(f"{n_ranks} ranks failed:\n{done.stdout}{done.stderr}")
        cells: list[dict[str, Any]] = json.loads((Path(folder) / "0.json").read_text())
        return cells


if __name__ == "__main__":
    main()
