"""Measures what a model needs on this machine and keeps it.

The cache is one profile per fingerprint: a second model only adds the shapes it does not share with the first. It is
written after every few tasks and at Ctrl-C, so that little measured time is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from oallama.data.entries import (
    CLEAN,
    KV_ROWS,
    OTHER,
    QUIET_CPUS,
    AttentionTime,
    ChainTime,
    Concurrency,
    LinkTime,
    Note,
    OperatorTime,
    OtherLoad,
    Overlap,
    ShapeTime,
    SwitchTime,
)
from oallama.data.operators import OperatorGraph
from oallama.data.profile import Profile
from oallama.engine import device_list, native
from oallama.engine.device_list import ACCELERATOR_TYPES, Device
from oallama.errors import OallamaError
from oallama.profiling.fingerprint import check_threads, cpu_set, fingerprint, is_quick
from oallama.profiling.other_work import OtherWork, cpus_of_others
from oallama.profiling.recorder import (
    BESIDE_OTHERS,
    DOUBTS,
    MEMORY_SHORT,
    THROTTLED,
    Recorder,
    cache_file,
    cached,
)
from oallama.profiling.slowdowns import MEMORY_STALL, Slowdowns, frequency
from oallama.profiling.workload import DEPTHS, LINK_SIZES, UNFUSED_V_TYPES, Task, tasks_for

Progress = Callable[[float, float, str], None]  # done, total (arbitrary units), what comes next

_MAX_SECONDS, _QUICK_SECONDS = 0.45, 0.02  # per task, warm-up excluded
_PAIR_SECONDS = 0.6  # of two devices in turn or at once
_COLD_TIMES = 16  # the last-level cache
_MIN_COLD_BYTES = 64 << 20
_MAX_COLD_BYTES = 1 << 30
_QUICK_COLD_BYTES = 1 << 20
# Four times the second-level cache of the largest GPUs (126 MB on a B200); ggml's interface does not tell its size.
_GPU_COLD_BYTES = 512 << 20
DOUBTFUL_AT_ONCE = 20
# What a hypervisor may take of the CPUs of a machine on which nothing else runs; another program takes more.
_HYPERVISOR_CPUS = 0.3
_LINK = ("direction", "memory", "bytes", "median_s", "spread_s", "best_s", "clean")
_WARM = "timed partly from caches: memory is too short for copies that exceed them"


def profile_machine(
    graph: OperatorGraph,
    devices: Sequence[str],
    *,
    n_threads: int = 0,
    depths: Sequence[int] = DEPTHS,
    type_k: str = "f16",
    type_v: str = "f16",
    alone: bool = False,
    ours: bool = True,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Times of every target operator of `graph` at its tiers, attention at `depths`, and links, on every device.

    Args:
        graph: its tiers are the token counts measured.
        devices: names.
        alone: only these devices. Else the CPU too, every plan's second device, and copies between it and them.
        ours: whether RPC servers are of this engine, and have its kernels.
        n_threads: CPU threads; 0 takes all CPUs this process may use.
        depths: KV rows attention is measured at, rounded up to what llama.cpp pads them to.
        type_k, type_v: KV cache types.
        cache: folder of cached profiles, by default `cache_dir()`.
        progress: called before every task.

    Returns:
        The cached profile of this fingerprint with whatever was missing added. Repeats that waited for a CPU beside
        other work are left out; of measurements with few others a note tells, and later calls on a quiet machine
        replace the longest of them. A measurement that fails, for lack of
        memory for example, is left out; the profile's notes tell, and the next call tries again.

    Raises:
        OallamaError: for an unknown device, more threads than CPUs, and for a device on which every measurement fails
            or that cannot attend to a cache of these types. A cache that cannot be written is said once.
        KeyboardInterrupt: after what was measured has been saved.
    """
    check_threads(n_threads)
    n_threads = n_threads or len(cpu_set())
    names = list(dict.fromkeys([*devices, *([] if alone else ["CPU"])]))
    mark = fingerprint(names, n_threads)
    path = cache_file(mark, cache)
    recorder = Recorder(cached(path, mark, names), path)

    wanted = {
        name: [
            task
            for task in tasks_for(
                graph,
                depths=depths,
                type_k=type_k,
                type_v=type_v,
                accelerator=name != "CPU",
                repacks=partial(_repacks, name),
                tiles=partial(_tiles, name, alone and ours),
                attends=partial(_attends, name),
            )
            if not (alone and task.kind in ("links", "overlap", "concurrency"))
        ]
        for name in names
    }
    work = {name: recorder.missing(name, tasks) for name, tasks in wanted.items()}
    doubtful = {name: recorder.doubtful(name, tasks) for name, tasks in wanted.items()}
    again: dict[str, list[Task]] = {name: [] for name in names}
    if any(doubtful.values()) and cpus_of_others() < QUIET_CPUS:
        again = {name: doubtful[name][:DOUBTFUL_AT_ONCE] for name in names}
        work = {name: work[name] + again[name] for name in names}
    total = sum(task.cost for tasks in work.values() for task in tasks)
    done = 0.0
    try:
        for name, tasks in work.items():
            probe = Probe(name, n_threads)
            failed: list[OallamaError] = []
            before = Slowdowns.now()
            with OtherWork() as others:
                for task in tasks:
                    if progress:
                        progress(done, total, f"{name}: {task.describe()}")
                    try:
                        recorder.add(probe.measure(task))
                    except OallamaError as err:
                        failed.append(err)
                        recorder.note(name, task, Note(name, task.describe(), f"not measured: {err.__cause__}"))
                    else:
                        was_still = others.so_far() < _HYPERVISOR_CPUS
                        recorder.note(name, task, *_notes(probe, task in again[name] and was_still))
                    done += task.cost
            if tasks:
                recorder.add([_load(name, others.cpus, before)])
            if failed and len(failed) == len(wanted[name]):
                raise failed[0]
    finally:
        recorder.save()
    if progress:
        progress(total, total, "profile complete")
    about = {(name, task.describe()) for name, tasks in wanted.items() for task in tasks}
    notes = tuple(note for note in recorder.profile.notes if (note.device, note.task) in about)
    return replace(recorder.profile, notes=notes)


