"""The training of the demo models in JAX: a mixture's feed-forward, what is rounded, and going on from a kept state.

Needs `pip install oallama[train]`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, dequantize

import recipes
from oallama.modelmaker.encoder import encode

jax = pytest.importorskip("jax")
mixture = pytest.importorskip("mixture")
rounding = pytest.importorskip("rounding")
training = pytest.importorskip("training")

N_EMBD, N_FF, N_EXPERT, N_USED = 32, 16, 8, 2


@pytest.fixture(scope="module")
def block() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {
        "ffn_gate_inp": (N_EXPERT, N_EMBD),
        "ffn_gate_exps": (N_EXPERT, N_FF, N_EMBD),
        "ffn_up_exps": (N_EXPERT, N_FF, N_EMBD),
        "ffn_down_exps": (N_EXPERT, N_EMBD, N_FF),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}


def expected(h: np.ndarray, block: dict[str, Any]) -> np.ndarray:
    """Token by token."""
    rows = []
    for x in h:
        scores = np.exp(block["ffn_gate_inp"] @ x)
        chosen = np.argsort(-scores)[:N_USED]
        weights = scores[chosen] / scores[chosen].sum()
        gates = [block["ffn_gate_exps"][e] @ x for e in chosen]
        inner = [g / (1 + np.exp(-g)) * (block["ffn_up_exps"][e] @ x) for g, e in zip(gates, chosen, strict=True)]
        rows.append(sum(w * block["ffn_down_exps"][e] @ i for w, e, i in zip(weights, chosen, inner, strict=True)))
    return np.array(rows)


def test_a_mixture_is_the_weighted_sum_of_the_best(block: dict[str, Any]) -> None:
    h = np.random.default_rng(2).standard_normal((40, N_EMBD)).astype(np.float32)
    found, balance = mixture.feed_forward(h, block, N_USED, 0.0)
    assert np.allclose(found, expected(h, block), atol=1e-5)
    assert 1 <= balance < N_EXPERT


def test_who_finds_no_room_is_left_out_of_that_expert(block: dict[str, Any]) -> None:
    h = np.tile(np.random.default_rng(3).standard_normal((1, N_EMBD)).astype(np.float32), (40, 1))
    found, balance = mixture.feed_forward(h, block, N_USED, 2.0)
    room = 2 * 40 * N_USED // N_EXPERT
    assert np.allclose(found[:room], expected(h, block)[:room], atol=1e-5)
    assert not np.asarray(found[room:]).any()
    assert balance > 2


@pytest.mark.engine
def test_weights_are_rounded_as_the_file_rounds_them() -> None:
    values = np.random.default_rng(4).standard_normal((16, 64)).astype(np.float32)
    kind = GGMLQuantizationType.Q4_0
    stored = dequantize(encode(kind, values.ravel(), 1.0).reshape(16, -1), kind)
    assert np.array_equal(rounding.q4_0(values), stored)
    assert np.array_equal(rounding.rounded(values, 0.0), values)
    gradient = jax.grad(lambda w: (rounding.rounded(w, 1.0) ** 2).sum())(values)
    assert np.allclose(gradient, 2 * stored, atol=1e-6)


def test_training_goes_on_from_a_kept_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(recipes.MIXTURE.shape, n_layer=1, n_embd=64, n_head=2, n_head_kv=1, head_dim=32, n_vocab=320)
    shape = replace(shape, n_expert=N_EXPERT, n_expert_used=N_USED, n_ff_expert=32)
    recipe = replace(recipes.MIXTURE, shape=shape, steps={16: 2, 32: 2})
    words = training.make_tokenizer(shape.n_vocab)
    monkeypatch.setattr(training, "TOKENS_PER_STEP", 128)
    monkeypatch.setattr(training, "_SAVED_EVERY", 2)
    steps: list[int] = []

    def report(step: int, loss: float, balance: float) -> None:
        steps.append(step)

    def interrupted(step: int, loss: float, balance: float) -> None:
        if step == 2:
            raise KeyboardInterrupt

    whole = training.train(words, recipe, report, None)
    with pytest.raises(KeyboardInterrupt):
        training.train(words, recipe, interrupted, tmp_path / "state.npz")
    again = training.train(words, recipe, report, tmp_path / "state.npz")
    assert steps == [0, 1, 2, 3, 2, 3]
    assert all(np.array_equal(whole[name], again[name]) for name in whole)
