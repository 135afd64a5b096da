"""The general.* and <arch>.* metadata of a made model, key for key what convert_hf_to_gguf writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gguf import GGML_QUANT_VERSION

from .shapes import Shape
from .tensors import TensorSpec


def model_metadata(shape: Shape, specs: Sequence[TensorSpec], name: str, ftype: int) -> dict[str, Any]:
    """Return the metadata without the tokenizer; ftype is llama.cpp's number of the file type."""
    general = {
        "architecture": shape.arch,
        "type": "model",
        "name": name,
        "description": "random weights, made by oallama",
        "size_label": _size_label(sum(math.prod(spec.ne) for spec in specs)),
        "file_type": ftype,
        "quantization_version": GGML_QUANT_VERSION,
    }
    own: dict[str, Any] = {
        "block_count": shape.n_layer,
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff,
        "vocab_size": shape.n_vocab,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.v_head_dim or shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.norm_eps,
        "rope.freq_base": shape.rope_base,
        "rope.dimension_count": shape.rope_dim or shape.head_dim,
    }
    if shape.q_lora_rank:
        own |= {"attention.q_lora_rank": shape.q_lora_rank, "attention.kv_lora_rank": shape.kv_lora_rank}
    if shape.sliding_window:  # the published scaling of gpt-oss
        own |= {
            "attention.sliding_window": shape.sliding_window,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
        }
    if shape.n_expert:
        own |= {
            "expert_count": shape.n_expert,
            "expert_used_count": shape.n_expert_used,
            "expert_feed_forward_length": shape.n_ff_expert,
        }
    return {f"general.{k}": v for k, v in general.items()} | {f"{shape.arch}.{k}": v for k, v in own.items()}


def _size_label(n: int) -> str:
    for factor, unit in ((1e9, "B"), (1e6, "M")):
        if n >= factor:
            return f"{n / factor:.1f}{unit}"
    return f"{n / 1e3:.0f}K"
