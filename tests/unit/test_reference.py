"""The pages of docs/reference are those that the command line gives."""

from __future__ import annotations

import subprocess
import sys

from support.paths import ROOT


def test_pages_of_commands_are_not_stale() -> None:
    program = [sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
