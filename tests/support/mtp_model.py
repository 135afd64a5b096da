"""Tiny models with MTP heads: upstream's of an architecture with more layers, and the last one once more as each head
or what mtp_recipes.py says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

from oallama.modelmaker.gguf_header import pack_header, padded, read_metadata
from support.archs import write_models
from support.mtp_recipes import RECIPES, TRUNKS, Recipe, Tensor, finished_head, trunk_of

MORE = 4  # layers beyond upstream's two, so that a head is small beside them


def mtp_model(folder: Path, arch: str, n_heads: int = 1, says: int | None = None, sections: bool = False) -> Path:
    """Upstream's tiny model of an architecture, with random weights and so many heads.

    says: heads that its metadata has; default: those that are there. sections: GLM-4.5 with positions of images.
    """
    trunk = TRUNKS.get(arch, arch)
    models = write_models(folder / f"{arch}-trunks", f"^{trunk}$")
    moe = [path for path in models if "moe" in path.stem.removeprefix(trunk)]  # heads of most have experts
    path = folder / f"{arch}-{n_heads}-heads.gguf"
    return add_heads((moe or models)[0], path, arch, n_heads, says, arch != "glm4moe" or sections)


def add_heads(
    source: Path, path: Path, arch: str, n_heads: int, says: int | None = None, keeps_sections: bool = False
) -> Path:
    read: list[Tensor] = [
        (t.name, tuple(int(n) for n in t.shape), t.tensor_type, t.data.tobytes()) for t in GGUFReader(source).tensors
    ]
    metadata, tensors = trunk_of(arch, read_metadata(source), read)
    n_layer, n_embd = metadata[f"{arch}.block_count"], metadata[f"{arch}.embedding_length"]
    recipe = RECIPES.get(arch) or _usual(n_layer, tensors)
    told = n_heads if says is None else says
    more = [recipe.more[i % len(recipe.more)] for i in range(MORE)]
    like = [*range(n_layer), *more, *[recipe.like] * max(told, n_heads)]
    for il in range(n_layer, n_layer + MORE):
        tensors += _copied(tensors, like[il], "", f"blk.{il}")
    for il in range(n_layer + MORE, n_layer + MORE + n_heads):
        prefix = f"blk.{il}"
        made = [t for layer, pattern in recipe.head for t in _copied(tensors, layer, pattern, prefix)]
        # llama.cpp does not skip scales with their weights.
        made = [t for t in made if not t[0].endswith("scale")] + _projections(f"{prefix}.nextn", n_embd, il)
        tensors += finished_head(arch, prefix, made, n_embd)
    # Numbers below zero stand for "none", as without the key.
    kept = {k: v for k, v in metadata.items() if not (isinstance(v, int) and v < 0)}
    if not keeps_sections:
        kept.pop(f"{arch}.rope.dimension_sections", None)
    each = {k: _longer(v, n_layer, like[: n_layer + MORE + told]) for k, v in kept.items()}
    each |= {f"{arch}.block_count": n_layer + MORE + told, f"{arch}.nextn_predict_layers": told}
    write_model(path, each, tensors)
    return path


def _usual(n_layer: int, tensors: list[Tensor]) -> Recipe:
    """Layers with recurrent states take turns with others; else only the first one differs."""
    is_recurrent = any("ssm" in name for name, *_ in tensors)
    last = n_layer - 1
    return Recipe(tuple(range(n_layer)) if is_recurrent else (last,), ((last, ""),), last)


def _copied(tensors: list[Tensor], layer: int, pattern: str, prefix: str) -> list[Tensor]:
    """The weights of a layer whose names match, under other names."""
    old = f"blk.{layer}."
    found = [(name.removeprefix(old), rest) for name, *rest in tensors if name.startswith(old)]
    return [(f"{prefix}.{name}", *rest) for name, rest in found if re.match(pattern, name)]  # type: ignore[misc]


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
    write_model(
        path, {k: v for k, v in metadata.items() if not isinstance(v, np.ndarray) or v.dtype.kind in "fi"}, tensors
    )
    return path


def write_model(path: Path, metadata: dict[str, Any], tensors: list[Tensor]) -> None:
    data = [content.ljust(padded(len(content)), b"\0") for *_, content in tensors]
    header = pack_header(metadata, [(name, ne, kind, len(content)) for name, ne, kind, content in tensors])
    path.write_bytes(header + b"".join(data))


def _longer(value: Any, n_layer: int, like: list[int]) -> Any:
    """Lists with an entry a layer get one for each new layer."""
    if not isinstance(value, np.ndarray):
        return value
    more = value[like] if len(value) == n_layer else value
    return more.astype(np.float32 if more.dtype.kind == "f" else np.int32)
