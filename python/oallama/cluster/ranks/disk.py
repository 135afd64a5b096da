"""How fast a folder's disk is read, past the page cache: what ranks with `--memory minimal` wait for."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

NBYTES = 64 << 20
_PIECE = 4 << 20


def read_rate(folder: Path, nbytes: int = NBYTES) -> float | None:
    """Bytes per second of reading a file of random bytes from the start to the end.

    None where the disk cannot be read past the page cache, or has no room for the file.
    """
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        piece = os.urandom(_PIECE)
        for _ in range(nbytes // _PIECE):
            os.write(file, piece)
        os.fsync(file)
        direct = os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        os.close(file)
        return None
    try:
        with mmap.mmap(-1, _PIECE) as buffer:  # O_DIRECT wants a page's alignment
            begin = time.perf_counter()
            for at in range(0, nbytes, _PIECE):
                os.preadv(direct, [buffer], at)
            return nbytes / (time.perf_counter() - begin)
    except OSError:
        return None
    finally:
        os.close(direct)
        os.close(file)
