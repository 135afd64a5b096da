"""What every rank says about itself before a model is spread: `mpirun ... python -m oallama.cluster.ranks.preflight`.

Rank 0 writes the reports of all ranks as one JSON list. shards.py judges them. Where it is asked for them, the reports
have the seconds of sums over all ranks, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from oallama.data.operators import OperatorGraph

from .rank import OURS, RANK_KERNELS
from .shards import check_splits

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
HEADER_BYTES = 4 << 20
PROBE_S = 0.5  # most seconds of one timing
PROMPT = 32  # tokens, where kernels for many columns are compared
SUMS_S, LEAST_BATCHES, BATCH = 0.3, 3, 8  # seconds of one size of sums, least batches of it, sums of a batch


def file_fingerprint(path: Path) -> dict[str, Any]:
    """Size and a hash of the header and of 64 places all over the file: other weights or a cut-off copy differ."""
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        found.update(file.read(HEADER_BYTES))
        for i in range(SAMPLES):
            file.seek(max(0, (size - SAMPLE_BYTES) * i // (SAMPLES - 1)))
            found.update(file.read(SAMPLE_BYTES))
    return {"nbytes": size, "sha256": found.hexdigest()}


def rank_seconds(graph: OperatorGraph, device: str, n_threads: int, kernels: str, n_tokens: int = 1) -> float | None:
    """Seconds of the model's largest matrix, by ggml's kernels or ours ("oallama").

    None where there is no memory to measure that, or no kernel.
    """
    from oallama.engine import native

    largest = max(graph.targets(1), key=lambda op: graph.tensor[op.weight or ""].nbytes)
    weight = graph.tensor[largest.weight or ""]
    k, m, n_expert = (*weight.ne, 1, 1)[:3]
    bench = native.core().OpBench(device, n_threads, False, 0)
    used = max(1, largest.n_used)
    realisation = {}
    if kernels == OURS:
        if not native.core().tiles(device, weight.type):
            return None
        realisation = {"realisation": "tiled"}
    try:
        return float(bench.mul_mat(weight.type, k, m, n_tokens, n_expert, used, PROBE_S, **realisation)["median_s"])
    except MemoryError:
        return None


def report(path: Path, device: str, n_threads: int, comm: Any, *, alone: bool) -> dict[str, Any]:
    """This rank's report; "error" instead of what could not be found out.

    alone: whether the matrix is timed once more, while the other ranks wait.
    """
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
    graph = None
    comm.Barrier()
    if "error" not in found:
        try:
            graph = autoplan.read_graph(path, Settings(n_ctx=64), tiers=(1,))
            check_splits(graph, core.splits_architecture(graph.arch))
            found["kernels"] = {name: rank_seconds(graph, device, n_threads, name) for name in RANK_KERNELS}
            found["prompt"] = {name: rank_seconds(graph, device, n_threads, name, PROMPT) for name in RANK_KERNELS}
        except (OSError, ValueError, RuntimeError) as err:
            found["error"] = str(err)
    for rank in range(comm.size if alone else 0):
        comm.Barrier()
        if rank == comm.rank and graph and "error" not in found:
            found["alone"] = {name: rank_seconds(graph, device, n_threads, name) for name in RANK_KERNELS}
    return found


def sum_seconds(comm: Any, sizes: list[int]) -> list[tuple[int, float]]:
    """(bytes, seconds) of an all-reduce of each size, as the ranks do it: the median of several, the slowest rank's.

    They are timed several at a time, one after the other. After a barrier ranks do not begin at once but up to a
    message's time apart, and whoever begins first would count that, too.
    """
    import numpy as np
    from mpi4py import MPI

    from .comm import AllReduce

    group = AllReduce(comm)
    group.probe()
    found = []
    for nbytes in sizes:
        values, times = np.zeros(max(1, nbytes // 4), np.float32), list[float]()
        end = time.monotonic() + SUMS_S
        while len(times) < LEAST_BATCHES or comm.bcast(time.monotonic() < end):
            comm.Barrier()
            begin = time.perf_counter()
            for _ in range(BATCH):
                group(values)
            times.append(comm.allreduce(time.perf_counter() - begin, op=MPI.MAX) / BATCH)
        found.append((nbytes, statistics.median(times)))
    return found


def main() -> None:
    from mpi4py import MPI

    path, device, threads, out, *sizes = sys.argv[1:]
    comm = MPI.COMM_WORLD
    own = report(Path(path), device, int(threads.split(",")[comm.rank]), comm, alone=bool(sizes))
    if sizes and comm.allreduce("error" not in own, op=MPI.LAND):
        own["sums"] = sum_seconds(comm, [int(size) for size in sizes])
    reports = comm.gather(own, root=0)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
