"""The command line as tests start it."""

from __future__ import annotations

import sys

CLI = [sys.executable, "-c", "from oallama.cli import main; main()"]
