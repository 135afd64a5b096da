"""Faults of receivers: forty random ones of bench/weave_soak.py, and what single ones must not do."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama.errors import OallamaError
from oallama.weave import Receiver, Sender, SequenceRows, channel_path
from oallama.weave.channel import layout
from oallama.weave.sequences import Sequences
from support.logits import nmse, tokens
from support.paths import ROOT
from support.processes import program, ran, ran_python, until
from support.receivers import receiver, strike

MIB = 1 << 20
BF16 = 30  # as in test_weave.py
names = count()


@pytest.fixture
def path() -> Iterator[str]:
    path = channel_path(f"faults-{os.getpid()}-{next(names)}")
    yield path
    Path(path).unlink(missing_ok=True)


@pytest.mark.slow
def test_forty_random_faults(tmp_path: Path) -> None:
    out = tmp_path / "soak.jsonl"
    options = ("--faults", "40", "--seed", "7", "--deadline", "0.5", "--out", out)
    ran(sys.executable, ROOT / "bench/weave_soak.py", *options)
    found = json.loads(out.read_text().splitlines()[-1])
    assert found["faults"] == found["back"] == 40 and found["noticed"] >= 16 and found["guests_lost"] > 16
    assert found["wrong"] == found["failed_steps"] == found["hangs"] == found["crashed_receivers"] == 0


def test_a_lost_guest_leaves_others_alone(tiny: Callable[..., Path], path: str) -> None:
    """Guests of two receivers, one after the other, have the same place and generation there."""
    model, prompts = tiny("llama"), {1: tokens(200, 1), 2: tokens(128, 2)}
    with Sequences(model, kv_type=BF16) as hot:
        hot.step({2: prompts[2]})
        expected = hot.step({2: [700]})[2]
    with Sequences(model, channels=[path], first_guest=1, kv_type=BF16, deadline_s=5.0) as hot:
        with Receiver(path, 64 * MIB):
            hot.step({1: prompts[1]})
        hot.step({0: [500]})  # its receiver is gone
        with Receiver(path, 64 * MIB):
            end = time.monotonic() + 30
            while hot.stats["n_guests"] < 2:
                assert time.monotonic() < end
                hot.remove(2)
                hot.step({2: prompts[2]})
            hot.remove(1, 50)
            found = hot.step({2: [700]})[2]
            assert hot.stats["n_lost"] == 0
    assert nmse(found, expected) < 1e-6


def test_another_receiver_where_there_is_no_room_at_home(tiny: Callable[..., Path], path: str) -> None:
    model, home, guest = tiny("llama"), tokens(200, 1), tokens(150, 2)
    other = f"{path}-other"
    with Sequences(model, kv_type=BF16) as hot:
        hot.step({1: guest})
        expected = [hot.step({1: [token]})[1] for token in (700, 701)]
    options: dict[str, Any] = {"channels": [path, other], "first_guest": 1, "n_ctx": 256, "deadline_s": 5.0}
    with Sequences(model, kv_type=BF16, **options) as hot, Receiver(other, 32 * MIB) as second:
        with Receiver(path, 64 * MIB) as first:
            hot.step({0: home})
            hot.step({1: guest})
            assert (first.stats()["n_sequences"], second.stats()["n_sequences"]) == (1, 0)
        found = [hot.step({1: [700]})[1]]
        assert second.stats()["n_sequences"] == 1 and hot.stats["n_lost"] == 1
        second.close()
        with pytest.raises(OallamaError, match="llama_decode returned 1"):
            hot.step({1: [701]})
        with Receiver(other, 32 * MIB) as third:  # nothing of it is lost
            end = time.monotonic() + 30
            while third.stats()["n_sequences"] == 0 and time.monotonic() < end:
                try:
                    found.append(hot.step({1: [701]})[1])
                except OallamaError:
                    time.sleep(0.05)
        hot.step({0: [500]})
    assert all(nmse(one, correct) < 1e-6 for one, correct in zip(found, expected, strict=True))


def test_sleepers_give_their_memory_back(tiny: Callable[..., Path], path: str) -> None:
    """A receiver that wants its memory back gets that of sequences which are in no batch, too."""
    model, prompts = tiny("llama"), {0: tokens(20, 1), 3: tokens(30, 2)}
    with Sequences(model, kv_type=BF16) as hot:
        hot.step(prompts)
        expected = hot.step({3: [700]})[3]
    with Receiver(path, 64 * MIB) as cold, Sequences(model, channels=[path], kv_type=BF16, deadline_s=5.0) as hot:
        hot.step(prompts)
        assert cold.stats()["n_sequences"] == 2
        cold.drain()
        hot.step({0: [600]})
        assert cold.stats()["n_sequences"] == 0 and cold.stats()["free_nbytes"] == 64 * MIB
        found = hot.step({3: [700]})[3]
    assert nmse(found, expected) < 1e-6


ATTACH = """if True:
    import sys, time
    from oallama.weave import Sender
    sender = Sender(sys.argv[1])
    sender.reserve(sender.open(n_layers=1, max_tokens=64, k_width=64, v_width=64), 64)
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_guests_of_a_killed_sender_are_forgotten(path: str) -> None:
    with Receiver(path, MIB) as receiver:
        with program(ATTACH, path):
            assert receiver.stats()["n_sequences"] == 1
        until(lambda: receiver.stats()["n_sequences"] == 0 and receiver.stats()["free_nbytes"] == MIB)


