"""A model file's metadata and vocabulary as llama.cpp reads them, without tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oallama.engine import runtime
from oallama.engine.model_file import check_gguf
from oallama.errors import OallamaError


@contextmanager
def outline(path: str | Path) -> Iterator[Any]:
    """llama_model without tensors.

    Raises:
        OallamaError: for a file that is missing, no GGUF, or whose vocabulary llama.cpp cannot read.
    """
    check_gguf(path)
    llama_cpp = runtime.llama_cpp()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise OallamaError(f"{path}: llama.cpp cannot read its vocabulary; see OALLAMA_DEBUG=1")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def metadata(model: Any, key: str) -> str:
    """Value of a scalar key of a llama_model; "" without it."""
    buffer = ctypes.create_string_buffer(256)
    runtime.llama_cpp().llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode(errors="replace")


# llama.cpp's numbers of how it makes one embedding of a text.
_POOLING = {"1": "mean", "2": "cls", "3": "last", "4": "rank"}


def pooling_of(path: str | Path) -> str:
    """How a model made for embeddings pools them: "mean", "cls", "last" or "rank"; "" for a model that generates.

    Raises:
        OallamaError: as `outline`.
    """
    with outline(path) as model:
        arch = metadata(model, "general.architecture")
        return _POOLING.get(metadata(model, f"{arch}.pooling_type"), "")
