"""The feed-forward of a mixture in JAX, as llama.cpp computes it for qwen3moe: a softmax, weights that sum to 1.

Each expert has room for a number of tokens, so that its products are one batch of matrices. A token that finds no room
is left out of that expert. That happens in training alone, and seldom, as balanced use is a part of the loss.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.numpy import ndarray

_LEAST_SUM = 6.103515625e-5  # llama.cpp's


def feed_forward(h: Any, block: dict[str, Any], n_used: int, room: float) -> tuple[Any, Any]:
    """Return what is added for h [tokens, n_embd], and the balance of experts' use: 1 is even, n_expert the opposite.

    The balance is that of Switch Transformers (arXiv 2101.03961): n_expert times the sum over experts of the share of
    uses and the mean probability.

    Args:
        block: ffn_gate_inp, ffn_gate_exps, ffn_up_exps, ffn_down_exps.
        room: tokens that an expert takes, as a multiple of the mean; 0: all.
    """
    n_tokens, n_expert = len(h), len(block["ffn_gate_inp"])
    probabilities = jax.nn.softmax(h @ block["ffn_gate_inp"].T, axis=-1)
    weights, chosen = jax.lax.top_k(probabilities, n_used)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), _LEAST_SUM)
    places = round(room * n_tokens * n_used / n_expert) if room else n_tokens
    slots, tokens, uses = _slots(chosen.ravel(), n_used, n_expert, places)
    x = _rows(h, tokens).reshape(n_expert, places, -1)
    inner = jax.nn.silu(_each(x, block["ffn_gate_exps"])) * _each(x, block["ffn_up_exps"])
    results = _rows(_each(inner, block["ffn_down_exps"]).reshape(n_expert * places, -1), slots)
    added = (results.reshape(n_tokens, n_used, -1) * weights[..., None]).sum(axis=1)
    return added, n_expert * (uses / len(slots) * probabilities.mean(axis=0)).sum()


def _slots(chosen: Any, n_used: int, n_expert: int, places: int) -> tuple[Any, Any, Any]:
    """Return the slot of every use, the token in every slot, and the uses of every expert.

    A number past the end stands for none.
    """
    order = jnp.argsort(chosen, stable=True)
    experts = chosen[order]
    first = jnp.searchsorted(experts, jnp.arange(n_expert + 1))
    place = jnp.arange(len(chosen)) - first[experts]
    none = n_expert * places
    slots = jnp.zeros_like(chosen).at[order].set(jnp.where(place < places, experts * places + place, none))
    tokens = jnp.full(none + 1, len(chosen) // n_used).at[slots].set(jnp.arange(len(chosen)) // n_used)
    return slots, tokens[:none], jnp.diff(first)


def _rows(matrix: ndarray, numbers: Any) -> Any:
    return jnp.concatenate([matrix, jnp.zeros_like(matrix[:1])])[numbers]


def _each(x: Any, weights: Any) -> Any:
    """[experts, tokens, inputs] by [experts, outputs, inputs]."""
    return jnp.einsum("eti,eoi->eto", x, weights)
