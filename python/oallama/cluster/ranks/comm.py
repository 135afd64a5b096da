"""All-reduce between ranks on several hosts: the front of `oallama._comm` (csrc/comm).

Every rank of an MPI program makes an `AllReduce` and calls it with arrays of one shape; each array then holds the sum.
Ranks of one host meet in shared memory, hosts through MPI between their fastest ranks (LM); the algorithm is picked by
a model of the links. Needs `mpi4py` and the MPI that oallama was built with. Nothing is loaded before the first use.

A rank that dies or stops makes every other rank raise `CommError` within the timeout, provided that MPI lets them live:
start the program with `mpirun --with-ft ulfm`, else mpirun ends all ranks itself. After a `CommError` the group is
unusable; end the process with `os._exit`, since MPI's own finalisation waits for the ranks that are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from types import ModuleType
from typing import Any, NoReturn, Protocol

import numpy as np

from oallama.base.arrays import as_array
from oallama.errors import OallamaError

from .mpi import INSTALL

DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
ALGORITHMS = {"auto": 0, "star": 1, "tree": 2, "exchange": 3, "rabenseifner": 4, "pipelined": 5}
WIRES = {"native": 0, "q8": 1}


class CommError(OallamaError):
    """An all-reduce failed. `rank`: the rank that caused it, None when it is not one rank."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


@cache
def _native() -> ModuleType:
    try:
        from oallama import _comm
    except ImportError as error:
        raise CommError(f"oallama was built without MPI ({error}): {INSTALL}") from None
    return _comm


def _mpi() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise CommError(f"several ranks need MPI ({error}): {INSTALL}") from None
    return MPI


@dataclass(frozen=True)
class RankLinks:
    """What the model knows of the network and the hosts.

    `alpha`: seconds of a small message between two hosts, one way; `bandwidth`: bytes/s of a host's link, each way;
    `gap`: seconds between two small messages of a rank; `a`: seconds of a hand-over between two ranks of a host; `b`:
    bytes/s that every rank of a host copies when all do at once; `alone`: bytes/s that one rank sums when the others
    wait; `source`: where the numbers are from.
    """

    alpha: float
    bandwidth: float
    gap: float
    a: float
    b: float
    alone: float
    source: str

    @classmethod
    def assumed(cls) -> RankLinks:
        """What `AllReduce` goes by before `probe()`: orders of magnitude of 1 Gbit Ethernet, not a measurement."""
        return cls(**_native().assumed_links())


@dataclass(frozen=True)
class Host:
    """One host: its id, its ranks in ascending order and its local master, the fastest of them."""

    id: str
    ranks: tuple[int, ...]
    lm: int


@dataclass(frozen=True)
class Topology:
    """The hosts in the order of their lowest ranks, and `gm`, the rank of the global master (the fastest LM)."""

    hosts: tuple[Host, ...]
    gm: int
    text: str

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, ranks: Sequence[tuple[str, float]]) -> Topology:
        """From (host id, speed) of every rank; speeds in any unit, of equals the lowest rank is the master.

        Raises:
            CommError: there is no rank, or a speed is not a positive number.
        """
        return cls._from(_checked(_native().topology, list(ranks)))

    @classmethod
    def _from(cls, found: dict[str, Any]) -> Topology:
        hosts = tuple(Host(h["id"], tuple(h["ranks"]), h["lm"]) for h in found["hosts"])
        return cls(hosts, found["gm"], found["text"])


@dataclass(frozen=True)
class AlgorithmTime:
    """What the model expects of an algorithm: `chunk` bytes at a time (0: all), `slices`: all ranks of a host sum."""

    algorithm: str
    chunk: int
    slices: bool
    seconds: float


