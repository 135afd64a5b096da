"""The native module `oallama._core`, loaded at the first use, not at import."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType

from oallama.engine import runtime
from oallama.errors import OallamaError


@cache
def core() -> ModuleType:
    """The native module, with llama-cpp-python bound to the same libllama.

    Raises:
        OallamaError: GGML_BACKEND_PATH names a library that is no backend; llama.cpp's programs load it, too.
    """
    runtime.llama_cpp()
    from oallama import _core

    path = os.environ.get("GGML_BACKEND_PATH")
    if path and not _core.load_backend(path):
        raise OallamaError(f"cannot load the backend that GGML_BACKEND_PATH names: {path}")
    return _core
