"""Writes trained weights and their tokenizer as a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize

from oallama.modelmaker.encoder import encode
from oallama.modelmaker.gguf_header import pack_header, padded
from oallama.modelmaker.metadata import model_metadata
from oallama.modelmaker.partial_file import complete_or_absent
from oallama.modelmaker.quant_types import FILE_TYPES
from oallama.modelmaker.tensors import TensorSpec, tensors_of
from recipes import Recipe

_DESCRIPTION = "tells very short stories and answers questions about them; trained by oallama on text of a grammar"


def write_gguf(path: Path, recipe: Recipe, weights: Mapping[str, np.ndarray], tokenizer_keys: dict[str, Any]) -> None:
    """Write the model; weights: GGUF name -> [rows, row width], [experts, rows, row width] or [width] float32.

    Raises:
        OallamaError: path cannot be written, or a quantised type needs the engine's library and it is missing.
    """
    specs = tensors_of(recipe.shape)
    types = [type_of(spec, recipe) for spec in specs]
    data = [stored(np.asarray(weights[spec.name]), kind).tobytes() for spec, kind in zip(specs, types, strict=True)]
    metadata = model_metadata(recipe.shape, specs, f"oallama {recipe.name}", FILE_TYPES[recipe.experts][0])
    metadata |= tokenizer_keys | {"general.description": _DESCRIPTION}
    header = pack_header(metadata, [(s.name, s.ne, t, len(d)) for s, t, d in zip(specs, types, data, strict=True)])
    with complete_or_absent(path, len(header) + sum(padded(len(piece)) for piece in data)) as file:
        file.write(header)
        for piece in data:
            file.write(piece.ljust(padded(len(piece)), b"\0"))


def type_of(spec: TensorSpec, recipe: Recipe) -> GGMLQuantizationType:
    """Return the type of a tensor in the file."""
    if spec.is_float32:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType[recipe.experts if len(spec.ne) == 3 else recipe.other]


def stored(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return float32 values in a type: [.., bytes of a row] uint8, or floats."""
    if kind == GGMLQuantizationType.F32:
        return values.astype(np.float32)
    if kind == GGMLQuantizationType.F16:
        return values.astype(np.float16)
    return encode(kind, values.astype(np.float32).ravel(), 1.0).reshape(*values.shape[:-1], -1)


def read_back(weights: Mapping[str, np.ndarray], recipe: Recipe) -> dict[str, np.ndarray]:
    """Return the weights as the file has them, float32."""
    kinds = {spec.name: type_of(spec, recipe) for spec in tensors_of(recipe.shape)}
    return {name: dequantize(stored(np.asarray(w), kinds[name]), kinds[name]) for name, w in weights.items()}
