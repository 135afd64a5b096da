"""How many rows a task of a channel takes (csrc/weave/rules.h): no row may be cut off, none may be left over."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from oallama.weave import Receiver, Sender, SequenceRows, channel_path

N_HEAD, WIDTH = 1024, 8
PAYLOAD = 17 * 4096 - 128  # bytes of a slot: two rows, but not beside the sinks of so many heads


def attended(task_nbytes: int) -> np.ndarray:
    """Of two rows of a new sequence, with sinks."""
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, N_HEAD, WIDTH), dtype=np.float32)
    k, v = (rng.standard_normal((2, 1, WIDTH), dtype=np.float32) for _ in "kv")
    sinks = rng.standard_normal(N_HEAD, dtype=np.float32)
    path = channel_path(f"rules-{os.getpid()}-{task_nbytes}")
    with Receiver(path, 1 << 20, task_nbytes=task_nbytes), Sender(path, deadline_s=5.0) as sender:
        sequence = sender.open(n_layers=1, max_tokens=64, k_width=WIDTH, v_width=WIDTH, k_type="f32", v_type="f32")
        assert sequence is not None and sender.reserve(sequence, 2)
        out = sender.attend(0, [SequenceRows(sequence, 0, 2)], q, k, v, scale=0.3, sinks=sinks)
    assert not Path(path).exists()
    return np.array(out)


def test_sinks_count_as_bytes_of_a_task() -> None:
    assert np.array_equal(attended(PAYLOAD), attended(1 << 20))
