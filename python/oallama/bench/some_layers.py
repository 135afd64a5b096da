"""Models of some layers of a known shape, for measurements of the CPU, and tables that keep all of one there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from oallama.modelmaker import make_model

from .script import note

N_VOCAB = 32000


def made(names: Iterable[str], n_layer: int) -> Iterator[tuple[str, Path]]:
    """(name, file) of each SHAPE:TYPE, such as "llama3-8b:Q4_0", with random weights, so many layers and 32000 words.

    A file lies in a folder of its own, which is gone when the next one is asked for.
    """
    for name in names:
        shape, file_type = name.split(":")
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / f"{shape}-{file_type}.gguf"
            note(f"{name}: making the model")
            make_model(model, shape=shape, file_type=file_type, overrides={"n_layer": n_layer, "n_vocab": N_VOCAB})
            yield name, model


def cpu_map(model: Path, n_layer: int, realisation: Callable[[Any], str]) -> str:
    """A backend map with all on the CPU. realisation: of a matrix, given its tensor as gguf reads it."""
    lines = ["# oallama backend map v1", *(f"layer {il} CPU" for il in range(n_layer + 1))]
    for tensor in GGUFReader(model).tensors:
        matrix = len(tensor.shape) == 2 and tensor.name != "token_embd.weight"
        lines.append(f"tensor {tensor.name} CPU host {realisation(tensor) if matrix else ''}".rstrip())
    return "\n".join(lines) + "\n"
