"""Weights as Q4_0 has them, in JAX, so that training can know what the file will round."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_BLOCK = 32


def q4_0(weights: Any) -> Any:
    """Return float32 weights as ggml's Q4_0 gives them back; the last dimension is a multiple of 32."""
    blocks = weights.reshape(-1, _BLOCK)
    most = jnp.take_along_axis(blocks, jnp.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    step = most / -8
    numbers = jnp.clip(jnp.floor(jnp.where(step == 0, 0, blocks / step) + 8.5), 0, 15)
    return ((numbers - 8) * step.astype(jnp.float16).astype(jnp.float32)).reshape(weights.shape)


def rounded(weights: Any, part: Any) -> Any:
    """Return weights with that part of the rounding, 0 to 1; gradients are those of what is not rounded."""
    return weights + part * jax.lax.stop_gradient(q4_0(weights) - weights)
