"""A file that appears under its name only when it is complete; whatever goes wrong, a file that was there stays."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import OallamaError

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def complete_or_absent(path: Path, size: int) -> Iterator[BinaryIO]:
    """Open `<path>.partial-<pid>` for size bytes; rename it to path at the end, remove it on any error or Ctrl-C.

    Raises:
        OallamaError: path cannot be a file, its folder is missing or not writable, or the disk has too little space.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        _check(path, size)
        try:
            with open(partial, "wb", buffering=0) as file:
                yield file
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in _FULL:
            raise _full(path, size) from None
        raise OallamaError(f"cannot write {path}: {error.strerror or error}") from None


def _check(path: Path, size: int) -> None:
    if path.exists() and not path.is_file():
        raise OallamaError(f"{path} is {'a directory' if path.is_dir() else 'not a regular file'}: name a file")
    if not path.parent.is_dir():
        raise OallamaError(f"folder {path.parent} does not exist: create it or choose another one")
    if shutil.disk_usage(path.parent).free < size:
        raise _full(path, size)


def _full(path: Path, size: int) -> OallamaError:
    free = shutil.disk_usage(path.parent).free
    return OallamaError(
        f"not enough disk space for {path}: {_bytes(size)} needed, {_bytes(free)} free; make room, "
        "or choose another folder, a smaller shape or a smaller file type"
    )


def _bytes(n: int) -> str:
    return f"{n} bytes ({n / 2**30:.2f} GiB)"
