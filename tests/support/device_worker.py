"""One rank of the tests of sums in device memory: `device_worker.py JOB HOSTS FOLDER`, as comm_worker.py.

JOB is name:device[:more]; device: "cpu", or "cuda" (rank r takes device r modulo their number: ranks may share one).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from oallama.cluster.ranks.comm import ALGORITHMS, WIRES
from support.comm_worker import FOLDER, JOB, N_HOSTS, RANK, SIZE, TIMEOUT, Native, digest, leave, values

SIZES = (0, 1, 3, 4097, 150_001, 1_500_001)  # the last two: slices; several pieces
SPECIAL = np.array([-0.0, 1e-45, -3e-40, 6e-8, -1e-5, 65504, 1e38, np.inf], np.float32)
KINDS = ("float32", "float16", "bfloat16")


class CpuMemory:
    """The CPU's device memory is ordinary memory."""

    name = "cpu"

    def __init__(self, array: np.ndarray) -> None:
        self.array = array.copy()
        self.address = self.array.ctypes.data

    def write(self, array: np.ndarray) -> None:
        self.array[:] = array

    def read(self) -> np.ndarray:
        return self.array

    def free(self) -> None:
        """Nothing to do."""


class CudaMemory:
    """A copy of an array on this rank's GPU."""

    runtime: Any = None
    name = ""

    @classmethod
    def start(cls) -> None:
        """The CUDA runtime, from wherever it is."""
        names = ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "/usr/local/cuda/lib64/libcudart.so")
        for name in names:
            try:
                cls.runtime = ctypes.CDLL(name)
                break
            except OSError:
                continue
        count, address = ctypes.c_int(), ctypes.create_string_buffer(32)
        cls.check(cls.runtime.cudaGetDeviceCount(ctypes.byref(count)))
        cls.check(cls.runtime.cudaSetDevice(RANK % count.value))
        cls.check(cls.runtime.cudaDeviceGetPCIBusId(address, 32, RANK % count.value))
        cls.name = address.value.decode()

    @staticmethod
    def check(code: int) -> None:
        assert code == 0, f"CUDA error {code}"

    def __init__(self, array: np.ndarray) -> None:
        self.like = array
        pointer = ctypes.c_void_p()
        self.check(self.runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(array.nbytes)))
        self.address = int(pointer.value or 0)
        self.write(array)

    def write(self, array: np.ndarray) -> None:
        """Complete when it returns: cudaMemcpy from ordinary memory is not, for streams like those of a group."""
        self.copy(self.address, array.ctypes.data, array.nbytes)
        self.check(self.runtime.cudaDeviceSynchronize())

    def copy(self, to: int, source: int, n_bytes: int) -> None:
        n = ctypes.c_size_t(n_bytes)
        self.check(self.runtime.cudaMemcpy(ctypes.c_void_p(to), ctypes.c_void_p(source), n, 4))  # whichever direction

    def read(self) -> np.ndarray:
        array = np.empty_like(self.like)
        self.copy(array.ctypes.data, self.address, array.nbytes)
        return array

    def free(self) -> None:
        self.check(self.runtime.cudaFree(ctypes.c_void_p(self.address)))


def memory_of(device: str) -> Any:
    """The class of that device's memory."""
    if device == "cuda":
        CudaMemory.start()
    return CudaMemory if device == "cuda" else CpuMemory


def make_group(memory: Any, eager: bool = False, timeout: float = 30.0, silence: float = 0.0) -> Native:
    group = Native(timeout, silence)
    assert group.open_device(memory.name, eager) == 0, group.error()
    return group


