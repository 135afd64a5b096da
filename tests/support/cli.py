"""The command line as tests start it: a process per command, forked from one that has imported everything already."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

# A real one, for commands that are sent signals, or talked to while they run.
CLI = [sys.executable, "-c", "from oallama.cli import main; main()"]


@cache
def _parent() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "support.cli"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)  # at the end of its input it ends
    return process


def oallama(
    *arguments: str | Path, stdin: str = "", env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What `oallama ARGUMENTS` did. env: in place of this process's."""
    parent, words = _parent(), [str(word) for word in arguments]
    assert parent.stdin is not None and parent.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        pipes = [f"{folder}/{name}" for name in ("stdin", "stdout", "stderr")]
        Path(pipes[0]).write_text(stdin)
        job = {"arguments": words, "pipes": pipes, "env": dict(env or os.environ), "cwd": str(cwd or Path.cwd())}
        try:
            parent.stdin.write(json.dumps(job) + "\n")
            parent.stdin.flush()
            code = int(parent.stdout.readline())
        except BaseException:  # a test's time is over: what it started is of no use to the next one
            parent.kill()
            _parent.cache_clear()
            raise
        said = [Path(pipe).read_text(errors="replace") for pipe in pipes[1:]]
    return subprocess.CompletedProcess(words, code, *said)


def _jobs() -> Iterator[dict[str, Any]]:
    """In the parent nothing comes out of this: every job is given to a child."""
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            yield json.loads(line)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def main() -> None:
    import oallama.cli.app  # noqa: F401
    from oallama.cli import main as oallama_main

    for job in _jobs():
        for number, pipe in enumerate(job["pipes"]):
            os.dup2(os.open(pipe, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT, 0o600), number)
        os.environ.clear()
        os.environ.update(job["env"])
        os.chdir(job["cwd"])
        oallama_main(job["arguments"])
        sys.exit()


if __name__ == "__main__":
    main()
