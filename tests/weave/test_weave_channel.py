"""csrc/weave without a model: the protocol in every execution, the attention against numpy, failures of either side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama.engine import native
from oallama.errors import OallamaError
from oallama.weave import Receiver, SequenceRows, channel_path, remove_abandoned
from oallama.weave import Sender as AnySender
from oallama.weave.channel import Handle
from support.attention import Reference, floats, steps
from support.foreign_array import ForeignArray
from support.logits import nmse
from support.paths import NATIVE, ROOT
from support.processes import program
from support.receivers import receiver, strike

MIB = 1 << 20
names = count()
Sender = partial(AnySender, deadline_s=5.0)  # a busy machine is no failure


@pytest.fixture(scope="session")
def model_checker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("weave") / "weave_model"
    source = NATIVE / "weave_model.cpp"
    command = ["c++", "-std=c++17", "-O2", "-Wall", "-Wextra", f"-I{ROOT}/csrc/weave", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def executions(program: Path, *arguments: str) -> dict[str, int]:
    return dict(json.loads(subprocess.run([program, *arguments], capture_output=True, check=True, timeout=300).stdout))


@pytest.mark.parametrize(
    ("scenario", "rule"),
    [("pipelined", "all"), ("again", "all"), ("stale", "all"), ("again", "restore"), ("stale", "restore")],
)
def test_no_execution_gives_a_wrong_result(model_checker: Path, scenario: str, rule: str) -> None:
    found = executions(model_checker, scenario, rule)
    assert found["executions"] > 10_000 and found["violations"] == 0


@pytest.mark.parametrize(
    ("scenario", "rule"),
    [("pipelined", "credit"), ("again", "accepted"), ("stale", "accepted"), ("stale", "epoch"), ("pipelined", "wrap")],
)
def test_without_a_rule_some_do(model_checker: Path, scenario: str, rule: str) -> None:
    assert executions(model_checker, scenario, rule)["violations"] > 0


@pytest.mark.parametrize("side", ["release", "acquire"])
@pytest.mark.parametrize("word", ["tail", "done", "epoch", "accepted"])
def test_without_an_order_some_do(model_checker: Path, word: str, side: str) -> None:
    scenario = "pipelined" if word in ("epoch", "accepted") else "again"
    assert executions(model_checker, scenario, "all", word, side)["violations"] > 0


@pytest.fixture
def path() -> Iterator[str]:
    path = channel_path(f"test-{os.getpid()}-{next(names)}")
    yield path
    assert not Path(path).exists()


def opened(sender: AnySender, n_tokens: int = 64, **types: str) -> Handle:
    """A sequence of one layer, 64 values wide, with room for so many tokens."""
    handle = sender.open(n_layers=1, max_tokens=n_tokens, k_width=64, v_width=64, **types)
    assert handle is not None and sender.reserve(handle, n_tokens)
    return handle


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize(
    ("n_head", "n_head_kv", "d_k", "d_v", "more"),
    [
        (4, 2, 64, 64, {}),
        (6, 2, 32, 96, {"softcap": 5.0}),
        (6, 3, 128, 128, {"max_bias": 8.0}),
        (5, 5, 96, 32, {"sinks": True}),
        (8, 1, 64, 64, {"tiled": True}),
    ],
)
def test_attention_is_right(
    path: str, kv: str, n_head: int, n_head_kv: int, d_k: int, d_v: int, more: dict[str, float]
) -> None:
    """Two sequences, prompts in chunks of odd sizes, then token by token; numbers of tasks wrap around meanwhile."""
    options = dict(more)
    tiled = bool(options.pop("tiled", False)) and kv in ("f32", "f16")
    if options.pop("sinks", False):
        options["sinks"] = floats(n_head)
    with Receiver(path, 64 * MIB) as receiver, Sender(path, base=0xFFFFFFFA) as sender:
        wanted = {"n_layers": 2, "max_tokens": 500, "k_width": n_head_kv * d_k, "v_width": n_head_kv * d_v}
        handles = [opened for _ in range(2) if (opened := sender.open(**wanted, k_type=kv, v_type=kv))]
        assert len(handles) == 2
        chunks = ((7, 0), (64, 33), (1, 1), (0, 1), (1, 1), (65, 2), (1, 0))
        for step in steps(chunks, 2, n_head, n_head_kv, d_k, d_v, options):
            assert all(sender.reserve(handles[at], first + n) for at, first, n in step.rows)
            given = [SequenceRows(handles[at], first, n) for at, first, n in step.rows]
            out = sender.attend(step.layer, given, step.q, step.k, step.v, scale=0.1, tiled=tiled, **options)
            assert nmse(out, step.expected) < {"f32": 1e-9, "f16": 1e-5, "bf16": 1e-4, "q8_0": 5e-4}[kv]
        assert receiver.stats()["n_sequences"] == 2
        assert all(sender.trim(handle, 0) for handle in handles)
        assert sender.free_nbytes == 64 * MIB and receiver.stats()["n_refused"] == 0


@pytest.mark.parametrize("kv", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize(("n_head", "n_head_kv", "more"), [(8, 2, {}), (4, 4, {"max_bias": 8.0}), (5, 1, {"sinks": 1})])
def test_our_kernels_are_right(path: str, kv: str, n_head: int, n_head_kv: int, more: dict[str, float]) -> None:
    """Rows have the same bits together and one by one; those of a long sequence are added up in parts."""
    options: dict[str, Any] = {name: floats(n_head) if name == "sinks" else value for name, value in more.items()}
    own = native.core().attend_alone(kv, kv, 64, 64)
    assert own > 0
    types = {"k_width": 64 * n_head_kv, "v_width": 64 * n_head_kv, "k_type": kv, "v_type": kv}
    with Receiver(path, 64 * MIB) as receiver, Sender(path) as sender:
        handles = [sender.open(n_layers=2, max_tokens=700, **types) for _ in range(2)]
        together, apart = (handle for handle in handles if handle is not None and sender.reserve(handle, 700))
        for step in steps(((7,), (640,), (1,), (1,)), 2, n_head, n_head_kv, 64, 64, options):
            ((_, first, n),) = step.rows
            rows = step.q, step.k, step.v
            out = sender.attend(step.layer, [SequenceRows(together, first, n)], *rows, scale=0.1, own=own, **options)
            assert nmse(out, step.expected) < {"f16": 1e-6, "bf16": 1e-4, "q8_0": 5e-4}[kv]
            single = [
                sender.attend(
                    step.layer, [SequenceRows(apart, first + i, 1)], *(a[i : i + 1] for a in rows), scale=0.1, own=own,
                    **options,
                )
                for i in range(n)
            ]  # fmt: skip
            assert np.array_equal(out, np.concatenate(single))
        theirs = sender.attend(step.layer, [SequenceRows(apart, first, 1)], *rows, scale=0.1, **options)
        assert not np.array_equal(theirs, out)  # ggml's kernels
        assert receiver.stats()["n_refused"] == 0
        with pytest.raises(OallamaError, match="malformed"):
            sender.attend(0, [SequenceRows(together, 0, 1)], *rows, scale=0.1, own=99)


def test_the_cut_of_a_task_does_not_show(path: str) -> None:
    """Slots that take few rows, and ggml-cpu's chunks of a row's tokens, which are another order of summation."""
    q, k, v = floats(300, 4, 64), floats(300, 2, 64), floats(300, 2, 64)
    found = []
    for tiled, nbytes in ((False, 16 * MIB), (False, 40_000), (True, 16 * MIB), (True, 400_000)):
        with Receiver(path, 64 * MIB, task_nbytes=nbytes, result_nbytes=nbytes), Sender(path) as sender:
            handle = sender.open(n_layers=1, max_tokens=1024, k_width=128, v_width=128)
            assert handle is not None and sender.reserve(handle, 1024)
            out = sender.attend(0, [SequenceRows(handle, 0, 300)], q, k, v, scale=0.125, tiled=tiled)
            one = (q[:1], k[:1], v[:1])
            whole = sender.attend(0, [SequenceRows(handle, 300, 1)], *one, scale=0.125)
            cut = sender.attend(0, [SequenceRows(handle, 300, 1)], *one, scale=0.125, n_chunks=3, n_padded=512)
            found.append((out, whole))
            assert nmse(cut, whole) < 1e-5  # the sums are of f16
    assert all(np.array_equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(found[2], found[3], strict=True))


@pytest.mark.parametrize("kv", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("nbytes", [16 * MIB, 20_000], ids=["large-slots", "small-slots"])
def test_rows_that_were_appended_are_attended_to(path: str, kv: str, nbytes: int) -> None:
    """Two sequences at once, and more tasks than there are slots; the numbers of tasks wrap around meanwhile."""
    q, k, v = floats(301, 4, 64), floats(301, 2, 64), floats(301, 2, 64)
    found = []
    with Receiver(path, 64 * MIB, task_nbytes=nbytes, result_nbytes=nbytes) as receiver:
        for appends in (False, True):
            with Sender(path, base=0xFFFFFFFA) as sender:
                wanted = {"n_layers": 1, "max_tokens": 512, "k_width": 128, "v_width": 128, "k_type": kv, "v_type": kv}
                handles = [opened for _ in range(2) if (opened := sender.open(**wanted))]
                assert all(sender.reserve(handle, 200) for handle in handles)
                rows = [SequenceRows(handles[0], 0, 180), SequenceRows(handles[1], 0, 120)]
                if appends:
                    sender.append(0, rows, k[:300], v[:300])
                else:
                    sender.attend(0, rows, q[:300], k[:300], v[:300], scale=0.125)
                one = (q[300:], k[300:], v[300:])
                last = [(handles[0], 180), (handles[1], 120)]
                found += [sender.attend(0, [SequenceRows(*at, 1)], *one, scale=0.125) for at in last]
        assert receiver.stats()["n_refused"] == 0
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])


def test_a_refused_append_is_noticed_before_a_result(path: str) -> None:
    q, kv = floats(1, 4, 64), floats(1, 1, 64)
    with Receiver(path, MIB) as receiver, Sender(path) as sender:
        handle = opened(sender, 64)
        sender.append(0, [SequenceRows((handle[0], handle[1] + 1), 0, 1)], kv, kv)
        with pytest.raises(OallamaError, match="the sequence is unknown"):
            sender.attend(0, [SequenceRows(handle, 0, 1)], q, kv, kv, scale=1.0)
        assert receiver.stats()["n_refused"] == 1
    with Receiver(path, MIB), Sender(path) as sender, pytest.raises(OallamaError, match="there is no room"):
        handle = opened(sender, 64)
        sender.append(0, [SequenceRows(handle, 64, 1)], kv, kv)
        sender.reserve(handle, 64)
        sender.attend(0, [SequenceRows(handle, 0, 1)], q, kv, kv, scale=1.0)


def test_nobody_waits_for_an_append(path: str) -> None:
    q, kv = floats(1, 4, 64), floats(1, 1, 64)
    with receiver(path) as process, AnySender(path, deadline_s=0.5) as sender:
        handle = opened(sender, 64)
        waited = sender.waited_s
        strike(process, signal.SIGSTOP)
        sender.append(0, [SequenceRows(handle, 0, 1)], kv, kv)
        assert sender.waited_s == waited
        with pytest.raises(OallamaError, match=r"has given no sign of life|has not answered"):
            sender.attend(0, [SequenceRows(handle, 1, 1)], q, kv, kv, scale=1.0)
    Path(path).unlink()


def test_a_quota_is_kept(path: str) -> None:
    a_block = 64 * 2 * 256 * 2 * 3  # tokens, K and V, values of two bytes, layers
    with Receiver(path, 5 * a_block) as receiver, Sender(path) as sender:
        wanted = {"n_layers": 3, "max_tokens": 1000, "k_width": 256, "v_width": 256}
        a, b = sender.open(**wanted), sender.open(**wanted)
        assert a is not None and b is not None
        assert sender.reserve(a, 192) and sender.reserve(b, 65) and sender.free_nbytes == 0
        assert not sender.reserve(b, 129) and sender.reserve(b, 128)
        assert sender.trim(a, 10) and sender.free_nbytes == 2 * a_block and sender.reserve(b, 129)
        assert not sender.reserve(a, 1001)  # its context ends there
        assert sender.trim(a, 0) and not sender.reserve(a, 1) and not sender.trim(a, 0)
        again = sender.open(**wanted)
        assert again is not None and again[0] == a[0] and again[1] != a[1]
        assert not sender.reserve(a, 1)  # its place is another sequence's now
        q, kv = floats(1, 4, 64), floats(1, 4, 64)
        with pytest.raises(OallamaError, match="the sequence is unknown"):
            sender.attend(0, [SequenceRows(a, 0, 1)], q, kv, kv, scale=1.0)
        with pytest.raises(OallamaError, match="the sequence is unknown"):
            sender.reserve(b, 1)  # failed is failed
        assert receiver.stats()["n_sequences"] == 2
        sender.close()
        with Sender(path) as other:  # a new sender finds nothing of the last one's
            assert other.free_nbytes == 5 * a_block and receiver.stats()["n_sequences"] == 0
            assert receiver.stats()["n_epochs"] == 2


def test_who_may_not_attach(path: str) -> None:
    with pytest.raises(OallamaError, match="no receiver at"):
        Sender(path)
    with Receiver(path, MIB):
        assert os.stat(path).st_mode & 0o777 == 0o600
        with pytest.raises(OallamaError, match="is in use by another receiver"):
            Receiver(path, MIB)
        with Sender(path), pytest.raises(OallamaError, match="has a sender already"):
            Sender(path)
        os.chmod(path, 0o644)
        with pytest.raises(OallamaError, match="belongs to another user, or others may open it"):
            Sender(path)
        os.chmod(path, 0o600)
        os.chown(path, 12345, -1)
        with pytest.raises(OallamaError, match="belongs to another user"):
            Sender(path)
        os.chown(path, os.geteuid(), -1)
        with open(path, "r+b") as file:
            file.seek(4)
            file.write((99).to_bytes(4, "little"))
        with pytest.raises(OallamaError, match="speaks version 99 of the protocol, this sender 6"):
            Sender(path)


def test_one_receiver_of_several_takes_an_abandoned_path(path: str) -> None:
    """Each finds the file of one that is gone; who removes it must not remove the file that replaced it."""
    for _ in range(3):
        Path(path).touch()
        start = threading.Barrier(8)

        def receive(start: threading.Barrier = start) -> Receiver | str:
            start.wait()
            try:
                return Receiver(path, MIB)
            except OallamaError as e:
                return str(e)

        with ThreadPoolExecutor(8) as pool:
            found = [future.result() for future in [pool.submit(receive) for _ in range(8)]]
        (receiver,) = [one for one in found if isinstance(one, Receiver)]
        assert [one for one in found if one is not receiver] == [f"{path} is in use by another receiver"] * 7
        with receiver, Sender(path) as sender:
            assert sender.free_nbytes == MIB


def test_wrong_shapes_are_refused(path: str) -> None:
    with Receiver(path, MIB), Sender(path) as sender:
        handle = opened(sender)
        q, kv = floats(2, 2, 32), floats(2, 2, 32)
        narrow = floats(2, 2, 16)
        for bad in ((q[:1], kv, kv), (floats(2, 3, 32), kv, kv), (q, narrow, kv), (q[0], kv, kv), (q[:, :0], kv, kv)):
            with pytest.raises(ValueError, match=r"q, k, v: \[rows, heads, width\]"):
                sender.attend(0, [SequenceRows(handle, 0, 2)], *bad, scale=1.0)
        with pytest.raises(ValueError, match="other rows than k and v"):
            sender.attend(0, [SequenceRows(handle, 0, 1)], q, kv, kv, scale=1.0)
        for bad in ((kv[:1], kv), (kv, floats(2, 1, 32)), (kv[0], kv), (kv[:, :0], kv[:, :0]), (kv[..., :0], kv)):
            with pytest.raises(ValueError, match=r"k, v: \[rows, heads, width\]"):
                sender.append(0, [SequenceRows(handle, 0, 2)], *bad)
        with pytest.raises(ValueError, match="other rows than k and v"):
            sender.append(0, [SequenceRows(handle, 0, 1)], kv, kv)
        with pytest.raises(OallamaError, match="refuses: the task is malformed"):
            sender.open(n_layers=0, max_tokens=64, k_width=64, v_width=64)


def test_arrays_of_other_libraries(path: str) -> None:
    with Receiver(path, MIB), Sender(path) as sender:
        handle = opened(sender)
        arrays = [floats(2, 4, 32), floats(2, 2, 32), floats(2, 2, 32)]
        given = [SequenceRows(handle, 0, 2)]
        expected = sender.attend(0, given, *arrays, scale=1.0)
        assert np.array_equal(sender.attend(0, given, *map(ForeignArray, arrays), scale=1.0), expected)
        with pytest.raises(TypeError, match="something with __dlpack__, got str"):
            sender.attend(0, given, *arrays[:2], "v", scale=1.0)


def test_a_sequence_twice_is_refused(path: str) -> None:
    with Receiver(path, MIB), Sender(path) as sender:
        handle = opened(sender)
        q, kv = floats(2, 2, 32), floats(2, 2, 32)
        with pytest.raises(OallamaError, match="refuses: the task is malformed"):
            sender.attend(0, [SequenceRows(handle, 0, 1), SequenceRows(handle, 1, 1)], q, kv, kv, scale=1.0)


# The first 2 KiB of any slot, ten thousand times a second.
SCRIBBLE = """if True:
    import mmap, random, sys, time
    path, first, *sizes = sys.argv[1], *map(int, sys.argv[2:])
    slots = [first + i * sizes[0] for i in range(4)]
    slots += [first + 4 * sizes[0] + i * sizes[1] for i in range(4)]
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    print("ready", flush=True)
    while True:
        memory[random.choice(slots) + random.randrange(2048)] ^= random.randrange(1, 256)
        time.sleep(5e-5)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_receiver_that_is_gone_is_noticed(path: str, number: int) -> None:
    with receiver(path) as process:
        sender = AnySender(path, deadline_s=1.0)
        handle = opened(sender)
        q = floats(1, 2, 32)
        out = sender.attend(0, [SequenceRows(handle, 0, 1)], q, q, q, scale=1.0)
        strike(process, number)
        with pytest.raises(OallamaError, match=r"is gone|no sign of life|has not answered for 1000 ms"):
            for _ in range(3):
                sender.attend(0, [SequenceRows(handle, 1, 1)], q, q, q, scale=1.0)
        assert not sender.wants_guests and not sender.lives()
    with Receiver(path, MIB):  # in its place
        sender.close()
        with Sender(path) as other:
            handle = opened(other)
            again = other.attend(0, [SequenceRows(handle, 0, 1)], q, q, q, scale=1.0)
            assert np.array_equal(again, out)


