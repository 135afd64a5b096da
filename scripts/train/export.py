"""Writes trained weights and their tokenizer as a GGUF file, F16."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from oallama.modelmaker.gguf_header import pack_header, padded
from oallama.modelmaker.metadata import model_metadata
from oallama.modelmaker.partial_file import complete_or_absent
from oallama.modelmaker.quant_types import FILE_TYPES, choose_types, n_bytes
from oallama.modelmaker.shapes import Shape
from oallama.modelmaker.tensors import tensors_of

_DESCRIPTION = "tells very short stories and answers questions about them; trained by oallama on text of a grammar"


def write_gguf(path: Path, shape: Shape, weights: Mapping[str, np.ndarray], tokenizer_keys: dict[str, Any]) -> None:
    """Write the model; weights: GGUF name -> [rows, row width] or [width] float32.

    Raises:
        OallamaError: path cannot be written.
    """
    specs = tensors_of(shape)
    types = choose_types(shape, specs, "F16")
    sizes = [n_bytes(spec, kind) for spec, kind in zip(specs, types, strict=True)]
    metadata = model_metadata(shape, specs, "oallama storyteller", FILE_TYPES["F16"][0]) | tokenizer_keys
    metadata["general.description"] = _DESCRIPTION
    header = pack_header(metadata, [(s.name, s.ne, t, n) for s, t, n in zip(specs, types, sizes, strict=True)])
    with complete_or_absent(path, len(header) + sum(map(padded, sizes))) as file:
        file.write(header)
        for spec, size in zip(specs, sizes, strict=True):
            dtype = np.float32 if spec.is_float32 else np.float16
            file.write(np.asarray(weights[spec.name]).astype(dtype).tobytes().ljust(padded(size), b"\0"))
