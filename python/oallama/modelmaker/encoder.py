"""Turns float32 values into the blocks of a ggml type, over all processor cores.

F16 is numpy's; quantised blocks come from llama.cpp's own quantiser (ggml_quantize_chunk in libggml-base), so that
they are what llama-quantize would have written for these values.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import OallamaError

_CHUNK = 1 << 18  # values per task: a multiple of every block size, and 1 MiB of float32 fits a cache


def encode(ggml_type: GGMLQuantizationType, values: np.ndarray, scale: float) -> np.ndarray:
    """Return scale * values in ggml_type.

    Args:
        values: [n] float32, n a multiple of the type's block size.
    Returns:
        [n / block size, bytes per block] uint8.
    Raises:
        OallamaError: the engine's library is needed and cannot be loaded.
    """
    block, size = GGML_QUANT_SIZES[ggml_type]
    out = np.empty((len(values) // block, size), np.uint8)
    quantize = None if ggml_type == GGMLQuantizationType.F16 else _quantizer()

    def task(start: int) -> None:
        chunk = values[start : start + _CHUNK] * np.float32(scale)
        target = out[start // block : (start + len(chunk)) // block]
        if quantize is None:
            target.view(np.float16)[:, 0] = chunk
        else:
            quantize(int(ggml_type), chunk.ctypes.data, target.ctypes.data, 0, len(chunk) // block, block, None)

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy and ctypes both release the interpreter's lock
        list(pool.map(task, range(0, len(values), _CHUNK)))
    return out


@lru_cache(maxsize=1)
def _quantizer() -> Callable[..., int]:
    from ..engine.runtime import lib_dir  # not at the top: an F16 file must not need the engine

    path = lib_dir() / "libggml-base.so"
    try:
        function = ctypes.CDLL(str(path)).ggml_quantize_chunk
    except OSError as error:
        raise OallamaError(
            f"quantised files need the engine's {path} ({error}): run `make setup`, or choose the file type F16"
        ) from None
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return function
