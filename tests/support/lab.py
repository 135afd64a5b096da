"""Emulated networks: their tests are long, and measure time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oallama.netlab import missing


def needs_lab(test: Callable[..., None]) -> Callable[..., None]:
    """A mark for tests on hosts that `oallama.netlab` makes."""
    skip = pytest.mark.skipif(bool(missing()), reason=f"netlab {missing()}")
    return pytest.mark.slow(pytest.mark.alone(skip(test)))
