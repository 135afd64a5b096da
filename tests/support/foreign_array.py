"""An array as other libraries have them, known by DLPack alone."""

from __future__ import annotations

from typing import Any

import numpy as np


class ForeignArray:
    """On the memory of a numpy array."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()
