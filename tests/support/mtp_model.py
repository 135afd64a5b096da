"""Tiny models with MTP heads: upstream's tiny model of an architecture, its last layer once more as each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

from oallama.modelmaker.gguf_header import pack_header, padded, read_metadata
from support.archs import write_models

Tensor = tuple[str, tuple[int, ...], GGMLQuantizationType, bytes]


def mtp_model(folder: Path, arch: str, n_heads: int = 1, says: int | None = None) -> Path:
    """Upstream's tiny model of an architecture, with random weights and so many heads.

    says: heads that its metadata has; default: those that are there.
    """
    models = write_models(folder / "trunks", f"^{arch}$")
    moe = [path for path in models if "moe" in path.stem.removeprefix(arch)]  # heads of most have experts
    return add_heads((moe or models)[0], folder / f"{arch}-{n_heads}-heads.gguf", n_heads, says)


def add_heads(source: Path, path: Path, n_heads: int, says: int | None = None) -> Path:
    metadata = read_metadata(source)
    arch = metadata["general.architecture"].decode()
    n_layer, n_embd = metadata[f"{arch}.block_count"], metadata[f"{arch}.embedding_length"]
    told = n_heads if says is None else says
    each = {key: _longer(value, n_layer, told) for key, value in metadata.items()}
    each |= {f"{arch}.block_count": n_layer + told, f"{arch}.nextn_predict_layers": told}
    tensors: list[Tensor] = [
        (t.name, tuple(int(n) for n in t.shape), t.tensor_type, t.data.tobytes()) for t in GGUFReader(source).tensors
    ]
    last = f"blk.{n_layer - 1}."
    layer = [tensor for tensor in tensors if tensor[0].startswith(last)]
    for il in range(n_layer, n_layer + n_heads):
        tensors += [(f"blk.{il}.{name.removeprefix(last)}", *rest) for name, *rest in layer]  # type: ignore[misc]
        tensors += _projections(f"blk.{il}.nextn", n_embd, il)
    data = [content.ljust(padded(len(content)), b"\0") for *_, content in tensors]
    header = pack_header(each, [(name, ne, kind, len(content)) for name, ne, kind, content in tensors])
    path.write_bytes(header + b"".join(data))
    return path


def _projections(prefix: str, n_embd: int, seed: int) -> list[Tensor]:
    """What joins the embedding of a token and the hidden state before it."""
    rng = np.random.default_rng(seed)
    joins = rng.normal(0, (2 * n_embd) ** -0.5, (n_embd, 2 * n_embd)).astype(np.float32)
    ones = np.ones(n_embd, np.float32).tobytes()
    f32 = GGMLQuantizationType.F32
    norms: list[Tensor] = [
        (f"{prefix}.{what}.weight", (n_embd,), f32, ones) for what in ("enorm", "hnorm", "shared_head_norm")
    ]
    return [(f"{prefix}.eh_proj.weight", (2 * n_embd, n_embd), f32, joins.tobytes()), *norms]


def _longer(value: Any, n_layer: int, n_heads: int) -> Any:
    """Lists with an entry a layer get one for each head."""
    if not isinstance(value, np.ndarray):
        return value
    more = np.concatenate([value, np.repeat(value[-1:], n_heads)]) if len(value) == n_layer else value
    return more.astype(np.float32 if more.dtype.kind == "f" else np.int32)
