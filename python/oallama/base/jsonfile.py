"""Read and write the project's files, most of them JSON: one-line errors, never half a file in place of a good one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import OallamaError


def read_json_object(path: str | os.PathLike[str], what: str, remedy: str) -> dict[str, Any]:
    """Read the JSON object in `path`.

    `what` names the file's role ("plan") and `remedy` says how to get a good one; both end up in the message.
    Raises OallamaError when the file is missing, unreadable, not JSON or not an object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise OallamaError(f"{what} {path} does not exist; {remedy}") from None
    except IsADirectoryError:
        raise OallamaError(f"{what} {path} is a directory, expected a JSON file; {remedy}") from None
    except UnicodeDecodeError:
        raise OallamaError(f"{what} {path} is not JSON (it is not text); {remedy}") from None
    except OSError as e:
        raise OallamaError(f"cannot read {what} {path}: {e.strerror}; {remedy}") from None
    return parse_json_object(text, f"{what} {path}", remedy)


def parse_json_object(text: str, what: str, remedy: str) -> dict[str, Any]:
    """Parse `text` as a JSON object; raises OallamaError with the position of the first mistake."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as e:
        where = f" (line {e.lineno}: {e.msg})" if isinstance(e, json.JSONDecodeError) else ""
        raise OallamaError(f"{what} is not valid JSON{where}; {remedy}") from None
    if not isinstance(value, dict):
        raise OallamaError(f"{what} holds a JSON {type(value).__name__}, expected an object; {remedy}")
    return value


def write_text_atomic(path: str | os.PathLike[str], text: str, what: str) -> None:
    """Write `text` aside and rename it over `path`; folders are made as needed.

    Raises OallamaError naming the path when there is no permission or no space; the old file is then untouched.
    """
    write_bytes_atomic(path, text.encode(), what)


def write_bytes_atomic(path: str | os.PathLike[str], content: bytes, what: str) -> None:
    """As `write_text_atomic`."""
    target = Path(path).resolve()  # a link keeps pointing at its file
    if target.exists() and not target.is_file() and not target.is_dir():
        # A device or a pipe, /dev/stdout for one: renaming over it would replace it.
        target.write_bytes(content)
        return
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(aside, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, target)
    except OSError as e:
        raise OallamaError(
            f"cannot write {what} {target}: {e.strerror}; choose a folder you may write to that has free space"
        ) from None
    finally:
        # After a success the name is gone; after an error or Ctrl-C it must not stay behind.
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Within the block no other process is in one for this folder: read its files, change them, write them.

    The folder is made as needed. Raises OallamaError, for `what` that cannot be written, where it cannot be.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise OallamaError(
            f"cannot write {what} in {folder}: {e.strerror}; choose a folder you may write to that has free space"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
