"""A GGUF with real shapes and metadata whose weights are a hole in the file: for parsing and planning, not computing."""

from __future__ import annotations

from pathlib import Path

from oallama.modelmaker.gguf_header import pack_header, padded
from oallama.modelmaker.metadata import model_metadata
from oallama.modelmaker.quant_types import FILE_TYPES, choose_types, n_bytes
from oallama.modelmaker.shapes import resolve
from oallama.modelmaker.tensors import tensors_of
from oallama.modelmaker.vocab import load_vocab


def make_sparse_model(path: Path, shape: str, file_type: str) -> Path:
    """The file `make_model(path, shape=shape, file_type=file_type)` would write, without its data; takes no disk space."""
    hyper = resolve(None, shape, None)
    vocab = load_vocab(hyper.arch, hyper.n_vocab)
    specs = tensors_of(hyper)
    types = choose_types(hyper, specs, file_type)
    sizes = [n_bytes(spec, kind) for spec, kind in zip(specs, types, strict=True)]
    metadata = model_metadata(hyper, specs, f"{shape} sparse", FILE_TYPES[file_type][0]) | vocab.metadata()
    header = pack_header(metadata, [(s.name, s.ne, t, n) for s, t, n in zip(specs, types, sizes, strict=True)])
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(map(padded, sizes)))
    return path
