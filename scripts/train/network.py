"""The architectures llama and qwen3moe in JAX, as llama.cpp computes them, for training.

A weight is [outputs, inputs] or [experts, outputs, inputs], as in a GGUF file; RoPE turns neighbouring pairs (llama,
ggml's NORM order) or the halves of a head (qwen3moe, NEOX), so that nothing is permuted at export. Output and
embedding are one matrix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mixture
from oallama.modelmaker.shapes import Shape
from oallama.modelmaker.tensors import ROUTER_GAIN, tensors_of

Params = dict[str, Any]
_EMBEDDING_STD = 0.25
_ADDED = ("attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight")


def initial(shape: Shape, seed: int) -> Params:
    """Return random weights: what is added to the residual stream starts as nothing, so that tokens are seen in it.

    Signs in the last norm take away that a token, its embedding being the output matrix too, predicts itself.
    """
    rng = np.random.default_rng(seed)
    params = {}
    for spec in tensors_of(shape):
        if spec.name == "output_norm.weight":
            params[spec.name] = rng.choice(np.array([-_EMBEDDING_STD, _EMBEDDING_STD], np.float32), spec.ne)
        elif len(spec.ne) == 1:
            params[spec.name] = np.ones(spec.ne, np.float32)
        elif spec.name.endswith(_ADDED):
            params[spec.name] = np.zeros(spec.ne[::-1], np.float32)
        else:
            std = _EMBEDDING_STD if spec.name == "token_embd.weight" else spec.std
            if spec.name.endswith("ffn_gate_inp.weight"):
                std /= ROUTER_GAIN  # no expert is far ahead before it has learnt anything
            params[spec.name] = rng.standard_normal(spec.ne[::-1], np.float32) * np.float32(std)
    return params


def logits(params: Params, tokens: Any, shape: Shape, room: float = 0.0) -> tuple[Any, Any]:
    """Return [batch, time, n_vocab] float32 for tokens [batch, time] int32, and the balance of experts' use.

    room: of `mixture.feed_forward`. The balance is a mean of the layers, and 0 for a dense shape.
    """
    turned = _angles(tokens.shape[1], shape)
    x = params["token_embd.weight"][tokens]
    balance = jnp.zeros(())
    for layer in range(shape.n_layer):
        block = {name.split(".")[2]: w for name, w in params.items() if name.startswith(f"blk.{layer}.")}
        x = x + _attention(_norm(x, block["attn_norm"], shape), block, turned, shape)
        h = _norm(x, block["ffn_norm"], shape)
        if shape.n_expert:
            added, uneven = mixture.feed_forward(h.reshape(-1, shape.n_embd), block, shape.n_expert_used, room)
            x, balance = x + added.reshape(x.shape), balance + uneven / shape.n_layer
        else:
            x = x + (jax.nn.silu(h @ block["ffn_gate"].T) * (h @ block["ffn_up"].T)) @ block["ffn_down"].T
    return _norm(x, params["output_norm.weight"], shape) @ params["token_embd.weight"].T, balance


def _norm(x: Any, weight: Any, shape: Shape) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + shape.norm_eps) * weight


def _attention(x: Any, block: Params, turned: tuple[Any, Any], shape: Shape) -> Any:
    batch, n_time, _ = x.shape
    n_kv, group, dim = shape.n_head_kv, shape.n_head // shape.n_head_kv, shape.head_dim
    q = (x @ block["attn_q"].T).reshape(batch, n_time, shape.n_head, dim)
    k = (x @ block["attn_k"].T).reshape(batch, n_time, n_kv, dim)
    v = (x @ block["attn_v"].T).reshape(batch, n_time, n_kv, dim)
    if "attn_q_norm" in block:
        q, k = _norm(q, block["attn_q_norm"], shape), _norm(k, block["attn_k_norm"], shape)
    q, k = _rope(q, turned, shape), _rope(k, turned, shape)
    q = q.reshape(batch, n_time, n_kv, group, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / np.float32(np.sqrt(dim))
    scores = jnp.where(np.tri(n_time, dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, axis=-1), v)
    return mixed.reshape(batch, n_time, shape.n_head * dim) @ block["attn_output"].T


def _angles(n_time: int, shape: Shape) -> tuple[Any, Any]:
    angles = np.outer(np.arange(n_time), shape.rope_base ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim))
    angles = angles[:, None].astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def _rope(x: Any, turned: tuple[Any, Any], shape: Shape) -> Any:
    cos, sin = turned
    if shape.arch == "llama":
        one, other = x[..., 0::2], x[..., 1::2]
        return jnp.stack([one * cos - other * sin, one * sin + other * cos], axis=-1).reshape(x.shape)
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)
