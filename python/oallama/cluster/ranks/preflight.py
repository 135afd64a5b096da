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

from oallama.base.environment import RANK_FOLDER, RANK_MEMORY
from oallama.data.operators import OperatorGraph

from .disk import read_rate
from .rank import MINIMAL, OURS, RANK_KERNELS
from .shards import check_splits

SAMPLES, SAMPLE_BYTES = 64, 1 << 16
HEADER_BYTES = 4 << 20
PROBE_S = 0.5  # most seconds of one timing
TURNS, TURN_S = 5, 0.15  # how often a matrix is timed beside the other ranks and while they wait, most seconds of each
PROMPT = 32  # tokens, where kernels for many columns are compared
SUMS_S, LEAST_BATCHES, BATCH = 0.5, 3, 8  # seconds of one size of sums, least batches of it, sums of a batch
PIECE_BYTES = 16 << 20  # that ranks read between two sums


def file_fingerprint(path: Path) -> dict[str, Any]:
    """Size and a hash of the header and of 64 places all over the file: other weights or a cut-off copy differ."""
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        found.update(file.read(HEADER_BYTES))
        for i in range(SAMPLES):
            file.seek(max(0, (size - SAMPLE_BYTES) * i // (SAMPLES - 1)))
            found.update(file.read(SAMPLE_BYTES))
    return {"nbytes": size, "sha256": found.hexdigest()}


def rank_seconds(
    graph: OperatorGraph,
    device: str,
    n_threads: int,
    kernels: str,
    n_tokens: int = 1,
    most_s: float = PROBE_S,
    which: str = "best_s",
) -> float | None:
    """Seconds of the model's largest matrix, by ggml's kernels or ours ("oallama"): the shortest of several times.

    What disturbs one of two ranks for a moment would else count as a difference between them. None where there is no
    memory to measure that, or no kernel. which: "median_s" for the median.
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
        return float(bench.mul_mat(weight.type, k, m, n_tokens, n_expert, used, most_s, **realisation)[which])
    except MemoryError:
        return None


def rank_slowdown(graph: OperatorGraph | None, device: str, n_threads: int, kernels: str, comm: Any) -> float | None:
    """How many times as long the matrix takes while all ranks compute: the median of several turns.

    In each turn all compute, then one after another, so that a machine that drifts does so for both. None where it
    cannot be measured. Without a graph this rank only waits for the others.
    """

    def turn() -> float | None:
        if graph is None:
            return None
        return rank_seconds(graph, device, n_threads, kernels, most_s=TURN_S, which="median_s")

    found = []
    for _ in range(TURNS):
        comm.Barrier()
        together, alone = turn(), None
        for rank in range(comm.size):
            comm.Barrier()
            alone = turn() if rank == comm.rank else alone
        if together and alone:
            found.append(together / alone)
    return statistics.median(found) if found else None


def report(path: Path, device: str, n_threads: int, comm: Any, *, slowdown: bool) -> dict[str, Any]:
    """This rank's report; "error" instead of what could not be found out.

    slowdown: whether it says how much slower a rank is beside the others.
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
    if RANK_MEMORY.get() == MINIMAL:
        comm.Barrier()  # ranks of a host share its disk
        found["disk"] = read_rate(Path(RANK_FOLDER.get() or "/var/tmp"))
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
    if slowdown:
        usable = None if "error" in found else graph
        found["slower"] = {name: rank_slowdown(usable, device, n_threads, name, comm) for name in RANK_KERNELS}
    return found


def sum_seconds(comm: Any, sizes: list[int]) -> list[tuple[int, float]]:
    """(bytes, seconds) of an all-reduce of each size between computations: the median of several, the slowest rank's.

    Ranks compute for about as long as a piece of a layer takes, sum, and so on: whoever is done first waits, and the
    network has been quiet meanwhile. What the same computations take without sums is subtracted.
    """
    import numpy as np
    from mpi4py import MPI

    from .comm import AllReduce

    group = AllReduce(comm)
    group.probe()
    weights = np.ones(PIECE_BYTES // 4, np.float32)

    def batch(values: Any) -> float:
        comm.Barrier()
        begin = time.perf_counter()
        for _ in range(BATCH):
            weights.sum()
            if values is not None:
                group(values)
        return float(comm.allreduce(time.perf_counter() - begin, op=MPI.MAX)) / BATCH

    found = []
    for nbytes in sizes:
        values, alone, summed = np.zeros(max(1, nbytes // 4), np.float32), list[float](), list[float]()
        end = time.monotonic() + SUMS_S
        while len(summed) < LEAST_BATCHES or comm.bcast(time.monotonic() < end):
            alone.append(batch(None))
            summed.append(batch(values))
        found.append((nbytes, max(1e-6, statistics.median(summed) - statistics.median(alone))))
    return found


def main() -> None:
    from mpi4py import MPI

    path, device, threads, out, *sizes = sys.argv[1:]
    comm = MPI.COMM_WORLD
    own = report(Path(path), device, int(threads.split(",")[comm.rank]), comm, slowdown=bool(sizes))
    if sizes and comm.allreduce("error" not in own, op=MPI.LAND):
        own["sums"] = sum_seconds(comm, [int(size) for size in sizes])
    reports = comm.gather(own, root=0)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
