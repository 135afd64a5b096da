"""The kernels of csrc/weave/cuda with CPU threads for blocks (weave_cuda_twin.cpp): against numpy and the CPU receiver.

The twin is compiled here, also with the thread sanitizer. Parts of the protocol are left out: each must be noticed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from oallama.weave import Receiver, Sender, SequenceRows, channel_path
from support.attention import Reference, floats, steps
from support.logits import nmse
from support.paths import NATIVE, ROOT
from support.weave_cuda import KV_TYPES, Handle, OpenTask, task_of

WEAVE = ROOT / "csrc" / "weave"
SOURCES = (NATIVE / "weave_cuda_twin.cpp", WEAVE / "cuda" / "block_store.cpp", WEAVE / "cuda" / "control.cpp")
FLAGS = ("-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{WEAVE}", f"-I{WEAVE}/cuda")
OK, MALFORMED, UNKNOWN, NO_ROOM = range(4)  # Status
NONE, LATE, ABORTED, DAMAGED, REFUSED = range(5)  # Failure
NMSE = {"f32": 1e-10, "f16": 1e-6, "bf16": 1e-4, "q8_0": 5e-4}
names = count()

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


class Options(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint32) for n in ("n_blocks", "n_resident", "n_threads", "seed")),
        *((n, ctypes.c_uint32) for n in ("base", "n_slots", "task_nbytes", "result_nbytes")),
        *((n, ctypes.c_uint32) for n in ("pages_per_place", "max_partials")),
        ("pool_nbytes", ctypes.c_uint64),
    ]


def build(folder: Path, *flags: str) -> Path:
    program = folder / "twin"
    command = ["c++", *FLAGS, f"-I{ROOT}/csrc/base", f"-I{WEAVE}/cpu", *flags, *map(str, SOURCES), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and "cannot find" in done.stderr:
        pytest.skip("no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("twin"), "-O1", "-fPIC", "-shared")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("races"), "-O1", "-fsanitize=thread")


class Twin:
    """A receiver and a sender; `most`: rows of a task."""

    def __init__(self, library: Path, **options: int) -> None:
        self.lib = ctypes.CDLL(str(library))
        self.lib.twin_new.restype = ctypes.c_void_p
        self.lib.twin_free_nbytes.restype = ctypes.c_uint64
        given = {
            "n_blocks": 5, "n_resident": 3, "n_threads": 1, "seed": 1, "base": 0xFFFFFFFA, "n_slots": 4,
            "task_nbytes": 1 << 20, "result_nbytes": 1 << 20, "pages_per_place": 32, "max_partials": 64,
            "pool_nbytes": 64 << 20, **options,
        }  # fmt: skip
        self.twin = ctypes.c_void_p(self.lib.twin_new(ctypes.byref(Options(**given))))

    def attach(self, shape: OpenTask, epoch: int = 12345) -> int:
        return int(self.lib.twin_attach(self.twin, ctypes.c_uint64(epoch), ctypes.byref(shape)))

    def open(self, shape: OpenTask) -> tuple[int, Handle]:
        handle = Handle()
        return int(self.lib.twin_open(self.twin, ctypes.byref(shape), ctypes.byref(handle))), handle

    def reserve(self, handle: Handle, n_tokens: int) -> int:
        return int(self.lib.twin_reserve(self.twin, handle, n_tokens))

    def trim(self, handle: Handle, n_tokens: int) -> int:
        return int(self.lib.twin_trim(self.twin, handle, n_tokens))

    def free_nbytes(self) -> int:
        return int(self.lib.twin_free_nbytes(self.twin))

    def attend(
        self,
        layer: int,
        rows: list[tuple[Handle, int, int]],
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        scale: float,
        max_bias: float = 0.0,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
        most: int = 1000,
    ) -> tuple[int, np.ndarray]:
        """Failure, and the results."""
        out = np.full((*q.shape[:2], v.shape[2]), np.nan, np.float32)
        given = task_of(layer, rows, (sinks, q, k, v, out), scale, max_bias, softcap)
        return int(self.lib.twin_attend(self.twin, *given, most)), out

    def keep(self, handle: Handle, first: int, k: np.ndarray, v: np.ndarray) -> None:
        """Tokens that nobody attends: in f16, of one layer and one head, each (tokens, width)."""
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (k, v)]
        self.lib.twin_keep(self.twin, handle, first, *k.shape, *pointers)

    def counts(self) -> dict[str, int]:
        found = (ctypes.c_uint32 * 5)()
        self.lib.twin_counts(self.twin, found)
        return dict(zip(("tasks", "refused", "looks", "items", "outputs"), found, strict=True))


@contextmanager
def twin(library: Path, **options: int) -> Iterator[Twin]:
    made = Twin(library, **options)
    try:
        yield made
    finally:
        made.lib.twin_delete(made.twin)


def shape_of(n_layers: int, n_head_kv: int, d_k: int, d_v: int, kv: str = "f16", max_tokens: int = 2048) -> OpenTask:
    return OpenTask(n_layers, max_tokens, KV_TYPES[kv], KV_TYPES[kv], n_head_kv * d_k, n_head_kv * d_v)


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "d_k", "d_v", "more", "twins"),
    [
        (8, 2, 128, 128, {}, {}),
        (6, 2, 32, 96, {"softcap": 5.0}, {"n_threads": 2}),
        (6, 3, 192, 128, {"max_bias": 8.0}, {"n_blocks": 3}),
        (5, 5, 96, 256, {"sinks": True}, {"max_partials": 16}),
        (20, 1, 64, 64, {"sinks": True, "max_bias": 4.0}, {"n_threads": 2, "n_resident": 2}),
    ],
)
def test_attention_is_right(
    library: Path,
    kv: str,
    n_head: int,
    n_head_kv: int,
    d_k: int,
    d_v: int,
    more: dict[str, float],
    twins: dict[str, int],
) -> None:
    """Prompts in chunks, tasks that end within one, then token by token; numbers of tasks wrap around meanwhile."""
    options = dict(more)
    if options.pop("sinks", False):
        options["sinks"] = floats(n_head)
    shape = shape_of(2, n_head_kv, d_k, d_v, kv)
    most_splits = 0.0
    with twin(library, **twins) as both:
        assert both.attach(shape) == NONE
        both.lib.twin_scribble(both.twin)
        handles = [both.open(shape)[1] for _ in range(2)]
        chunks = ((7, 0), (200, 33), (1, 1), (0, 1), (1, 1), (65, 130), (1, 0))
        for step in steps(chunks, 2, n_head, n_head_kv, d_k, d_v, options):
            assert all(both.reserve(handles[at], first + n) == OK for at, first, n in step.rows)
            given = [(handles[at], first, n) for at, first, n in step.rows]
            failure, out = both.attend(step.layer, given, step.q, step.k, step.v, 0.1, most=45, **options)
            assert failure == NONE and nmse(out, step.expected) < NMSE[kv]
            counts = both.counts()
            most_splits = max(most_splits, counts["items"] / counts["outputs"])
        assert most_splits > 1.5 and both.counts()["refused"] == 0


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_it_is_the_cpu_receivers(library: Path, kv: str) -> None:
    path = channel_path(f"test-twin-{os.getpid()}-{next(names)}")
    shape = shape_of(1, 2, 64, 64, kv)
    with Receiver(path, 64 << 20), Sender(path, deadline_s=30.0) as sender, twin(library) as both:
        assert both.attach(shape) == NONE
        there = sender.open(n_layers=1, max_tokens=2048, k_width=128, v_width=128, k_type=kv, v_type=kv)
        handle = both.open(shape)[1]
        assert there is not None and sender.reserve(there, 400) and both.reserve(handle, 400) == OK
        position = 0
        for n in (150, 1, 64, 1, 1, 33):
            q, k, v = floats(n, 8, 64), floats(n, 2, 64), floats(n, 2, 64)
            wanted = sender.attend(0, [SequenceRows(there, position, n)], q, k, v, scale=0.125)
            failure, out = both.attend(0, [(handle, position, n)], q, k, v, 0.125)
            assert failure == NONE and nmse(out, wanted) < max(NMSE[kv], 1e-5)  # it adds up in f16
            position += n


@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "width", "more", "twins"),
    [
        (8, 2, 128, {"softcap": 5.0}, {"n_threads": 64}),
        (3, 3, 64, {"sinks": True, "max_bias": 4.0}, {"n_threads": 32}),
        (10, 1, 64, {}, {"n_threads": 64, "max_partials": 16}),
    ],
)
def test_tiles_are_right(
    library: Path, n_head: int, n_head_kv: int, width: int, more: dict[str, float], twins: dict[str, int]
) -> None:
    """As with tensor cores, which 32 threads of the twin play: f16, heads of 64 and of 128."""
    options = dict(more)
    if options.pop("sinks", False):
        options["sinks"] = floats(n_head)
    with twin(library, n_blocks=2, n_resident=1, **twins) as both:
        assert both.attach(shape_of(1, n_head_kv, width, width)) == NONE
        both.lib.twin_scribble(both.twin)
        handles = [both.open(shape_of(1, n_head_kv, width, width))[1] for _ in range(2)]
        for step in steps(((70, 5), (1, 20), (1, 1), (0, 1)), 1, n_head, n_head_kv, width, width, options):
            assert all(both.reserve(handles[at], first + n) == OK for at, first, n in step.rows)
            given = [(handles[at], first, n) for at, first, n in step.rows]
            failure, out = both.attend(step.layer, given, step.q, step.k, step.v, 0.1, most=45, **options)
            assert failure == NONE and nmse(out, step.expected) < NMSE["f16"]


@pytest.mark.parametrize("n_threads", [1, 32])
def test_an_item_of_more_tokens_than_a_window(library: Path, n_threads: int) -> None:
    """Numbers of 64 blocks are at hand at once: 4096 tokens."""
    rng = np.random.default_rng(5)
    size = {"task_nbytes": 8 << 20, "result_nbytes": 2 << 20, "pages_per_place": 80}
    with twin(library, n_blocks=1, n_resident=1, n_threads=n_threads, max_partials=2, **size) as both:
        shape = shape_of(1, 1, 64, 64, max_tokens=4608)
        assert both.attach(shape) == NONE
        handle, reference = both.open(shape)[1], Reference()
        assert both.reserve(handle, 4204) == OK
        k, v = (rng.standard_normal((4204, 1, 64), dtype=np.float32) for _ in range(2))
        q = rng.standard_normal((4, 2, 64), dtype=np.float32)
        both.keep(handle, 0, k[:4200, 0], v[:4200, 0])
        reference.k, reference.v = list(k[:4200].astype(np.float64)), list(v[:4200].astype(np.float64))
        failure, out = both.attend(0, [(handle, 4200, 4)], q, k[4200:].copy(), v[4200:].copy(), 0.125)
        assert failure == NONE and both.counts()["items"] == both.counts()["outputs"]  # not cut
        assert nmse(out, reference.attend(q, k[4200:], v[4200:], 0.125)) < NMSE["f16"]


def test_how_it_is_cut_does_not_show(library: Path) -> None:
    """Rows in other tasks, tokens in other splits, more blocks: new tokens count as if they had been stored before."""
    found = []
    for options, most in (({"max_partials": 2}, 300), ({}, 300), ({"max_partials": 400, "n_threads": 2}, 7)):
        rng = np.random.default_rng(3)
        with twin(library, **options) as both:
            shape = shape_of(1, 2, 64, 64, "q8_0")
            assert both.attach(shape) == NONE
            handle = both.open(shape)[1]
            assert both.reserve(handle, 302) == OK
            results = []
            for position, n in ((0, 300), (300, 1), (301, 1)):
                q, k, v = (rng.standard_normal((n, heads, 64), dtype=np.float32) for heads in (6, 2, 2))
                failure, out = both.attend(0, [(handle, position, n)], q, k, v, 0.125, most=most)
                assert failure == NONE
                results.append(out)
            found.append(np.concatenate(results))
    assert nmse(found[1], found[0]) < 1e-11 and nmse(found[2], found[0]) < 1e-11


@pytest.mark.parametrize(
    ("lengths", "n_head_kv", "items"),
    [
        ([4096], 1, 16),  # one for each of 16 blocks
        ([1024] * 4, 1, 16),
        ([4096, 1024], 1, 14),  # 11 splits and 3
        ([256], 1, 2),  # short ones are not cut finer than 128 tokens
        ([1024], 3, 24),  # one for each would leave 4 of 16 blocks idle
        ([320] * 5, 2, 30),  # more than half as many outputs: two for each
        ([64] * 4, 2, 8),
    ],
)
def test_how_many_items_a_task_is_cut_into(library: Path, lengths: list[int], n_head_kv: int, items: int) -> None:
    shape = shape_of(1, n_head_kv, 64, 64, max_tokens=4608)
    with twin(library, pages_per_place=80, max_partials=64) as both:
        assert both.attach(shape) == NONE
        handles = [both.open(shape)[1] for _ in lengths]
        rows = [(handle, n - 1, 1) for handle, n in zip(handles, lengths, strict=True)]
        assert all(both.reserve(handle, n) == OK for handle, n in zip(handles, lengths, strict=True))
        q, k, v = (np.zeros((len(rows), n_head_kv, 64), np.float32) for _ in range(3))
        assert both.attend(0, rows, q, k, v, 0.125)[0] == NONE
        assert both.counts()["items"] == items


def test_many_sequences(library: Path) -> None:
    """64 at once, in and out of order of their places, of which some leave and others take their blocks."""
    rng = np.random.default_rng(4)
    shape = shape_of(1, 2, 64, 64)
    with twin(library, task_nbytes=4 << 20, result_nbytes=4 << 20) as both:
        assert both.attach(shape) == NONE
        sequences = {i: (both.open(shape)[1], Reference()) for i in range(64)}
        for step in range(6):
            order = list(sequences)
            rng.shuffle(order)
            n = [int(rng.integers(1, 9)) if step else int(rng.integers(1, 80)) for _ in order]
            q, k, v = (rng.standard_normal((sum(n), h, 64), dtype=np.float32) for h in (4, 2, 2))
            given, expected, first = [], [], 0
            for i, rows in zip(order, n, strict=True):
                handle, reference = sequences[i]
                position, part = len(reference.k), slice(first, first + rows)
                assert both.reserve(handle, position + rows) == OK
                given.append((handle, position, rows))
                expected.append(reference.attend(q[part], k[part], v[part], 0.125))
                first += rows
            failure, out = both.attend(0, given, q, k, v, 0.125, most=sum(n) // 3)
            assert failure == NONE and nmse(out, np.concatenate(expected)) < NMSE["f16"]
            for i in order[:8]:
                assert both.trim(sequences[i][0], 0) == OK
                sequences[i] = (both.open(shape)[1], Reference())


def test_a_quota_is_kept(library: Path) -> None:
    a_block = 64 * 2 * 256 * 2 * 3  # tokens, K and V, values of two bytes, layers
    shape = shape_of(3, 4, 64, 64, max_tokens=1000)
    with twin(library, pool_nbytes=5 * a_block + 100) as both:
        assert both.attach(shape) == NONE
        a, b = both.open(shape)[1], both.open(shape)[1]
        assert both.reserve(a, 192) == OK and both.reserve(b, 65) == OK and both.free_nbytes() == 0
        assert both.reserve(b, 129) == NO_ROOM and both.reserve(b, 128) == OK
        assert both.trim(a, 10) == OK and both.free_nbytes() == 2 * a_block and both.reserve(b, 129) == OK
        assert both.reserve(a, 1001) == NO_ROOM  # its context ends there
        assert both.trim(a, 0) == OK and both.reserve(a, 1) == UNKNOWN and both.trim(a, 0) == UNKNOWN
        again = both.open(shape)[1]
        assert again.place == a.place and again.generation != a.generation
        assert both.open(shape_of(2, 4, 64, 64))[0] == MALFORMED  # another model's
        assert both.open(shape_of(3, 4, 64, 64, max_tokens=64 * 32 + 1))[0] == NO_ROOM


def refused(library: Path, wrong: str) -> tuple[int, int, int]:
    """One sound task, then one that is `wrong`: failure, the refusal's status, tasks that were refused."""
    shape = shape_of(2, 2, 64, 64)
    with twin(library) as both:
        assert both.attach(shape) == NONE
        handle = both.open(shape)[1]
        assert both.reserve(handle, 64) == OK
        q, k, v = floats(2, 4, 64), floats(2, 2, 64), floats(2, 2, 64)
        assert both.attend(0, [(handle, 0, 2)], q, k, v, 1.0)[0] == NONE
        layer, position = 0, 2
        if wrong == "generation":
            assert both.trim(handle, 0) == OK
            assert both.reserve(both.open(shape)[1], 64) == OK
        elif wrong == "room":
            position = 63
        elif wrong == "epoch":
            both.lib.twin_set_epoch(both.twin, ctypes.c_uint64(99))
        elif wrong == "layer":
            layer = 2
        elif wrong == "place":
            handle.place = 1 << 20
        elif wrong == "width":
            q, k, v = floats(2, 4, 64), floats(2, 4, 64), floats(2, 4, 64)
        rows = [(handle, position, 2)] if wrong != "twice" else [(handle, 2, 1), (handle, 3, 1)]
        failure, out = both.attend(layer, rows, q, k, v, 1.0)
        status = int(both.lib.twin_refusal(both.twin))
        if failure != NONE:
            assert not out.any()  # zeros, and so are all results from now on
            assert both.attend(0, [(handle, 2, 2)], q, k, v, 1.0)[0] == failure
            assert both.attach(shape, epoch=7) == NONE  # a new sender
            handle = both.open(shape)[1]
            assert both.reserve(handle, 64) == OK
            again, out = both.attend(0, [(handle, 0, 2)], q, k[:, :2].copy(), v[:, :2].copy(), 1.0)
            assert again == NONE and out.all()
        return failure, status, both.counts()["refused"]


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ("generation", UNKNOWN),
        ("place", UNKNOWN),
        ("room", NO_ROOM),
        ("layer", MALFORMED),
        ("width", MALFORMED),
        ("twice", MALFORMED),
        ("epoch", None),
    ],
)
def test_what_is_refused(library: Path, wrong: str, status: int | None) -> None:
    assert refused(library, wrong) == ((REFUSED, status, 1) if status is not None else (DAMAGED, OK, 1))