@dataclass(frozen=True)
class AlgorithmChoice:
    """The model's pick among all algorithms; prints as a table."""

    algorithm: str
    all: tuple[AlgorithmTime, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def choose(n_bytes: int, ranks: Sequence[tuple[str, float]], links: RankLinks, wire: str = "native") -> AlgorithmChoice:
    """The fastest algorithm for `n_bytes` over these ranks by the alpha-beta model. Pure.

    Args:
        ranks: (host id, speed) of every rank, as for `Topology.of`.
        links: measured by `AllReduce.probe`, or `RankLinks.assumed()`.

    Raises:
        CommError: the bytes are negative, the wire is unknown, or `Topology.of` raises it.

    Example:
        >>> print(choose(16384, [("a", 1), ("a", 1), ("b", 1), ("b", 1)], RankLinks.assumed()))
    """
    if n_bytes < 0:
        raise CommError(f"expected a number of bytes, got {n_bytes}")
    numbers = asdict(links)
    numbers.pop("source")
    code = WIRES[wire] if wire in WIRES else _unknown("wire", wire, WIRES)
    found = _checked(_native().choose, n_bytes, list(ranks), *numbers.values(), code)
    return AlgorithmChoice(found["algorithm"], tuple(AlgorithmTime(*p) for p in found["all"]), found["text"])


class Done(Protocol):
    """What an all-reduce did: the algorithm (`auto` resolved), bytes at a time, and whether all ranks summed slices."""

    @property
    def algorithm(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def slices(self) -> bool: ...


class AllReduce:
    """A group of ranks that sum arrays. Making one is a collective: every rank of `comm` must.

    Args:
        comm: an mpi4py communicator; None: MPI.COMM_WORLD.
        host: id of this rank's host; None: its name. Ranks with equal ids must run on one machine.
        speed: of this rank, any unit; the fastest rank of a host is the one that talks to the other hosts.
        timeout_s: no wait goes on for longer. A rank of the own host that gives no sign of life is given up after half
            of it, so that the other hosts hear its name in time.
        area_bytes: shared memory that a rank takes on its host, which has two more of these.

    Raises:
        CommError: MPI or the module is missing (says what to install), the ranks disagree, or memory cannot be shared.

    Source: docs/sources.md, 2, for the tree; csrc/comm/algorithms.h for the others and the errors.

    Example (mpirun -n 4 python program.py):
        >>> group = AllReduce()
        >>> x = np.full(1000, group.rank, np.float32)
        >>> print(group(x))  # every element is now 0 + 1 + 2 + 3
        exchange of 1000 float32 (operation 0)
    """

    def __init__(
        self,
        comm: Any = None,
        *,
        host: str | None = None,
        speed: float = 1.0,
        timeout_s: float = 60.0,
        area_bytes: int = 4 << 20,
    ) -> None:
        mpi = _mpi()
        native = _native()
        self._comm = mpi.COMM_WORLD if comm is None else comm
        address = mpi._addressof(self._comm)
        self._group = _checked(native.AllReduce, address, host or "", speed, timeout_s, area_bytes)
        self._allreduce = self._group.allreduce
        self._error = native.Error
        self.rank: int = self._group.rank
        self.topology = Topology._from(self._group.topology)

    def __call__(self, buffer: Any, algorithm: str = "auto", wire: str = "native", chunk_bytes: int = 0) -> Done:
        """Sum `buffer` over all ranks, in place; the same bits on every rank, in every run.

        Args:
            buffer: a numpy array of float32, float16 or ml_dtypes' bfloat16, or anything with `__dlpack__` on the CPU;
                any shape, contiguous and writable.
            algorithm: one of `ALGORITHMS`.
            wire: "native", or "q8" (float32 only): blocks of 32 in 34 bytes between hosts. With it every host's sum
                is off by at most 1/252 of the largest magnitude of its block of 32 each time it is sent.
            chunk_bytes: of the pipeline; 0: the model's.

        Raises:
            CommError: the buffer is of another kind, the ranks are not at the same operation, a rank is gone or late.
        """
        array = buffer if isinstance(buffer, np.ndarray) else _from_dlpack(buffer)
        dtype = _CODES.get(array.dtype)
        if dtype is None or not (array.flags.c_contiguous and array.flags.writeable):
            dtype = _checked_dtype(array)
        try:
            return self._allreduce(
                array,
                dtype,
                ALGORITHMS[algorithm] if algorithm in ALGORITHMS else _unknown("algorithm", algorithm, ALGORITHMS),
                WIRES[wire] if wire in WIRES else _unknown("wire", wire, WIRES),
                chunk_bytes,
            )
        except self._error as error:
            raise _comm_error(error) from None

    @property
    def links(self) -> RankLinks:
        """What `auto` goes by."""
        return RankLinks(**self._group.links)

    @links.setter
    def links(self, links: RankLinks) -> None:
        """Must be set to the same on every rank."""
        self._group.set_links(*asdict(links).values())

    def probe(self) -> RankLinks:
        """Measure the links, a collective; `auto` goes by them from then on.

        Between hosts: round trips of 1 KiB to 1 MiB between the GM and every LM in turn; inside: small and large sums
        in shared memory. The slowest pair and the slowest host count. Takes about a second on a 1 Gbit link.
        """
        return RankLinks(**_checked(self._group.probe))

    def abort(self, why: str) -> None:
        """End the operation that is going on with a CommError on every rank. From any thread."""
        self._group.abort(why)


# Of types that have come; bfloat16 is known to numpy only where ml_dtypes was imported.
_CODES: dict[Any, int] = {}


def _checked_dtype(array: np.ndarray) -> int:
    """The number of an array's type."""
    if array.dtype.name not in DTYPES or not array.dtype.isnative:
        raise CommError(f"expected an array of {', '.join(DTYPES)}, got {array.dtype}")
    if not array.flags.c_contiguous:
        raise CommError(f"expected a contiguous array, got strides {array.strides} for shape {array.shape}")
    if not array.flags.writeable:
        raise CommError("expected an array that can be written, got a read-only one")
    return _CODES.setdefault(array.dtype, DTYPES[array.dtype.name])


def _from_dlpack(buffer: Any) -> np.ndarray:
    try:
        return as_array(buffer)
    except TypeError as error:
        raise CommError(str(error)) from None


def _unknown(what: str, name: str, known: dict[str, int]) -> NoReturn:
    raise CommError(f"{what} must be one of {', '.join(known)}, got {name!r}")


def _comm_error(error: Any) -> CommError:
    message, rank = error.args
    return CommError(message, rank if rank >= 0 else None)


def _checked(call: Any, *arguments: Any) -> Any:
    """A call of the native module; its error becomes CommError."""
    try:
        return call(*arguments)
    except _native().Error as error:
        raise _comm_error(error) from None
