"""Trains a demo model; `python scripts/train` runs it (needs `pip install oallama[train]`).

The text is new in every step, so that nothing is learnt by heart: 2048 tokens a step, in rows of 128, then 256, then
512. Muon for matrices, Adam for the rest; the rate rises, is constant, and falls to zero while rows are long. While it
falls, experts are rounded in each step as they will be in the file, where that is Q4_0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import network
from pages import documents, rows, tokenizer_text
from recipes import TOKENS_PER_STEP, Recipe
from rounding import rounded
from tokenizer import learn

SEED = 2
RATES = {"muon": 0.02, "adam": 0.01}
_DOCUMENTS = 2000  # made at a time
_TOKENIZER_PAGES = 4000
_SAVED_EVERY = 20


def make_tokenizer(n_vocab: int) -> Any:
    """Return the tokenizers.Tokenizer of the models."""
    return learn(tokenizer_text(SEED, _TOKENIZER_PAGES), n_vocab)


def batches(tokenizer: Any, steps: dict[int, int], seed: int) -> Iterator[np.ndarray]:
    """Yield [rows, length + 1] int32 for every step."""
    for length, n_steps in steps.items():
        ready = np.zeros((0, length + 1), np.int32)
        size = TOKENS_PER_STEP // length
        for _ in range(n_steps):
            while len(ready) < size:
                seed += 1
                ready = np.concatenate([ready, rows(tokenizer, documents(seed, _DOCUMENTS), length + 1)])
            yield ready[:size]
            ready = ready[size:]


def loss_of(params: Any, rows: Any, recipe: Recipe, room: float = 0.0) -> tuple[Any, Any]:
    """Return the mean cross entropy of the next token, in nats, and the balance of experts' use."""
    logits, balance = network.logits(params, rows[:, :-1], recipe.shape, room)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean(), balance


def train(tokenizer: Any, recipe: Recipe, report: Callable[[int, float, float], None], kept: Path | None) -> Any:
    """Return the trained weights, float32.

    Args:
        report: called with (step, loss, balance) after every step.
        kept: file of the state after every 20th step; where it is there, training goes on from it.
    """
    params = jax.tree.map(jnp.asarray, network.initial(recipe.shape, SEED))
    rule = optax.contrib.muon(
        RATES["muon"], adam_learning_rate=RATES["adam"], adam_b2=0.98, muon_weight_dimension_numbers=_matrices
    )
    state = rule.init(params)

    def wanted(params: Any, rows: Any, part: Any) -> tuple[Any, Any]:
        stored = {name: rounded(w, part) if recipe.rounds and w.ndim == 3 else w for name, w in params.items()}
        loss, balance = loss_of(stored, rows, recipe, recipe.room)
        return loss + recipe.balance * balance, (loss, balance)

    @jax.jit
    def advance(params, state, rows, rate, part):
        gradient, seen = jax.grad(wanted, has_aux=True)(params, rows, part)
        updates, state = rule.update(gradient, state, params)
        return jax.tree.map(lambda p, u: p + rate * u, params, updates), state, seen

    first, (params, state) = _resumed(kept, (params, state))
    for step, batch in enumerate(batches(tokenizer, recipe.steps, 1000 * SEED)):
        if step < first:
            continue
        params, state, (loss, balance) = advance(params, state, batch, recipe.factor(step), recipe.rounding(step))
        report(step, float(loss), float(balance))
        if kept and (step + 1) % _SAVED_EVERY == 0:
            _keep(kept, step + 1, (params, state))
    return params


def _keep(path: Path, step: int, trees: Any) -> None:
    new = path.with_suffix(".new.npz")
    np.savez(new, *jax.tree.leaves(trees), step=step)
    new.replace(path)


def _resumed(path: Path | None, trees: Any) -> tuple[int, Any]:
    if path is None or not path.exists():
        return 0, trees
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"arr_{number}"]) for number in range(len(file.files) - 1)]
        return int(file["step"]), jax.tree.unflatten(jax.tree.structure(trees), leaves)


def _matrices(params: Any) -> Any:
    """Return what Muon is to treat; the embedding is a table of vectors, and norms are vectors."""
    return {
        name: None if name.endswith(("embd.weight", "norm.weight")) else _axes(w.ndim) for name, w in params.items()
    }


def _axes(n: int) -> Any:
    return optax.contrib.MuonDimensionNumbers(reduction_axis=n - 1, output_axis=n - 2)