@pytest.mark.parametrize("wrong", ["generation", "room", "epoch"])
def test_without_the_check_it_is_not(library: Path, wrong: str) -> None:
    with without(library, wrong):
        assert refused(library, wrong)[2] == 0


def step_by_step(library: Path) -> dict[str, int]:
    """A task whose first work never comes and whose second comes twice; then one whose sender leaves before its work.

    Tasks that each of the launches has done.
    """
    shape = shape_of(1, 2, 64, 64)
    q, k, v = floats(2, 4, 64), floats(2, 2, 64), floats(2, 2, 64)
    with twin(library) as both, ThreadPoolExecutor(1) as pool:
        lib, it = both.lib, both.twin
        assert both.attach(shape) == NONE
        handle = both.open(shape)[1]
        assert both.reserve(handle, 64) == OK
        lib.twin_hold(it, 1)
        try:
            n = [lib.twin_work(it)]
            sent = pool.submit(both.attend, 0, [(handle, 0, 2)], q, k, v, 0.125)
            until_open(both)
            assert lib.twin_look(it) == 1  # that look's task again
            n += [lib.twin_work(it), lib.twin_work(it)]
            failure, out = sent.result()
            if n[2] > n[1]:  # the channel's numbers are wrong now, and whether the sender sees that is a matter of time
                return {"once": n[1] - n[0], "again": n[2] - n[1]}
            assert failure == NONE and nmse(out, Reference().attend(q, k, v, 0.125)) < NMSE["f16"]
            sent = pool.submit(both.attend, 0, [(handle, 2, 2)], q, k, v, 0.125)
            until_open(both)
            lib.twin_detach(it)
            lib.twin_look(it)
            n += [lib.twin_work(it)]
            assert sent.result()[0] != NONE
        finally:
            lib.twin_hold(it, 0)
    return dict(zip(("once", "again", "for nobody"), np.diff(n).tolist(), strict=True))


