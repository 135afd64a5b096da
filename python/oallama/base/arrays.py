"""Buffers that callers hand to native code."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_array(buffer: Any) -> np.ndarray:
    """A numpy array as it is; of anything else with `__dlpack__`, an array on its memory.

    Raises:
        TypeError: it is neither, or not in CPU memory.
    """
    if isinstance(buffer, np.ndarray):
        return buffer
    if not hasattr(buffer, "__dlpack__"):
        raise TypeError(f"expected a numpy array or something with __dlpack__, got {type(buffer).__name__}")
    try:
        return np.from_dlpack(buffer)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"expected a buffer in CPU memory that numpy.from_dlpack can take: {error}") from None
