"""The general.* and <arch>.* metadata of a made model, key for key what convert_hf_to_gguf writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gguf import GGML_QUANT_VERSION

from .shapes import Shape
from .tensors import SSM_CONV, TensorSpec

_SOFTMAX, _SIGMOID = 1, 2  # llama_expert_gating_func_type
_SECTIONS = (11, 11, 10, 0)  # of RoPE's pairs: time, height, width; published for Qwen3.6-35B-A3B


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
        **_head_widths(shape),
        "attention.layer_norm_rms_epsilon": shape.norm_eps,
        "rope.freq_base": shape.rope_base,
        "rope.dimension_count": shape.rope_dim or shape.head_dim,
    }
    if shape.kv_lora_rank:  # q_lora_rank 0: llama.cpp must not miss it at another number of layers
        own |= {"attention.q_lora_rank": shape.q_lora_rank, "attention.kv_lora_rank": shape.kv_lora_rank}
    if shape.sliding_window:
        own |= {"attention.sliding_window": shape.sliding_window}
    own |= _rope_scaling(shape) | _experts(shape) | _recurrent(shape)
    return {f"general.{k}": v for k, v in general.items()} | {f"{shape.arch}.{k}": v for k, v in own.items()}


def _head_widths(shape: Shape) -> dict[str, Any]:
    value = shape.v_head_dim or shape.head_dim
    if shape.arch != "deepseek2":
        return {"attention.key_length": shape.head_dim, "attention.value_length": value}
    return {  # what the cache has, and what heads have
        "attention.key_length": shape.kv_lora_rank + shape.rope_dim,
        "attention.value_length": shape.kv_lora_rank,
        "attention.key_length_mla": shape.head_dim,
        "attention.value_length_mla": value,
    }


def _rope_scaling(shape: Shape) -> dict[str, Any]:
    if not shape.yarn:
        return {}
    factor, n_ctx, log_multiplier = shape.yarn
    own = {"type": "yarn", "factor": factor, "original_context_length": n_ctx}
    if log_multiplier:
        own["yarn_log_multiplier"] = log_multiplier
    return {f"rope.scaling.{k}": v for k, v in own.items()}


def _experts(shape: Shape) -> dict[str, Any]:
    if not shape.n_expert:
        return {}
    own: dict[str, Any] = {
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_expert_used,
        "expert_feed_forward_length": shape.n_ff_expert,
    }
    if shape.arch == "deepseek2":
        own |= {
            "leading_dense_block_count": shape.n_layer_dense,
            "expert_shared_count": shape.n_expert_shared,
            "expert_weights_scale": shape.expert_scale,
            "expert_weights_norm": shape.sigmoid_router,
            "expert_gating_func": _SIGMOID if shape.sigmoid_router else _SOFTMAX,
        }
    if shape.arch == "qwen35moe":
        own["expert_shared_feed_forward_length"] = shape.n_ff_shared
    return own


def _recurrent(shape: Shape) -> dict[str, Any]:
    if not shape.full_attn_interval:
        return {}
    return {
        "full_attention_interval": shape.full_attn_interval,
        "rope.dimension_sections": np.array(_SECTIONS, np.int32),
        "ssm.conv_kernel": SSM_CONV,
        "ssm.state_size": shape.ssm_d_state,
        "ssm.group_count": shape.ssm_n_group,
        "ssm.time_step_rank": shape.ssm_dt_rank,
        "ssm.inner_size": shape.ssm_dt_rank * shape.ssm_d_state,
    }


def _size_label(n: int) -> str:
    for factor, unit in ((1e9, "B"), (1e6, "M")):
        if n >= factor:
            return f"{n / factor:.1f}{unit}"
    return f"{n / 1e3:.0f}K"
