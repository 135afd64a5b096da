"""A model file as a user names it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from oallama.errors import OallamaError


def check_gguf(path: str | Path) -> Path:
    """The path, if a GGUF file lies there.

    Raises:
        OallamaError: for a missing file, a directory, no read permission, or a file of another kind.
    """
    path = Path(path)
    if path.is_dir():
        raise OallamaError(f"{path} is a directory; expected a .gguf file")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError as err:
        raise OallamaError(f"no such model file: {path}") from err
    except OSError as err:
        raise OallamaError(f"cannot read {path}: {err.strerror}") from err
    if magic != b"GGUF":
        raise OallamaError(f"{path} is not a GGUF file (it begins with {magic!r}); convert or download it again")
    return path


def identity(path: str | os.PathLike[str]) -> tuple[object, ...]:
    """The file as it is now: another tuple when it was written anew."""
    with suppress(OSError):
        found = os.stat(path)
        return os.fspath(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return (os.fspath(path),)
