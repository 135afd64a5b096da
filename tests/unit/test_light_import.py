"""The command line is imported without the engine, so that help and wrong arguments need none."""

from __future__ import annotations

import subprocess
import sys


def test_the_command_line_loads_no_engine() -> None:
    program = "import sys, oallama.cli.app; print({'llama_cpp', 'oallama._core'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