def until_open(both: Twin) -> None:
    end = time.monotonic() + 30
    while not both.lib.twin_look(both.twin):
        assert time.monotonic() < end, "no look finds a task"
        time.sleep(0.001)


def test_no_task_is_lost_or_done_twice(library: Path) -> None:
    assert step_by_step(library) == {"once": 1, "again": 0, "for nobody": 0}


def test_a_task_that_stays_open_is_done_again(library: Path) -> None:
    with without(library, "closes"):
        found = step_by_step(library)
    assert found == {"once": 1, "again": 1}


def test_a_look_that_says_nothing_leaves_a_task_open(library: Path) -> None:
    with without(library, "says"):
        assert step_by_step(library) == {"once": 1, "again": 0, "for nobody": 1}


@contextmanager
def without(library: Path, part: str) -> Iterator[None]:
    lib = ctypes.CDLL(str(library))
    lib.twin_without(part.encode())
    try:
        yield
    finally:
        lib.twin_without(b"")


def test_the_line_between_hosts(library: Path, tmp_path: Path) -> None:
    lib = ctypes.CDLL(str(library))
    lib.twin_line.restype = ctypes.c_char_p
    assert lib.twin_line(str(tmp_path / "line").encode()).decode() == ""


def run(program: Path, without: str = "") -> tuple[int, str]:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    command = [str(program), *([without] if without else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_no_race(program: Path) -> None:
    """Many blocks of two threads, fewer at a time than there are: the results of one block, and no data race."""
    assert run(program) == (0, "ok\n")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["arrive", "arrive_system", "words"])
def test_what_orders_memory_is_needed(program: Path, part: str) -> None:
    """The last of the splits to arrive, of the outputs, the words of the channel."""
    code, output = run(program, part)
    assert code != 0 and "WARNING: ThreadSanitizer: data race" in output
