"""A program of ours that aborts says where by itself, and starts no debugger."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oallama.base.environment import DEBUGGER
from oallama.engine import runtime

ABORT = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).ggml_abort(b'here.c', 7, b'nothing %s', b'works')"


@pytest.mark.parametrize("asked", [False, True])
def test_only_who_asks_gets_a_debugger(tmp_path: Path, asked: bool) -> None:
    started = tmp_path / "started"
    for name in ("gdb", "lldb"):
        debugger = tmp_path / name
        debugger.write_text(f"#!/bin/sh\ntouch {started}\n")
        debugger.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in (DEBUGGER.name, "GGML_NO_BACKTRACE")}
    env |= {"PATH": f"{tmp_path}:{env['PATH']}"} | ({DEBUGGER.name: "1"} if asked else {})
    library = str(runtime.lib_dir() / "libggml-base.so")
    done = subprocess.run([sys.executable, "-c", ABORT, library], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGABRT
    assert "here.c:7: nothing works" in done.stderr
    assert started.exists() == asked
    assert ("ggml_abort" in done.stderr) != asked  # the backtrace
