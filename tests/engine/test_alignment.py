"""Where tensors begin in the CPU's buffers."""

from __future__ import annotations

import ctypes

from oallama.engine import runtime

CACHE_LINE = 64


def test_tensors_begin_at_cache_lines() -> None:
    ggml = ctypes.CDLL(str(runtime.lib_dir() / "libggml-base.so"))
    ggml.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    ggml.ggml_backend_buft_get_alignment.restype = ctypes.c_size_t
    ggml.ggml_backend_buft_get_alignment.argtypes = [ctypes.c_void_p]
    assert ggml.ggml_backend_buft_get_alignment(ggml.ggml_backend_cpu_buffer_type()) == CACHE_LINE
