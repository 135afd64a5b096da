"""Trains the demo model; `python scripts/train` runs it (needs `pip install oallama[train]`).

The text is new in every step, so that nothing is learnt by heart: 2048 tokens a step, in rows of 128, then 256, then
512. Muon for matrices, Adam for the rest; the rate rises, is constant, and falls to zero while rows are long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import llama_jax
from oallama.modelmaker.shapes import Shape
from pages import documents, rows, tokenizer_text
from tokenizer import learn

SHAPE = Shape("llama", 4, 256, 512, 4, 2, 64, 640, 512, 10000.0, 1e-5, tied=True)
SEED = 2
TOKENS_PER_STEP = 2048
STEPS = {128: 420, 256: 190, 512: 90}  # tokens of a row -> steps
WARM, FALL = 10, STEPS[256] + STEPS[512]  # steps in which the rate rises, and falls
RATES = {"muon": 0.02, "adam": 0.01}
_DOCUMENTS = 2000  # made at a time
_TOKENIZER_PAGES = 4000


def make_tokenizer() -> Any:
    """Return the tokenizers.Tokenizer of the model."""
    return learn(tokenizer_text(SEED, _TOKENIZER_PAGES), SHAPE.n_vocab)


def batches(tokenizer: Any, seed: int) -> Iterator[np.ndarray]:
    """Yield [rows, length + 1] int32 for every step."""
    for length, steps in STEPS.items():
        ready = np.zeros((0, length + 1), np.int32)
        size = TOKENS_PER_STEP // length
        for _ in range(steps):
            while len(ready) < size:
                seed += 1
                ready = np.concatenate([ready, rows(tokenizer, documents(seed, _DOCUMENTS), length + 1)])
            yield ready[:size]
            ready = ready[size:]


def factor(step: int) -> float:
    """Return the part of the full rate at a step."""
    return min(1.0, (step + 1) / WARM, (sum(STEPS.values()) - step) / FALL)


def loss_of(params: Any, rows: Any) -> Any:
    """Return the mean cross entropy of the next token, in nats."""
    logits = llama_jax.logits(params, rows[:, :-1], SHAPE)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def train(tokenizer: Any, seed: int, report: Callable[[int, float], None]) -> Any:
    """Return the trained weights, float32; report(step, loss) is called after every step."""
    params = jax.tree.map(jnp.asarray, llama_jax.initial(SHAPE, seed))
    rule = optax.contrib.muon(
        RATES["muon"], adam_learning_rate=RATES["adam"], adam_b2=0.98, muon_weight_dimension_numbers=_matrices
    )
    state = rule.init(params)

    @jax.jit
    def advance(params, state, rows, rate):
        loss, gradient = jax.value_and_grad(loss_of)(params, rows)
        updates, state = rule.update(gradient, state, params)
        return jax.tree.map(lambda p, u: p + rate * u, params, updates), state, loss

    for step, batch in enumerate(batches(tokenizer, 1000 * seed)):
        params, state, loss = advance(params, state, batch, factor(step))
        report(step, float(loss))
    return params


def _matrices(params: Any) -> Any:
    """Return what Muon is to treat; the embedding is a table of vectors, and norms are vectors."""
    inner = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    return {name: None if name.endswith(("embd.weight", "norm.weight")) else inner for name in params}
