"""The pages of docs/reference are those that the command line gives."""

from __future__ import annotations

import sys

from support.paths import ROOT
from support.processes import ran


def test_pages_of_commands_are_not_stale() -> None:
    ran(sys.executable, ROOT / "scripts" / "reference.py", "--check")