def inputs(n: int, dtype: str) -> np.ndarray:
    """With values that rounding and flushing would show."""
    x = values(RANK, n, dtype).copy()
    if n > 2 * SPECIAL.size:
        x[n // 2 : n // 2 + SPECIAL.size] = SPECIAL.astype(x.dtype)
    return x


def sanitized(memory: Any, eager: str) -> dict[str, Any]:
    """A few sums of every type, under a sanitizer that makes kernels slow."""
    return sums(memory, eager, (1, 4097, 150_001), 5)


def sums(memory: Any, eager: str, sizes: tuple[int, ...] = SIZES, many: int = 200) -> dict[str, Any]:
    """Every algorithm, type and size on devices and through host memory, in turn in one group."""
    group = make_group(memory, eager == "eager", 120.0)
    report: dict[str, Any] = {}
    names = [name for name in ALGORITHMS if N_HOSTS > 1 or name in ("auto", "star")]
    cases = [(a, d, n, "native") for a in names for d in KINDS for n in sizes]
    cases += [(a, "float32", n, "q8") for a in names if a != "star" for n in sizes]
    for algorithm, dtype, n, wire in cases:
        x = inputs(n, dtype)
        there = memory(x)
        codes = [
            group.allreduce_device(there.address, x, ALGORITHMS[algorithm], WIRES[wire]),
            group.allreduce(x, ALGORITHMS[algorithm], WIRES[wire]),
        ]
        found = there.read()
        there.free()
        report[f"{algorithm} {dtype} {n} {wire}"] = [codes, digest(found), digest(x), group.error()]
    there = memory(np.zeros(7, np.float32))
    report["many"] = []
    for i in range(many):
        once = np.full(7, RANK + i, np.float32)
        there.write(once)
        assert group.allreduce_device(there.address, once) == 0, group.error()
        report["many"].append(float(there.read()[6]))
    group.library.oa_comm_free(group.comm)
    return report


def failing(group: Native, memory: Any, n: int, repeat: int = 1) -> dict[str, Any]:
    """What an operation that must not succeed says, and how long it took."""
    x = np.ones(n, np.float32)
    there = memory(x)
    since = time.monotonic()
    codes = [group.allreduce_device(there.address, x) for _ in range(repeat)]
    return {"codes": codes[-1:], "error": group.error(), "seconds": time.monotonic() - since}


def mismatch(memory: Any, eager: str) -> dict[str, Any]:
    """The last rank has one element more, few or many; or is in host memory."""
    report = {}
    for n in (10, 300_000):
        group = make_group(memory, eager == "eager", TIMEOUT)
        report[f"{n}"] = failing(group, memory, n + (RANK == SIZE - 1))
        report[f"{n} again"] = failing(group, memory, n)
    group = make_group(memory, eager == "eager", TIMEOUT)
    if RANK == SIZE - 1:
        code = group.allreduce(np.ones(10, np.float32))
        report["host memory"] = {"codes": [code], "error": group.error(), "seconds": 0}
    else:
        report["host memory"] = failing(group, memory, 10)
    return report


def abort(memory: Any, eager: str) -> dict[str, Any]:
    """The last rank ends what the others wait in; rank 0 never comes in time."""
    group = make_group(memory, eager == "eager")
    if SIZE - 1 == RANK:
        threading.Timer(0.3, lambda: group.abort("changed its mind")).start()
    if RANK == 0:
        time.sleep(1.0)
    return failing(group, memory, 300_000)


def stuck(memory: Any, eager: str) -> dict[str, Any]:
    """The threads of all ranks beat; the last computes for longer than the timeout."""
    group = make_group(memory, eager == "eager", TIMEOUT, 0.5)
    with group.beating():
        if SIZE - 1 == RANK:
            time.sleep(1.5 * TIMEOUT)
        return failing(group, memory, 300_000)


def lost(memory: Any, eager: str, victim: str, how: str) -> dict[str, Any]:
    """The victim dies or stops in the middle of a stream of operations."""
    group = make_group(memory, eager == "eager", TIMEOUT)
    assert failing(group, memory, 300_000)["codes"] == [0]
    if int(victim) == RANK:
        (FOLDER / "victim").write_text(str(os.getpid()))
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.Signals[how])).start()
    x = np.ones(300_000, np.float32)
    there = memory(x)
    since = time.monotonic()
    while group.allreduce_device(there.address, x) == 0:
        pass
    return {"error": group.error(), "seconds": time.monotonic() - since}


def times(memory: Any, sizes: str, repeats: str) -> list[dict[str, Any]]:
    """Seconds of a sum of float32 on the slowest rank: on devices, and through host memory as ranks stage it."""
    group = make_group(memory)
    assert group.library.oa_comm_probe(group.comm) == 0, group.error()
    report = []
    for n_bytes in map(int, sizes.split(",")):
        x = np.ones(n_bytes // 4, np.float32)
        there = memory(x)

        def on_device(there: Any = there, x: np.ndarray = x) -> int:
            return group.allreduce_device(there.address, x)

        def staged(there: Any = there) -> int:
            values = there.read()
            code = group.allreduce(values)
            there.write(values)
            return code

        cell: dict[str, Any] = {"n_bytes": n_bytes, "device_s": [], "staged_s": []}
        for _ in range(1 + int(repeats)):
            for name, once in (("device_s", on_device), ("staged_s", staged)):
                MPI.COMM_WORLD.Barrier()
                since = time.perf_counter()
                codes = [once() for _ in range(20)]
                seconds = (time.perf_counter() - since) / len(codes)
                assert not any(codes), group.error()
                cell[name].append(MPI.COMM_WORLD.allreduce(seconds, MPI.MAX))
                there.write(x)
        report.append({name: value[1:] if isinstance(value, list) else value for name, value in cell.items()})
        there.free()
    return report


def refused(memory: Any, eager: str) -> dict[str, Any]:
    """A rank without a device, or with one that is not there: all hear it, and go on through host memory."""
    group = Native(30.0)
    report: dict[str, Any] = {}
    x = np.ones(5, np.float32)
    for name, last in (("none", None), ("unknown", "ffff:ff:1f.7")):
        code = group.open_device(last if RANK == SIZE - 1 else memory.name)
        report[name] = [code, group.error()]
    report["sum"] = [group.allreduce_device(x.ctypes.data, x), group.error(), group.allreduce(x), float(x[4])]
    report["then"] = [group.open_device(memory.name), group.open_device(memory.name), group.error()]
    group.library.oa_comm_free(group.comm)
    return report


def main() -> None:
    name, device, *more = JOB.split(":")
    jobs = (sums, sanitized, mismatch, abort, stuck, lost, times, refused)
    report = {job.__name__: job for job in jobs}[name](memory_of(device), *more)
    if name not in ("sums", "sanitized", "times", "refused"):
        leave(report, SIZE - (name == "lost"))
    (FOLDER / f"{RANK}.json").write_text(json.dumps(report))


main()
