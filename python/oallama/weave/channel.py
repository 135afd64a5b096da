"""Both sides of a channel, on numpy buffers: usable without a model.

A receiver keeps the K and V of guest sequences in its process's memory and computes their attention; a sender, in
another process, hands it rows. The threads that compute a model's graphs in the receiver's process do the work, after
every operator, and a thread of its own while there is none.

    receiver = Receiver(channel_path("cold"), quota_nbytes=1 << 30)      # one process
    sender = Sender(channel_path("cold"))                                # another
    sequence = sender.open(n_layers=2, max_tokens=4096, k_width=256, v_width=256)
    sender.reserve(sequence, 64)
    out = sender.attend(0, [SequenceRows(sequence, 0, 3)], q, k, v, scale=0.125)
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oallama.base.arrays import as_array
from oallama.engine import runtime
from oallama.errors import OallamaError

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
DEADLINE_S = 0.1
DEFAULT_PART = 1 << 20
Floats = npt.NDArray[np.float32]
Handle = tuple[int, int]  # place and generation in the receiver's memory


class SequenceRows(NamedTuple):
    """Consecutive rows of an `attend` that are one sequence's tokens position, position + 1, .."""

    sequence: Handle
    position: int
    n_rows: int


def channel_path(name: str) -> str:
    """Where a receiver of this name is found: a file in shared memory that only this user may open."""
    return f"/dev/shm/oallama-weave-{os.geteuid()}-{name}"


class Layout(NamedTuple):
    """Of a channel's file (csrc/weave/protocol.h); places are an offset and a number of bytes."""

    words: dict[str, tuple[int, int]]
    header: dict[str, tuple[int, int]]  # what is written once
    first_slot: int
    line: int  # bytes before a slot's payload


def layout() -> Layout:
    """Where the words lie that both sides share: for tests and tools that look at a channel from outside."""
    return Layout(*_core().weave_layout())