def _notes(probe: Probe, again: bool) -> list[Note]:
    """On the last measurement. again: it was disturbed before, and nothing else runs. A third time would be no help."""
    if not again:
        return [*probe.notes]
    return [replace(note, text=DOUBTS.get(note.text, note.text)) for note in probe.notes]


def _load(device: str, cpus: float, before: Slowdowns) -> OtherLoad:
    """What slowed the machine down while a device was measured."""
    now, share = Slowdowns.now(), frequency()
    return OtherLoad(
        device,
        round(cpus, 3),
        round(now.memory_stall(before), 3),
        now.throttled - before.throttled,
        None if share is None else round(share, 3),
    )


def forget(devices: Sequence[str], n_threads: int = 0, cache: Path | None = None) -> None:
    """Drop the cached profile of these devices, so that `profile_machine` measures everything anew.

    The arguments are those of `profile_machine`. Raises OallamaError when the file cannot be removed.
    """
    names = list(dict.fromkeys([*devices, "CPU"]))
    path = cache_file(fingerprint(names, n_threads or len(cpu_set())), cache)
    try:
        path.unlink(missing_ok=True)
    except OSError as err:
        raise OallamaError(f"cannot remove the cached profile {path}: {err.strerror}") from err


def _repacks(device: str, weight: Mapping[str, Any]) -> bool:
    return bool(native.core().repacks(device, **weight))


def _tiles(device: str, alone: bool, weight: Mapping[str, Any]) -> bool:
    """Of another host's CPU only where it is measured alone: plans of several devices do not choose its kernels yet."""
    return (alone or device == "CPU") and bool(native.core().tiles(device, weight["type"]))


def _attends(device: str, attention: Mapping[str, Any]) -> bool:
    """Raises OallamaError where the cache is of a type that only fused attention reads, and the device has none."""
    there = bool(native.core().attends(device, n_tokens=1, depth=KV_ROWS, **attention))
    fused = attention["flash"] and attention["kernel"] == "ggml"
    if not there and fused and attention["type_v"] not in UNFUSED_V_TYPES:
        raise OallamaError(
            f"{device} has no fused attention for heads with K {attention['head_dim_k']} and V "
            f"{attention['head_dim_v']} wide, which a V cache of type {attention['type_v']} needs; take f16 "
            "(--type-v f16)"
        )
    return there


