"""One rank of the all-reduce tests: `comm_worker.py JOB HOSTS FOLDER`, started by mpirun from test_comm.py.

HOSTS has one letter per rank, its host: "aab" are ranks 0 and 1 on host a and rank 2 on host b. Every rank writes what
it saw to FOLDER/RANK.json.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

from oallama.cluster.ranks.comm import DTYPES as CODES
from oallama.cluster.ranks.comm import AllReduce, CommError
from support.foreign_array import ForeignArray

JOB, HOSTS, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
N_HOSTS = len(set(HOSTS))
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
UNIT = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SIZES = (0, 1, 31, 33, 4097, 1_000_003)
ALGORITHMS = ("star", "tree", "exchange", "rabenseifner", "pipelined", "auto")
TIMEOUT = 4.0
Report = dict[str, Any]


def make_group(**options: Any) -> AllReduce:
    """A group of all ranks, on the hosts of the command line."""
    return AllReduce(host=HOSTS[RANK], **{"timeout_s": 30.0, **options})


@cache
def values(rank: int, n: int, dtype: str) -> np.ndarray:
    """What a rank puts in: magnitudes over four decades. Not to be changed."""
    generator = np.random.default_rng(1000 * n + rank)
    numbers = generator.standard_normal(n, dtype=np.float32) * np.exp2(generator.integers(-7, 7, n)).astype(np.float32)
    return numbers.astype(DTYPES[dtype])


def digest(array: np.ndarray) -> str:
    """Of the bits of an array."""
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


@cache
def exact(n: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sums over the ranks of the values, of their magnitudes, and of the largest magnitudes of blocks of 32."""
    every = [values(rank, n, dtype).astype(np.float64) for rank in range(SIZE)]
    largest = [np.pad(np.abs(one), (0, -n % 32)).reshape(-1, 32).max(axis=1) for one in every]
    blocks = np.repeat(sum(largest, np.zeros(-(-n // 32))), 32)[:n]
    return sum(every, np.zeros(n)), sum((np.abs(one) for one in every), np.zeros(n)), blocks


def worst(result: np.ndarray, dtype: str, wire: str) -> dict[str, float]:
    """The largest error over the bound that algorithms.h (q8: wire.h) states; the errors' norm over the sums'."""
    total, magnitude, largest = exact(result.size, dtype)
    error = np.abs(result.astype(np.float64) - total)
    steps = 2 + int(np.ceil(np.log2(N_HOSTS)))
    bound = (SIZE - 1) * 2.0**-24 * magnitude + steps * UNIT[dtype] * magnitude + (2.0**-24 if UNIT[dtype] else 1e-300)
    if wire == "q8" and N_HOSTS > 1:
        bound = bound + steps * 1.01 / 252 * largest
    if not result.size:
        return {"of_bound": 0.0, "relative": 0.0}
    norm = max(float(np.linalg.norm(total)), 1e-30)
    return {"of_bound": float(np.max(error / bound)), "relative": float(np.linalg.norm(error)) / norm}


def sums() -> Report:
    """Every algorithm, type and size, twice; f32 also through q8."""
    group = make_group()
    cases = [(a, d, n, "native") for a in ALGORITHMS for d in DTYPES for n in SIZES]
    cases += [(a, "float32", n, "q8") for a in ALGORITHMS if a != "star" for n in SIZES]
    report: Report = {"topology": str(group.topology)}
    for algorithm, dtype, n, wire in cases:
        mine = values(RANK, n, dtype)
        first, second = mine.copy(), mine.copy()
        group(first, algorithm, wire)
        group(second.reshape(1, -1), algorithm, wire, chunk_bytes=65536 if algorithm == "auto" else 0)
        report[f"{algorithm} {dtype} {n} {wire}"] = {
            "bits": [digest(first), digest(second)],
            **(worst(first, dtype, wire) if RANK == 0 else {}),
        }
    return report


def shapes() -> Report:
    """Chunks that do not divide the message, small areas that are reused and probed, many operations in a row."""
    group = make_group(area_bytes=64 * 1024)
    assert group.probe() == group.links
    report: Report = {}
    for algorithm in ALGORITHMS:
        for chunk in (0, 256, 4096, 65536):
            for n in (65536, 100_001):
                result = values(RANK, n, "float32").copy()
                group(result, algorithm, chunk_bytes=chunk)
                report[f"{algorithm} {chunk} {n}"] = {
                    "bits": [digest(result)],
                    **(worst(result, "float32", "native") if RANK == 0 else {}),
                }
    counter = np.zeros(7, np.float32)
    for i in range(300):
        once = np.full(7, RANK + i, np.float32)
        group(once, ALGORITHMS[i % len(ALGORITHMS)])
        counter += once
    return report | {"many": counter.tolist()}


def special() -> Report:
    """NaN and infinity come through, also through q8; buffers that are not numpy's; one value per rank."""
    group = make_group()
    report: Report = {}
    for wire in ("native", "q8"):
        x = np.ones(100, np.float32)
        if RANK == 0:
            x[3], x[50] = np.nan, np.inf
        group(x, "exchange", wire)
        report[wire] = [bool(np.isnan(x[3])), bool(np.isfinite(x[50])), float(x[99])]

    x = np.full((3, 5), RANK, np.float16)
    group(ForeignArray(x))
    report["dlpack"] = x.ravel().tolist()
    report["links"] = [group.probe().alpha, group.links.bandwidth, group.links.a, group.links.b]
    x = np.ones(5, np.float32)
    report["done"] = group(x).algorithm
    return report


def wrong() -> Report:
    """What a user can get wrong; nothing of it reaches the other ranks."""
    group = make_group()
    read_only = np.zeros(3, np.float32)
    read_only.flags.writeable = False
    calls: dict[str, Callable[[], Any]] = {
        "type": lambda: group(np.zeros(3)),
        "order": lambda: group(np.zeros(3, ">f4")),
        "strides": lambda: group(np.zeros((4, 4), np.float32)[:, 1]),
        "read-only": lambda: group(read_only),
        "no buffer": lambda: group([1.0, 2.0]),
        "algorithm": lambda: group(np.zeros(3, np.float32), "ring"),
        "wire": lambda: group(np.zeros(3, np.float32), wire="q4"),
        "q8 of halves": lambda: group(np.zeros(3, np.float16), wire="q8"),
        "q8 star": lambda: group(np.zeros(3, np.float32), "star", "q8"),
        "speed": lambda: make_group(speed=-1.0),
        "timeout": lambda: make_group(timeout_s=0.0),
        "area": lambda: make_group(area_bytes=4096 * (1 + RANK % 2)) if SIZE > 1 else None,
        "no area": lambda: make_group(area_bytes=0),
        "negative area": lambda: make_group(area_bytes=-1),
        "negative chunk": lambda: group(np.zeros(3, np.float32), chunk_bytes=-1),
    }
    report: Report = {name: error_of(call)["error"] for name, call in calls.items()}
    x = np.ones(3, np.float32)
    group(x)
    report["after"] = float(x[0])
    return report


def error_of(call: Callable[[], Any]) -> Report:
    """The error of a call, the rank it names, and how long it took."""
    since = time.monotonic()
    error, rank = "", None
    try:
        call()
    except CommError as raised:
        error, rank = str(raised), raised.rank
    return {"error": error, "rank": rank, "seconds": time.monotonic() - since}


def mismatch() -> Report:
    """Ranks that ask for different things, within a host and between hosts, with every algorithm."""
    report: Report = {}
    for algorithm in ALGORITHMS:
        for n in (10, 300_000):
            group = make_group(timeout_s=TIMEOUT)
            x = np.zeros(n + (RANK == SIZE - 1), np.float32)
            report[f"{algorithm} {n}, last rank"] = error_of(lambda g=group, x=x, a=algorithm: g(x, a))
            group = make_group(timeout_s=TIMEOUT)
            x = np.zeros(n + (HOSTS[RANK] == HOSTS[-1]), np.float32)
            report[f"{algorithm} {n}, last host"] = error_of(lambda g=group, x=x, a=algorithm: g(x, a))
    group = make_group(timeout_s=TIMEOUT)
    x = np.zeros(10, np.float16 if RANK == 0 else np.float32)
    report["type"] = error_of(lambda: group(x, "exchange"))
    group = make_group(timeout_s=TIMEOUT)
    y = np.zeros(0 if RANK == 0 else 10, np.float32)
    report["nothing"] = error_of(lambda: group(y, "exchange"))
    report["again"] = error_of(lambda: group(y, "exchange"))
    return report


def abort() -> Report:
    """A thread of the last rank ends what all are waiting for: rank 0 never comes."""
    group = make_group()
    if SIZE - 1 == RANK:
        threading.Timer(0.3, lambda: group.abort("changed its mind")).start()
    if RANK == 0:
        time.sleep(1.0)
    return error_of(lambda: group(np.zeros(10, np.float32)))


def no_memory() -> Report:
    """Rank 0 has no memory for what the star's other ranks send: 4 MiB each."""
    group = make_group()
    x = np.zeros(1 << 20, np.float32)
    if RANK == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
    return error_of(lambda: group(x, "star"))


def late() -> Report:
    """The last rank comes when the others have given up; what they then left to MPI is still used."""
    if SIZE - 1 == RANK:
        time.sleep(2.0)
    report = error_of(lambda: make_group(timeout_s=1.0))
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        MPI.COMM_WORLD.Iprobe()  # MPI goes on with what it has
    return report


def lost(victim: int, how: signal.Signals, algorithm: str, n: int) -> Report:
    """The victim dies or stops in the middle of a stream of operations."""
    group = make_group(timeout_s=TIMEOUT)
    x = np.zeros(n, np.float32)
    group(x, algorithm)
    if victim == RANK:
        (FOLDER / "victim").write_text(str(os.getpid()))
        threading.Timer(0.2, lambda: os.kill(os.getpid(), how)).start()
    since = time.monotonic()
    report = error_of(lambda: [group(x, algorithm) for _ in range(10**9)])
    report["seconds"] = time.monotonic() - since
    return report


class Options(ctypes.Structure):
    """oa_comm_options."""

    _fields_ = (
        ("host", ctypes.c_char_p),
        ("speed", ctypes.c_double),
        ("timeout", ctypes.c_double),
        ("silence", ctypes.c_double),
        ("area", ctypes.c_size_t),
    )


class Native:
    """A group through oa_comm.h; `reason` when there is none."""

    def __init__(self, timeout: float, silence: float = 0.0) -> None:
        from oallama import _comm

        self.library = ctypes.CDLL(str(Path(_comm.__file__).parent / "lib" / "liboallama_comm.so"))
        self.library.oa_comm_create.restype = ctypes.c_void_p
        self.library.oa_comm_error.restype = ctypes.c_char_p
        reason = ctypes.create_string_buffer(200)
        options = Options(HOSTS[RANK].encode(), 1.0 + RANK, timeout, silence, 0)
        made = self.library.oa_comm_create(None, ctypes.byref(options), reason, ctypes.c_size_t(200))
        self.comm = ctypes.c_void_p(made)
        self.reason = reason.value.decode()

    def open_device(self, device: str | None, eager: bool = False) -> int:
        name = device.encode() if device is not None else None
        code: int = self.library.oa_comm_open_device(self.comm, ctypes.c_char_p(name), int(eager))
        return code

    def allreduce_device(self, address: int, like: np.ndarray, algorithm: int = 0, wire: int = 0) -> int:
        """Values in device memory, of the type and number of `like`."""
        values, n = ctypes.c_void_p(address), ctypes.c_size_t(like.size)
        dtype = CODES[like.dtype.name]
        code: int = self.library.oa_comm_allreduce_device(self.comm, values, dtype, n, algorithm, wire, None)
        return code

    def abort(self, why: str) -> None:
        self.library.oa_comm_abort(self.comm, ctypes.c_char_p(why.encode()))

    def allreduce(self, x: np.ndarray, algorithm: int = 0, wire: int = 0) -> int:
        values, n = ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(x.size)
        code: int = self.library.oa_comm_allreduce(self.comm, values, CODES[x.dtype.name], n, algorithm, wire)
        return code

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Within the block a thread shows that this process lives."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(0.1):
                self.library.oa_comm_beat(self.comm)

        heart = threading.Thread(target=beat)
        heart.start()
        try:
            yield
        finally:
            ended.set()
            heart.join()

    def error(self) -> str:
        text: bytes = self.library.oa_comm_error(self.comm)
        return text.decode()


def c_abi() -> Report:
    """The same through oa_comm.h."""
    group = Native(30.0)
    x = np.arange(50, dtype=np.float32)
    report = {
        "rank": group.library.oa_comm_rank(group.comm),
        "size": group.library.oa_comm_size(group.comm),
        "code": group.allreduce(x),
        "sum": float(x[49]),
        "probe": group.library.oa_comm_probe(group.comm),
        "wrong": group.allreduce(x, 99),
        "error": group.error(),
    }
    group.library.oa_comm_free(group.comm)
    return report | {"reason": Native(float("inf")).reason}


def stuck() -> Report:
    """The threads of all ranks beat. The last rank computes for most of the timeout, then for longer."""
    group = Native(TIMEOUT, 0.5)
    codes, x = [], np.ones(1_000_003, np.float32)  # so many that every rank sums a slice, for which it needs the last
    with group.beating():
        for share in (0.75, 1.5):
            if SIZE - 1 == RANK:
                time.sleep(share * TIMEOUT)
            since = time.monotonic()
            codes.append(group.allreduce(x))
        seconds = time.monotonic() - since
    return {"codes": codes, "sum": float(x[49]), "error": group.error(), "seconds": seconds}


def leave(report: Report, n_left: int) -> None:
    """After a failure MPI cannot be finalised, so nobody does; those who leave are dead for who is in an operation."""
    (FOLDER / f"{RANK}.json").write_text(json.dumps(report))
    until = time.monotonic() + 20
    while time.monotonic() < until and len(list(FOLDER.glob("*.json"))) < n_left:
        time.sleep(0.05)
    os._exit(0)


def main() -> None:
    """Run the job."""
    job, *arguments = JOB.split(":")
    if job == "lost":
        victim, how, algorithm, n = arguments
        report = lost(int(victim), signal.Signals[how], algorithm, int(n))
    else:
        jobs = (sums, shapes, special, wrong, mismatch, abort, no_memory, late, c_abi, stuck)
        report = {function.__name__: function for function in jobs}[job]()
    if job in ("mismatch", "abort", "no_memory", "late", "stuck", "lost"):
        leave(report, SIZE - (job == "lost"))
    (FOLDER / f"{RANK}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