def remove_abandoned() -> None:
    """Remove the files of this user's receivers whose process was killed: they hold memory."""
    for path in Path("/dev/shm").glob(f"oallama-weave-{os.geteuid()}-*"):
        with suppress(OSError), open(path, "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)  # a receiver holds this byte as long as it lives
            path.unlink()


def _core() -> Any:
    runtime.llama_cpp()
    from oallama import _core

    return _core


def alone_kernel(type_k: str, type_v: str, d_k: int, d_v: int) -> int:
    """The number of our kernel that computes rows alone, for caches and heads like these, as `Sender.attend` takes it.

    0: there is none.
    """
    return int(_core().attend_alone(type_k, type_v, d_k, d_v))


class Receiver:
    """Keeps guests' sequences in at most `quota_nbytes`, and computes their attention.

    n_idle: threads that work while no graph is computed. polls: when the threads of graphs look for work: at the end of
    "graphs", after "operators", or also inside of matrix multiplications ("parts"), every `part` multiply-adds.
    task_nbytes, result_nbytes: of one of the n_slots slots; larger tasks are cut. A context manager; within `serving()`
    the threads of this process's graphs take part.

    Raises:
        OallamaError: the path is in use by another receiver, or cannot be made.
    """

    def __init__(
        self,
        path: str,
        quota_nbytes: int,
        *,
        task_nbytes: int = 8 << 20,
        result_nbytes: int = 4 << 20,
        n_slots: int = 4,
        n_idle: int = 1,
        polls: str = "parts",
        part: int = DEFAULT_PART,
    ) -> None:
        core = _core()
        try:
            self._native = core.WeaveReceiver(
                path, quota_nbytes, task_nbytes, result_nbytes, n_slots, n_idle, polls, part
            )
        except core.ChannelError as error:
            raise OallamaError(str(error)) from None

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End; a sender's guests are lost to it."""
        self._native = None

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within the block the threads of this process's CPU graphs work for guests."""
        _core().weave_set_receiver(self._native)
        try:
            yield
        finally:
            _core().weave_set_receiver(None)

    def poll(self) -> None:
        """Do what there is to do, on this thread."""
        self._native.poll()

    def poll_seconds(self, n_polls: int) -> float:
        """Mean seconds of a poll that finds nothing to do."""
        return float(self._native.poll_seconds(n_polls))

    def drain(self, wanted: bool = True) -> None:
        """Ask the sender to take its sequences back before its next step, and to send no more; False: it may again."""
        self._native.drain(wanted)

    def stats(self) -> dict[str, int]:
        """Counts n_tasks, n_refused, n_items, n_epochs, n_looks, n_drains; quota_nbytes, free_nbytes, n_sequences.

        n_epochs: senders that came; n_looks: of graphs' threads for tasks, counted in 64s; n_drains: how often the
        sender was asked to take its sequences back.
        """
        return dict(self._native.stats())


class Sender:
    """Gives rows to the receiver at `path` and fetches their attention.

    deadline_s: of an answer, after which the receiver has failed, as after half of it without a sign of life; attach_s:
    of the first answer. base: number of the task
    before the first. Once it has failed every call raises; a new Sender begins anew.

    Raises:
        OallamaError: no receiver there, another user's, another version of the protocol, a second sender.
    """

    def __init__(self, path: str, *, deadline_s: float = DEADLINE_S, attach_s: float = 2.0, base: int = 0) -> None:
        core = _core()
        self._failed = core.ChannelError
        with self._told():
            self._native = core.WeaveSender(path, attach_s, deadline_s, base)

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End; another sender may come."""
        self._native = None

    def open(
        self, *, n_layers: int, max_tokens: int, k_width: int, v_width: int, k_type: str = "f16", v_type: str = "f16"
    ) -> Handle | None:
        """A sequence at the receiver, without room yet; None: it takes no more.

        k_width, v_width: values of a token's K and V in the largest layer, all heads together.
        """
        with self._told():
            made = self._native.open(n_layers, max_tokens, KV_TYPES[k_type], KV_TYPES[v_type], k_width, v_width)
        return None if made is None else (made[0], made[1])

    def reserve(self, sequence: Handle, n_tokens: int) -> bool:
        """Room for n_tokens of the sequence; False: there is none, or no such sequence."""
        with self._told():
            return bool(self._native.reserve(sequence, n_tokens))

    def trim(self, sequence: Handle, n_tokens: int) -> bool:
        """Give room beyond n_tokens back; of 0, the sequence is forgotten."""
        with self._told():
            return bool(self._native.trim(sequence, n_tokens))

    def attend(
        self,
        layer: int,
        sequences: Sequence[SequenceRows],
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float,
        max_bias: float = 0.0,
        softcap: float = 0.0,
        sinks: Any | None = None,
        tiled: bool = False,
        n_chunks: int = 1,
        n_padded: int = 0,
        own: int = 0,
    ) -> Floats:
        """Append K and V of the rows to their sequences; causal attention of the rows over all of their sequence.

        q: [rows, n_head, d_k], k: [rows, n_head_kv, d_k], v: [rows, n_head_kv, d_v]; returns [rows, n_head, d_v].
        All of them numpy arrays of float32, or anything with `__dlpack__` on the CPU. max_bias: ALiBi's. softcap: of
        the scores, 0: none. sinks: [n_head]. tiled, n_chunks, n_padded: how ggml-cpu would have cut it; own: the
        number of the kernel of ours that computes it in its place, 0: none. They decide about the last bits
        (csrc/weave/protocol.h).

        Raises:
            ValueError: shapes that do not fit each other.
            TypeError: no array of the CPU.
            OallamaError: the receiver has failed.
        """
        q, k, v = as_array(q), as_array(k), as_array(v)
        sinks = None if sinks is None else as_array(sinks)
        rows = _rows(sequences)
        with self._told():
            out: Floats = self._native.attend(
                layer, rows, q, k, v, scale, max_bias, softcap, sinks, tiled, n_chunks, n_padded, own
            )
        return out

    def append(self, layer: int, sequences: Sequence[SequenceRows], k: Any, v: Any) -> None:
        """Append K and V of the rows to their sequences. It waits only where all slots are taken.

        k: [rows, n_head_kv, d_k], v: [rows, n_head_kv, d_v], as in `attend`. What the receiver refuses makes a later
        call fail, at the latest the next `attend`.

        Raises:
            ValueError, TypeError, OallamaError: as `attend`.
        """
        with self._told():
            self._native.append(layer, _rows(sequences), as_array(k), as_array(v))

    @property
    def free_nbytes(self) -> int:
        """What the receiver has left of its quota."""
        return int(self._native.free_nbytes)

    @property
    def wants_guests(self) -> bool:
        """Whether the receiver takes sequences; False: it has failed, ended, or wants its memory back."""
        return bool(self._native.wants_guests)

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for results, and for slots that are free."""
        return float(self._native.waited_s)

    def lives(self) -> bool:
        """Whether the receiver's process lives and has not failed."""
        return bool(self._native.lives())

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except self._failed as error:
            raise OallamaError(str(error)) from None


def _rows(sequences: Sequence[SequenceRows]) -> list[tuple[Handle, int, int]]:
    return [(given.sequence, given.position, given.n_rows) for given in sequences]


@contextmanager
def guests(channels: Sequence[str], first_guest: int = 0, deadline_s: float = DEADLINE_S) -> Iterator[None]:
    """Contexts made within the block may keep sequences from number `first_guest` on with receivers.

    They need flash attention and a unified KV cache. A sequence stays here where no receiver has room; one whose
    receiver fails is computed anew here.
    """
    _core().weave_set_guests(list(channels), first_guest, deadline_s)
    try:
        yield
    finally:
        _core().weave_set_guests([], 0, deadline_s)


def guest_stats(ctx: int) -> dict[str, float]:
    """Of a llama_context by its address: n_guests, n_lost (computed anew here), n_rows and n_appended, waited_s.

    n_rows: rows of layers whose attention was computed elsewhere; n_appended: of which K and V alone were sent.
    """
    return dict(_core().weave_guest_stats(ctx))
