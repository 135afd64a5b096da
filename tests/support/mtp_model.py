"""Tiny models with MTP heads: upstream's of an architecture with more layers, the last one once more as each head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

from oallama.modelmaker.gguf_header import pack_header, padded, read_metadata
from support.archs import write_models

MORE = 4  # layers beyond upstream's two, so that a head is small beside them
Tensor = tuple[str, tuple[int, ...], GGMLQuantizationType, bytes]


def mtp_model(folder: Path, arch: str, n_heads: int = 1, says: int | None = None, sections: bool = False) -> Path:
    """Upstream's tiny model of an architecture, with random weights and so many heads.

    says: heads that its metadata has; default: those that are there. sections: GLM-4.5 with positions of images.
    """
    models = write_models(folder / f"{arch}-trunks", f"^{arch}$")
    moe = [path for path in models if "moe" in path.stem.removeprefix(arch)]  # heads of most have experts
    return add_heads(
        (moe or models)[0], folder / f"{arch}-{n_heads}-heads.gguf", n_heads, says, arch != "glm4moe" or sections
    )


def add_heads(source: Path, path: Path, n_heads: int, says: int | None = None, keeps_sections: bool = False) -> Path:
    metadata = read_metadata(source)
    arch = metadata["general.architecture"].decode()
    n_layer, n_embd = metadata[f"{arch}.block_count"], metadata[f"{arch}.embedding_length"]
    tensors: list[Tensor] = [
        (t.name, tuple(int(n) for n in t.shape), t.tensor_type, t.data.tobytes()) for t in GGUFReader(source).tensors
    ]
    # Layers with recurrent states take turns with others; else only the first one differs.
    period = n_layer if any("ssm" in name for name, *_ in tensors) else 1
    told = n_heads if says is None else says
    like = [*range(n_layer), *(n_layer - period + i % period for i in range(MORE)), *[n_layer - 1] * max(told, n_heads)]
    for il in range(n_layer, n_layer + MORE + n_heads):
        last, is_head = f"blk.{like[il]}.", il >= n_layer + MORE
        for name, *rest in [tensor for tensor in tensors if tensor[0].startswith(last)]:
            if not (is_head and name.endswith("scale")):  # llama.cpp does not skip scales with their weights
                tensors.append((f"blk.{il}.{name.removeprefix(last)}", *rest))  # type: ignore[arg-type]
        tensors += _projections(f"blk.{il}.nextn", n_embd, il) if is_head else []
    # Numbers below zero stand for "none", as without the key.
    kept = {k: v for k, v in metadata.items() if not (isinstance(v, int) and v < 0)}
    if not keeps_sections:
        kept.pop(f"{arch}.rope.dimension_sections", None)
    each = {k: _longer(v, n_layer, like[: n_layer + MORE + told]) for k, v in kept.items()}
    each |= {f"{arch}.block_count": n_layer + MORE + told, f"{arch}.nextn_predict_layers": told}
    _write(path, each, tensors)
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


def with_tokens(source: Path, path: Path, times: int) -> Path:
    """The model with its vocabulary that many times: tokens, rows of the embedding and of the output matrix."""
    metadata, key = read_metadata(source), "tokenizer.ggml.tokens"
    words = metadata[key]
    metadata[key] = [word + b"_%d" % i for i in range(times) for word in words]
    metadata["tokenizer.ggml.scores"] = np.tile(metadata["tokenizer.ggml.scores"], times).astype(np.float32)
    metadata[f"{metadata['general.architecture'].decode()}.vocab_size"] = len(words) * times
    tensors: list[Tensor] = []
    for t in GGUFReader(source).tensors:
        wide = times if t.name in ("token_embd.weight", "output.weight") else 1
        ne = (int(t.shape[0]), *(int(n) * wide for n in t.shape[1:]))
        tensors.append((t.name, ne, t.tensor_type, t.data.tobytes() * wide))
    _write(path, {k: v for k, v in metadata.items() if not isinstance(v, np.ndarray) or v.dtype.kind in "fi"}, tensors)
    return path


def _write(path: Path, metadata: dict[str, Any], tensors: list[Tensor]) -> None:
    data = [content.ljust(padded(len(content)), b"\0") for *_, content in tensors]
    header = pack_header(metadata, [(name, ne, kind, len(content)) for name, ne, kind, content in tensors])
    path.write_bytes(header + b"".join(data))


def _longer(value: Any, n_layer: int, like: list[int]) -> Any:
    """Lists with an entry a layer get one for each new layer."""
    if not isinstance(value, np.ndarray):
        return value
    more = value[like] if len(value) == n_layer else value
    return more.astype(np.float32 if more.dtype.kind == "f" else np.int32)