def test_a_stopped_receiver_holds_nobody_up(path: str) -> None:
    """Who attaches waits as long as there are signs of life, or for half of the deadline."""
    with receiver(path, 1 << 28, 1 << 17) as process:
        strike(process, signal.SIGSTOP)
        with pytest.raises(OallamaError, match="no sign of life"):
            Sender(path, deadline_s=1.0, attach_s=20.0)


def test_much_work_is_a_sign_of_life(path: str) -> None:
    """Many tasks in a row, none of which takes long: together they take longer than the deadline."""
    deadline_s = 1.0
    with receiver(path, 1 << 28, 1 << 17), Sender(path, deadline_s=deadline_s) as sender:
        types = {"k_type": "bf16", "v_type": "bf16"}
        for n_rows in (1024, 2048, 4096, 8192):
            q, kv = np.ones((n_rows, 16, 64), np.float32), np.ones((n_rows, 2, 64), np.float32)
            sequence = sender.open(n_layers=1, max_tokens=n_rows, k_width=128, v_width=128, **types)
            assert sequence is not None and sender.reserve(sequence, n_rows)
            begin = time.monotonic()
            out = sender.attend(0, [SequenceRows(sequence, 0, n_rows)], q, kv, kv, scale=0.1)
            assert np.allclose(out, 1.0, atol=1e-2)
            if time.monotonic() > begin + deadline_s:
                break


# Adds to a word of the region behind its receiver, which then ends.
DAMAGE = """if True:
    import struct, sys, time
    from oallama.weave import Receiver, Sender
    path, at, layout, change = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    size = struct.calcsize(layout)
    with Receiver(path, 1 << 20):
        Sender(path).close()
        with open(path, "r+b", buffering=0) as file:
            file.seek(at)
            (value,) = struct.unpack(layout, file.read(size))
            file.seek(at)
            file.write(struct.pack(layout, (value + change) % (1 << 8 * size)))
        time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("word", "change"), [("epoch", 1), ("accepted", 1), ("done", 1), ("done", -1), ("tail", -1), ("tail", 1 << 30)]
)
def test_no_word_keeps_a_receiver_busy(word: str, change: int, path: str) -> None:
    at, nbytes = layout().words[word]
    ran_python(DAMAGE, path, str(at), {4: "<I", 8: "<Q"}[nbytes], str(change), timeout=20)


def test_a_damaged_state_does_not_last(path: str) -> None:
    with Receiver(path, MIB), Sender(path, deadline_s=5.0) as sender, open(path, "r+b", buffering=0) as file:
        file.seek(layout().words["state"][0])
        file.write(struct.pack("<I", 77))
        until(lambda: sender.wants_guests)


MOUNT = 'mount -t tmpfs -o size=1M none "$1" && exec "${@:2}"'
FILL = """if True:
    import sys
    import numpy as np
    from oallama.errors import OallamaError
    from oallama.weave import Receiver, Sender, SequenceRows
    try:
        with Receiver(sys.argv[1] + "/channel", 1 << 26), Sender(sys.argv[1] + "/channel", deadline_s=5.0) as sender:
            sequence = sender.open(n_layers=1, max_tokens=2000, k_width=512, v_width=512)
            rows = np.ones((2000, 8, 64), np.float32)
            sender.reserve(sequence, 2000)
            sender.attend(0, [SequenceRows(sequence, 0, 2000)], rows, rows, rows, scale=1.0)
    except OallamaError as error:
        print(error)
"""


def test_shared_memory_that_is_full_is_an_error(tmp_path: Path) -> None:
    """As in a container, whose /dev/shm has 64 MB: no signal may end the process at its first write."""
    mounted = ["unshare", "--map-root-user", "--mount", "bash", "-c", MOUNT]
    command = [*mounted, "-", str(tmp_path)]
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a small tmpfs")
    done = ran(*command, sys.executable, "-c", FILL, tmp_path, timeout=60)
    assert "No space left on device" in done.stdout
