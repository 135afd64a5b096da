"""What a head is made of, in architectures where it is no copy of the last layer; and tiny trunks upstream lacks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

Tensor = tuple[str, tuple[int, ...], GGMLQuantizationType, bytes]
F32 = GGMLQuantizationType.F32
# Upstream's program writes none of this architecture: the weights are those of another, with the same names.
TRUNKS = {"step35": "mimo2"}


@dataclass(frozen=True)
class Recipe:
    """more: layers like which others are added, in turns. head: (layer, pattern of the names) of a head's weights.
    like: the layer whose entries in lists of the metadata a head has.
    """

    more: tuple[int, ...]
    head: tuple[tuple[int, str], ...]
    like: int


RECIPES: Mapping[str, Recipe] = {
    # Layers: with attention and a dense feed-forward, recurrent with experts.
    "bailingmoe3": Recipe((1,), ((0, r"attn_"), (1, r"ffn_|exp_probs")), 0),
    # The last two compress their caches, which a head does not.
    "deepseek4": Recipe((3,), ((1, ""),), 1),
    # Attention, recurrent, feed-forward: one of them is a layer.
    "nemotron_h_moe": Recipe((1, 2), ((0, r"attn_"), (2, r"ffn_|exp_probs")), 0),
}


def trunk_of(arch: str, metadata: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """Upstream's tiny model as one of the architecture that has heads."""
    if arch == "nemotron_h_moe":
        return _with_experts(arch, metadata, tensors)
    if (source := TRUNKS.get(arch)) is not None:
        renamed = {re.sub(rf"^{source}\.", f"{arch}.", key): value for key, value in metadata.items()}
        kept = [tensor for tensor in tensors if "attn_sinks" not in tensor[0]]
        return {**renamed, "general.architecture": arch.encode()}, kept
    return metadata, tensors


def finished_head(arch: str, prefix: str, tensors: list[Tensor], n_embd: int) -> list[Tensor]:
    """The weights of a head in the form that the architecture's graph wants; prefix: of their names."""
    named = {name.removeprefix(f"{prefix}."): rest for name, *rest in tensors}
    if arch == "mimo2":
        for kind in ("weight", "bias"):
            parts = [named.pop(f"attn_{x}.{kind}") for x in "qkv"]
            (*inner, _), rows = parts[0][0], sum(ne[-1] for ne, *_ in parts)
            named[f"attn_qkv.{kind}"] = [(*inner, rows), F32, b"".join(data for *_, data in parts)]
    if arch in ("bailingmoe3", "nemotron_h_moe"):
        norm = {"bailingmoe3": "layer_output_norm", "nemotron_h_moe": "post_attention_norm"}[arch]
        named[f"{norm}.weight"] = [(n_embd,), F32, np.ones(n_embd, np.float32).tobytes()]
    if arch == "bailingmoe3":
        named["ffn_norm.weight"] = [(n_embd,), F32, np.ones(n_embd, np.float32).tobytes()]
        del named["nextn.shared_head_norm.weight"]
    return [(f"{prefix}.{name}", *rest) for name, rest in named.items()]  # type: ignore[misc]


def _with_experts(arch: str, metadata: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
    """Two experts and a shared one, each with the weights of a dense feed-forward."""
    made: list[Tensor] = []
    for name, ne, kind, data in tensors:
        stem, _, part = name.rpartition(".")
        if not re.search(r"ffn_(up|down)$", stem):
            made.append((name, ne, kind, data))
        elif part == "weight":
            made += [(f"{stem}_exps.weight", (*ne, 2), kind, data * 2), (f"{stem}_shexp.weight", ne, kind, data)]
    n_embd, width = metadata[f"{arch}.embedding_length"], int(max(metadata[f"{arch}.feed_forward_length"]))
    rng = np.random.default_rng(1)
    for layer in {name.split(".")[1] for name, *_ in made if "_exps" in name}:
        router = rng.normal(0, n_embd**-0.5, (2, n_embd)).astype(np.float32)
        made.append((f"blk.{layer}.ffn_gate_inp.weight", (n_embd, 2), F32, router.tobytes()))
        made.append((f"blk.{layer}.exp_probs_b.bias", (2,), F32, np.zeros(2, np.float32).tobytes()))
    numbers = {
        "expert_count": 2,
        "expert_used_count": 1,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
    }
    return {**metadata, **{f"{arch}.{key}": n for key, n in numbers.items()}, f"{arch}.expert_weights_scale": 1.0}, made
