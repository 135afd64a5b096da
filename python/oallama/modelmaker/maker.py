"""Puts a model file together: shape, tokenizer, tensor types, data, and a file that is complete or absent."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from gguf import TokenType

from ..errors import OallamaError
from .gguf_header import pack_header, padded
from .metadata import model_metadata
from .partial_file import complete_or_absent
from .quant_types import FILE_TYPES, choose_types, n_bytes
from .routing import Routing, route
from .shapes import resolve
from .tensors import tensors_of
from .vocab import load_vocab
from .weights import Weights


def make_model(
    path: str | os.PathLike[str],
    *,
    arch: str | None = None,
    shape: str = "tiny",
    file_type: str = "F16",
    seed: int = 0,
    overrides: Mapping[str, int] | None = None,
    vocab_dir: str | os.PathLike[str] | None = None,
    routing: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a GGUF model with random weights and a real tokenizer, and return its path.

    The same arguments give the same bytes (quantised: with the same build of the engine). A file already at path is
    replaced when the new one is complete.

    Args:
        path: the file to write; its folder must exist.
        arch: one of ARCHITECTURES; default: that of a published shape, else "llama".
        shape: a name in SHAPES[arch]: "tiny" (a few MB), "small" or a published size.
        file_type: "F16", "Q8_0", "Q4_0", "MXFP4" (experts; the rest is Q8_0) or "Q4_K_M"; all but F16 need the
            engine's library.
        seed: non-negative integer.
        overrides: hyper-parameters of the shape to change, e.g. {"n_layer": 8, "n_vocab": 8192}; see OVERRIDES[arch].
        vocab_dir: folder with llama.cpp's ggml-vocab-*.gguf; default: the fetched upstream source.
        routing: "zipf:S" or "zipf:S,locality:L": skew (0 to 4) and locality (0 to 0.98) of the experts' use; routing.py
            has the construction. Default: routers like other random weights.
        progress: called with (bytes written, bytes in all), at least every 16 MiB.
    Raises:
        OallamaError: an unknown name, an impossible override, routing out of range or of a dense model, a path that
            cannot be written, too little disk space.

    Example:
        make_model("m.gguf", shape="llama3-8b", file_type="Q4_K_M", overrides={"n_layer": 4})
    """
    hyper = resolve(arch, shape, overrides)
    if file_type not in FILE_TYPES:
        raise OallamaError(f"unknown file type {file_type!r}: choose one of {', '.join(FILE_TYPES)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise OallamaError(f"seed: expected a non-negative integer, got {seed!r}")
    asked = Routing.parse(routing) if routing is not None else None
    if asked:
        asked.check(hyper)
    target = Path(path)

    vocab = load_vocab(hyper.arch, hyper.n_vocab, Path(vocab_dir) if vocab_dir else None)
    text_tokens = vocab.types == TokenType.NORMAL
    specs = tensors_of(hyper)
    if asked:
        specs = route(specs, hyper, asked, text_tokens, seed)
    types = choose_types(hyper, specs, file_type)
    sizes = [n_bytes(spec, kind) for spec, kind in zip(specs, types, strict=True)]
    name = f"{hyper.arch} {shape} {file_type} seed {seed}" + (f" routing {routing}" if routing else "")
    metadata = model_metadata(hyper, specs, name, FILE_TYPES[file_type][0]) | vocab.metadata()
    header = pack_header(metadata, [(s.name, s.ne, t, n) for s, t, n in zip(specs, types, sizes, strict=True)])
    total = len(header) + sum(map(padded, sizes))
    weights = Weights(specs, types, text_tokens, seed)

    with complete_or_absent(target, total) as file:
        done = 0

        def write(data: bytes | memoryview) -> None:
            nonlocal done
            view = memoryview(data)
            while view:  # an unbuffered file may take less than it is given
                view = view[file.write(view) :]
            done += len(data)
            if progress and data:
                progress(done, total)

        write(header)
        for index, (spec, kind, size) in enumerate(zip(specs, types, sizes, strict=True)):
            for chunk in weights.chunks(spec, kind, index):
                write(chunk)
            write(bytes(padded(size) - size))
    return target
