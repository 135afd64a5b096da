"""Where the checkout is."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tests" / "native"  # C++ sources of tests
