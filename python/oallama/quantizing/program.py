"""Talks to llama-quantize, llama.cpp's quantiser, as a child process: Ctrl-C can end it at any time.

Types are given per tensor in a file; what it says about every tensor is read from its log.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..base.children import die_with_parent
from ..engine import runtime
from ..errors import OallamaError
from ..profiling.fingerprint import cpu_set
from .types import type_named

_ROW = re.compile(
    r"\[ *\d+/ *\d+\] (?P<name>\S+) +- \[(?P<ne>[\d, ]+)\], type = +(?P<type>\w+), .*?(?:\((?P<new>\w+)\))?\s*$",
    re.ASCII,
)
_FALLBACK = re.compile(r"warning: (?P<name>\S+) +- ncols .* \(required for type +(?P<type>\w+)\)")
_FAILURE = re.compile(r"failed to (?:quantize: )?(?P<reason>.+)")
_CANNOT_WRITE = "iostream error"


@dataclass(frozen=True)
class Row:
    """What the program says about a tensor: its type before and (in a dry run) after.

    ruled_out: the type that should have been, where the tensor's rows are no whole blocks of it.
    """

    name: str
    ne: tuple[int, ...]
    source: str
    written: str
    ruled_out: str | None


def dry_run(source: Path, file_type: str, types: Mapping[str, str] | None, imatrix: Path | None = None) -> list[Row]:
    """Every tensor in the order it would be written.

    Args:
        file_type: one of llama.cpp's; without types it decides about all tensors, with them about those not named.
        types: ggml types by tensor; None leaves everything to the mix of the file type.
        imatrix: importance matrix; mixes go by whether there is one.
    Raises:
        OallamaError: with the program's own reason.
    """
    rows: dict[str, Row] = {}
    ruled_out: dict[str, str] = {}
    with _command(types, imatrix) as command:
        for line in _lines([*command, "--dry-run", str(source), file_type], source):
            if match := _FALLBACK.search(line):
                ruled_out[match["name"]] = type_named(match["type"])
            elif match := _ROW.match(line):
                name, before = match["name"], type_named(match["type"])
                ne = tuple(int(n) for n in match["ne"].split(","))
                after = type_named(match["new"]) if match["new"] else before
                rows[name] = Row(name, ne, before, after, ruled_out.get(name))
    return list(rows.values())


def write(
    source: Path,
    target: Path,
    file_type: str,
    types: Mapping[str, str] | None,
    *,
    imatrix: Path | None,
    requantize: bool,
    n_threads: int,
    done: Callable[[str], None],
) -> None:
    """Write the file; `done` is called with the name of every tensor that is written.

    Raises:
        OSError: when it cannot be written.
        OallamaError: with the program's own reason.
    """
    option = ["--allow-requantize"] if requantize else []
    arguments = [str(source), str(target), file_type, str(n_threads or len(cpu_set()))]
    with _command(types, imatrix) as command:
        for line in _lines([*command, *option, *arguments], source):
            if match := _ROW.match(line):
                done(match["name"])


@contextmanager
def _command(types: Mapping[str, str] | None, imatrix: Path | None) -> Iterator[list[str]]:
    """The program and its options for these types."""
    command = [str(runtime.program("llama-quantize"))]
    if imatrix is not None:
        command += ["--imatrix", str(imatrix)]
    if types is None:
        yield command
        return
    with tempfile.NamedTemporaryFile("w", prefix="oallama-types-", suffix=".txt", encoding="utf-8") as file:
        file.writelines(f"^{re.escape(name)}$={type}\n" for name, type in types.items())
        file.flush()
        yield [*command, "--pure", "--tensor-type-file", file.name]


def _lines(command: list[str], source: Path) -> Iterator[str]:
    """What the program says, line by line, while it runs; it ends with the iteration, however that ends."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for us
        preexec_fn=die_with_parent,
    )
    failed = ""
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if not failed and (match := _FAILURE.search(line)):
                failed = match["reason"]
            yield line
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
    if process.returncode:
        if _CANNOT_WRITE in failed:
            # The program does not say why; nearly always there is no room.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise OallamaError(f"{source}: llama-quantize failed: {failed or f'exit code {process.returncode}'}")
