"""A GGUF with real shapes and metadata whose weights are a hole in the file: for parsing and planning only."""

from __future__ import annotations

import os
from pathlib import Path

from .gguf_header import pack_header, padded
from .metadata import model_metadata
from .partial_file import complete_or_absent
from .quant_types import FILE_TYPES, choose_types, n_bytes
from .shapes import resolve
from .tensors import tensors_of
from .vocab import load_vocab


def make_sparse_model(path: str | os.PathLike[str], *, shape: str, file_type: str = "F16") -> Path:
    """Write the file `make_model` would write for a published shape, without its data; it takes no disk space.

    Raises:
        OallamaError: an unknown name, or a path that cannot be written.
    """
    hyper = resolve(None, shape, None)
    vocab = load_vocab(hyper.arch, hyper.n_vocab)
    specs = tensors_of(hyper)
    types = choose_types(hyper, specs, file_type)
    sizes = [n_bytes(spec, kind) for spec, kind in zip(specs, types, strict=True)]
    metadata = model_metadata(hyper, specs, f"{shape} sparse", FILE_TYPES[file_type][0]) | vocab.metadata()
    header = pack_header(metadata, [(s.name, s.ne, t, n) for s, t, n in zip(specs, types, sizes, strict=True)])
    with complete_or_absent(Path(path), len(header)) as file:
        file.write(header)
        file.truncate(len(header) + sum(map(padded, sizes)))
    return Path(path)
