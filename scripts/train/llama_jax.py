"""The llama architecture in JAX, as llama.cpp's src/models/llama.cpp computes it, for training.

A weight is [outputs, inputs], as in a GGUF file; RoPE turns neighbouring pairs (ggml's NORM order), so that nothing
is permuted at export. Output and embedding are one matrix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oallama.modelmaker.shapes import Shape
from oallama.modelmaker.tensors import tensors_of

Params = dict[str, Any]
_EMBEDDING_STD = 0.25


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
        elif spec.name.endswith(("attn_output.weight", "ffn_down.weight")):
            params[spec.name] = np.zeros(spec.ne[::-1], np.float32)
        else:
            std = _EMBEDDING_STD if spec.name == "token_embd.weight" else spec.std
            params[spec.name] = rng.standard_normal(spec.ne[::-1], np.float32) * np.float32(std)
    return params


def logits(params: Params, tokens: Any, shape: Shape) -> Any:
    """Return [batch, time, n_vocab] float32 for tokens [batch, time] int32."""
    n_time = tokens.shape[1]
    angles = np.outer(np.arange(n_time), shape.rope_base ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim))
    cos, sin = jnp.cos(angles).astype(jnp.float32), jnp.sin(angles).astype(jnp.float32)
    x = params["token_embd.weight"][tokens]
    for layer in range(shape.n_layer):
        block = {name.split(".")[2]: w for name, w in params.items() if name.startswith(f"blk.{layer}.")}
        x = x + _attention(_norm(x, block["attn_norm"], shape), block, cos, sin, shape)
        h = _norm(x, block["ffn_norm"], shape)
        x = x + (jax.nn.silu(h @ block["ffn_gate"].T) * (h @ block["ffn_up"].T)) @ block["ffn_down"].T
    return _norm(x, params["output_norm.weight"], shape) @ params["token_embd.weight"].T


def _norm(x: Any, weight: Any, shape: Shape) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + shape.norm_eps) * weight


def _attention(x: Any, block: Params, cos: Any, sin: Any, shape: Shape) -> Any:
    batch, n_time, _ = x.shape
    n_kv, group, dim = shape.n_head_kv, shape.n_head // shape.n_head_kv, shape.head_dim
    q = _rope((x @ block["attn_q"].T).reshape(batch, n_time, shape.n_head, dim), cos, sin)
    k = _rope((x @ block["attn_k"].T).reshape(batch, n_time, n_kv, dim), cos, sin)
    v = (x @ block["attn_v"].T).reshape(batch, n_time, n_kv, dim)
    q = q.reshape(batch, n_time, n_kv, group, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k) / np.float32(np.sqrt(dim))
    scores = jnp.where(np.tri(n_time, dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores, axis=-1), v)
    return mixed.reshape(batch, n_time, shape.n_head * dim) @ block["attn_output"].T


def _rope(x: Any, cos: Any, sin: Any) -> Any:
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)