class Probe:
    """Runs tasks on one device.

    max_s: seconds of measuring per task, warm-up excluded; None takes the profiler's own. `notes` are on the last
    measurement.

    Raises:
        OallamaError: from the constructor and `measure`, naming the device and the task that failed.
    """

    def __init__(self, device: str, n_threads: int, max_s: float | None = None) -> None:
        self._device = device
        self._max_s = (_QUICK_SECONDS if is_quick() else _MAX_SECONDS) if max_s is None else max_s
        self._pair_s = _QUICK_SECONDS if is_quick() else _PAIR_SECONDS
        self._n_threads = n_threads
        self.notes: tuple[Note, ...] = ()
        try:
            self._bench = native.core().OpBench(device, n_threads, True, cold_bytes(device_list.device(device)))
        except (RuntimeError, ValueError) as err:
            raise OallamaError(f"profiling {device}: {err}") from err

    def measure(self, task: Task) -> list[Any]:
        self.notes = ()
        before = Slowdowns.now()
        try:
            measured = self._measure(task)
            if task.kind in ("mul_mat", "attention") and self._bench.warm:
                self.notes = (Note(self._device, task.describe(), _WARM),)
            if any(getattr(entry, "clean", 1.0) < CLEAN for entry in measured):
                self.notes += (Note(self._device, task.describe(), BESIDE_OTHERS),)
            self.notes += tuple(Note(self._device, task.describe(), text) for text in _slowed_by(before))
            return measured
        except (RuntimeError, ValueError, MemoryError) as err:
            raise OallamaError(f"profiling {self._device}, {task.describe()}: {err}") from err

    def _measure(self, task: Task) -> list[Any]:
        a, device = task.args, self._device
        if task.kind == "mul_mat":
            t = self._bench.mul_mat(max_s=self._max_s, **a)
            op = "MUL_MAT_ID" if a["n_expert"] else "MUL_MAT"
            ne = (a["k"], a["m"], max(1, a["n_expert"]))
            t["realisation"] = a["realisation"]
            return [OperatorTime(device, op, a["type"], ne, max(1, a["n_used"]), a["n_tokens"], **t)]
        if task.kind == "attention":
            t = self._bench.attention(max_s=self._max_s, **a)
            del t["repeats"]
            return [AttentionTime(device, **a, **t)]
        if task.kind == "small":
            t = self._bench.small(max_s=self._max_s, **a)
            return [OperatorTime(device, OTHER, "f32", (a["n_embd"], 1, 1), 1, a["n_tokens"], **t)]
        if task.kind == "chain":
            t = self._bench.chain(max_s=self._max_s, **a)
            return [ChainTime(device, a["chain"], a["type"], (a["ne0"], a["ne1"]), a["n_tokens"], **t)]
        if task.kind == "shape":
            t = self._bench.node(a["shape"].as_node(), n_tokens=a["n_tokens"], max_s=self._max_s)
            return [ShapeTime(device, a["shape"].key, **t)]
        if task.kind == "links":
            rows = native.core().link_bench(device, list(LINK_SIZES), self._pair_s / 2)
            return [LinkTime(device, **{name: r[name] for name in _LINK}) for r in rows]
        if task.kind == "overlap":
            return [Overlap(device, native.core().overlap_bench(device, self._n_threads, self._pair_s))]
        if task.kind == "concurrency":
            return [Concurrency(device, native.core().concurrency_bench(device, self._n_threads, self._pair_s))]
        return [SwitchTime(device, self._switch_seconds())]

    def _switch_seconds(self) -> float:
        """What a device change costs beyond the copy itself, which predictions add by its own size."""
        core = native.core()
        whole = core.switch_bench(self._device, self._n_threads, self._pair_s)
        rows = core.link_bench(self._device, [core.SWITCH_BYTES], self._pair_s / 2)
        kinds = {row["memory"] for row in rows}
        kind = "pinned" if "pinned" in kinds else "pageable"  # as in the chain that was timed
        copies = [float(row["median_s"]) for row in rows if row["memory"] == kind]
        return max(0.0, float(whole) - sum(copies) / len(copies))


def _slowed_by(before: Slowdowns) -> list[str]:
    """Of the DOUBTS what the machine's state since then gives reason for."""
    now = Slowdowns.now()
    throttled = [THROTTLED] if now.throttled > before.throttled else []
    return throttled + ([MEMORY_SHORT] if now.memory_stall(before) > MEMORY_STALL else [])


def cold_bytes(device: Device) -> int:
    """Bytes the rotating copies of a weight must exceed so that decode's cold reads are what is timed.

    Four times the largest cache of a GPU. 16 times the last-level cache of the host for the CPU and for devices that
    compute on it (RPC on loopback, lavapipe): of copies of twice its size a part is still there when their turn comes
    again, and tables of pages are (bench/cold_copies.py). Bounded, because a virtual machine reports the cache of the
    whole socket.
    """
    if is_quick():
        return _QUICK_COLD_BYTES
    hosted = device.backend.startswith("RPC") or "llvmpipe" in device.description
    if device.type in ACCELERATOR_TYPES and not hosted:
        return _GPU_COLD_BYTES
    return min(max(_COLD_TIMES * largest_cache(), _MIN_COLD_BYTES), _MAX_COLD_BYTES)


def largest_cache() -> int:
    """Bytes of the host's last-level cache, as Linux tells; 0 where it does not."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM")) * unit)
    return max(sizes)