def test_a_damaged_slot_is_noticed(path: str) -> None:
    """Somebody writes over the slots all the time: every result is right, or an error."""
    n_right = n_errors = 0
    pages = 3 * 4096
    with (
        Receiver(path, 16 * MIB, task_nbytes=8192, result_nbytes=4096),
        program(SCRIBBLE, path, pages, 3 * 4096, 2 * 4096),
    ):
        assert os.path.getsize(path) == pages + 4 * (3 + 2) * 4096
        while n_right < 3000 or n_errors < 100:
            try:
                with Sender(path) as sender:
                    reference = Reference()
                    handle = opened(sender, 200, k_type="f32", v_type="f32")
                    for at in range(0, 200, 5):
                        q, k, v = floats(5, 2, 32), floats(5, 2, 32), floats(5, 2, 32)
                        if at % 3 == 0:
                            sender.append(0, [SequenceRows(handle, at, 5)], k, v)
                            reference.attend(q, k, v, 0.2)
                            continue
                        out = sender.attend(0, [SequenceRows(handle, at, 5)], q, k, v, scale=0.2)
                        assert nmse(out, reference.attend(q, k, v, 0.2)) < 1e-9
                        n_right += 1
            except OallamaError:
                n_errors += 1


def test_a_receiver_wants_its_memory_back(path: str) -> None:
    with Receiver(path, MIB) as receiver, Sender(path) as sender:
        assert sender.wants_guests
        receiver.drain()
        assert not sender.wants_guests and sender.lives()
        receiver.drain(False)
        assert sender.wants_guests


def test_files_of_killed_receivers_are_removed(path: str) -> None:
    with receiver(path):
        remove_abandoned()
        assert Path(path).exists()
    end = time.monotonic() + 60
    while Path(path).exists():  # its locks may outlive it for a moment
        assert time.monotonic() < end
        remove_abandoned()
