"""What every rank says about itself before a model is spread: `mpirun ... python -m oallama.cluster.ranks.preflight`.

Rank 0 writes the reports of all ranks as one JSON list. shards.py judges them.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from oallama.data.operators import OperatorGraph

from .shards import check_splits

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
HEADER_BYTES = 4 << 20
PROBE_S = 0.5  # most seconds of one timing


def file_fingerprint(path: Path) -> dict[str, Any]:
    """Size and a hash of the header and of 64 places all over the file: other weights or a cut-off copy differ."""
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        found.update(file.read(HEADER_BYTES))
        for i in range(SAMPLES):
            file.seek(max(0, (size - SAMPLE_BYTES) * i // (SAMPLES - 1)))
            found.update(file.read(SAMPLE_BYTES))
    return {"nbytes": size, "sha256": found.hexdigest()}


def rank_seconds(graph: OperatorGraph, device: str, n_threads: int) -> float | None:
    """Seconds of the model's largest matrix at one token, while the other ranks measure theirs.

    None where there is no memory to measure that.
    """
    from oallama.engine import native

    largest = max(graph.targets(1), key=lambda op: graph.tensor[op.weight or ""].nbytes)
    weight = graph.tensor[largest.weight or ""]
    k, m, n_expert = (*weight.ne, 1, 1)[:3]
    bench = native.core().OpBench(device, n_threads, False, 0)
    used = max(1, largest.n_used)
    try:
        return float(bench.mul_mat(weight.type, k, m, 1, n_expert, used, PROBE_S)["median_s"])
    except MemoryError:
        return None


def report(path: Path, device: str, n_threads: int, barrier: Any) -> dict[str, Any]:
    """This rank's report; "error" instead of what could not be found out."""
    from oallama.engine import device_list, native
    from oallama.engine.load_settings import Settings
    from oallama.loading import autoplan

    found: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid()}
    try:
        core = native.core()
        found["engine"] = core.ENGINE_ID
        found["memory"] = core.host_memory() if device == "CPU" else device_list.device(device).memory_free
        found["model"] = file_fingerprint(path)
    except (OSError, ValueError) as err:
        found["error"] = str(err)
    barrier()
    if "error" not in found:
        try:
            graph = autoplan.read_graph(path, Settings(n_ctx=64), tiers=(1,))
            check_splits(graph, core.splits_architecture(graph.arch))
            found["seconds"] = rank_seconds(graph, device, n_threads)
        except (OSError, ValueError, RuntimeError) as err:
            found["error"] = str(err)
    return found


def main() -> None:
    from mpi4py import MPI

    path, device, n_threads, out = sys.argv[1:]
    comm = MPI.COMM_WORLD
    reports = comm.gather(report(Path(path), device, int(n_threads), comm.Barrier), root=0)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
