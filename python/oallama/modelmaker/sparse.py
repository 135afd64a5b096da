"""A GGUF with real shapes and metadata whose weights are a hole in the file: for parsing and planning only.

With a chosen routing the routers are stored. So a trace of a model with the same routers holds for it, also where that
model's experts are narrower.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from gguf import TokenType

from .gguf_header import pack_header, padded
from .metadata import model_metadata
from .partial_file import complete_or_absent
from .quant_types import FILE_TYPES, choose_types, n_bytes
from .routing import Routing, route
from .shapes import resolve
from .tensors import TensorSpec, tensors_of
from .vocab import load_vocab

_ROUTER = "ffn_gate_inp.weight"


def make_sparse_model(
    path: str | os.PathLike[str], *, shape: str, file_type: str = "F16", routing: str | None = None, seed: int = 0
) -> Path:
    """Write the file `make_model` would write for a published shape, without its data; it takes no disk space.

    routing, seed: as in `make_model`; the routers of that model are stored, a few MB in all.

    Raises:
        OallamaError: an unknown name, routing out of range or of a dense model, or a path that cannot be written.
    """
    hyper = resolve(None, shape, None)
    asked = Routing.parse(routing) if routing is not None else None
    if asked:
        asked.check(hyper)
    vocab = load_vocab(hyper.arch, hyper.n_vocab)
    specs = tensors_of(hyper)
    if asked:
        specs = route(specs, hyper, asked, vocab.types == TokenType.NORMAL, seed)
    types = choose_types(hyper, specs, file_type)
    sizes = [n_bytes(spec, kind) for spec, kind in zip(specs, types, strict=True)]
    metadata = model_metadata(hyper, specs, f"{shape} sparse", FILE_TYPES[file_type][0]) | vocab.metadata()
    header = pack_header(metadata, [(s.name, s.ne, t, n) for s, t, n in zip(specs, types, sizes, strict=True)])
    with complete_or_absent(Path(path), len(header)) as file:
        file.write(header)
        file.truncate(len(header) + sum(map(padded, sizes)))
        if asked:
            _store_routers(file, len(header), specs, sizes)
    return Path(path)


def _store_routers(file: BinaryIO, start: int, specs: Sequence[TensorSpec], sizes: Sequence[int]) -> None:
    """Their rows, in F32 as in every file type, at their places behind the header."""
    for spec, size in zip(specs, sizes, strict=True):
        if spec.name.endswith(_ROUTER) and spec.rows:
            file.seek(start)
            file.write(spec.rows(0, spec.n_rows).astype("<f4").tobytes())
        start += padded(size)
