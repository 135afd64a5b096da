"""Random weights whose routers give a chosen skew and locality of expert choice.

The first dimensions of the hidden state are reserved. Embeddings write them and no layer does, because the first rows
of all matrices that write to the hidden state are zero. So routers see the same in every layer:

    [32 ones | code of the token's group | code of the group that follows | normal values, as in any made model]

* Groups. Text tokens lie in groups of GROUP at random. A token's code of signs is its group's. Routers read it and
  nothing else that varies, so tokens of a group use the same experts.
* Skew. A router's row has normal values at the code, and a bias at the ones. The biases are fitted, with the codes of
  the groups at hand, until expert number r of a layer's own random order is used in a share of tokens as r^-S, at most
  in all: `use_rates`. Where chances are sigmoids, scores are smaller, so that none saturates.
* Locality. Of a group's tokens a share L names its own group as the one that follows, the others a random one. Output
  rows score the code of the group that follows high enough that the next token is of that group, whether the likeliest
  is taken or one is sampled. So a sampled sequence stays in its group with chance L at each token. One of likeliest
  tokens falls into cycles within a group and stays longer.

What a token's group leaves open, which of its tokens is next, is decided by the other dimensions as ever.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator, default_rng
from numpy.typing import NDArray

from ..errors import OallamaError
from .shapes import Shape
from .tensors import LOGIT_STD, ROUTER_GAIN, TensorSpec, router_gain

GROUP = 64  # text tokens of a group
ONES = 32
FOLLOWS = 24.0  # what a token's logit gains from being of the group that follows
MOST_SKEW, MOST_LOCALITY = 4.0, 0.98
_LEAST_EMBD, _LEAST_VOCAB = 256, 2048
_NON_TEXT = 1.0 / 16.0  # as weights.NON_TEXT_SCALE
_ALWAYS = 0.995  # a rate above it needs no larger bias
_FITTED_GROUPS, _ROUNDS = 1024, 40
_WRITERS = re.compile(r".*\.(attn_output|ssm_out|ffn_down\w*)\.weight")
_FORM = re.compile(r"zipf:([^,]+)(?:,locality:([^,]+))?")

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Routing:
    """What is asked for. skew: Zipf's exponent, 0 for uniform; locality: chance to stay in a group at each token."""

    skew: float
    locality: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Routing:
        """Read "zipf:S[,locality:L]". Raises OallamaError for another form, or numbers out of range."""
        found = _FORM.fullmatch(text)
        if not found:
            raise OallamaError(f"routing: expected zipf:S or zipf:S,locality:L, got {text!r}; for example zipf:1.2")
        skew = _number("zipf", found[1], MOST_SKEW)
        return cls(skew, _number("locality", found[2] or "0", MOST_LOCALITY))

    def check(self, shape: Shape) -> None:
        """Raises OallamaError for a model that cannot have it."""
        if not shape.n_expert:
            raise OallamaError(f"routing: {shape.arch} is dense, it has no experts to choose; try --arch qwen3moe")
        for name, value, least in (("n_embd", shape.n_embd, _LEAST_EMBD), ("n_vocab", shape.n_vocab, _LEAST_VOCAB)):
            if value < least:
                raise OallamaError(f"routing: {name} {value} leaves no room for codes, expected at least {least}")


def _number(name: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise OallamaError(f"routing: {name} expects a number from 0 to {most:g}, got {text!r}")
    return value


def use_rates(skew: float, n_expert: int, n_used: int) -> NDArray[np.float64]:
    """[n_expert]: the share of tokens that use expert 1, 2, .. of a layer's order: c r^-skew, at most 1.

    c is such that they sum to n_used.
    """
    law = np.arange(1, n_expert + 1, dtype=np.float64) ** -skew
    rates, full = np.zeros(n_expert), 0
    while True:
        rates[:full] = 1.0
        rates[full:] = law[full:] * (n_used - full) / law[full:].sum()
        if full == n_expert or rates[full] <= 1:
            return rates
        full += 1


def route(
    specs: list[TensorSpec], shape: Shape, routing: Routing, text_tokens: NDArray[np.bool_], seed: int
) -> list[TensorSpec]:
    """Return the specs with the contents that give the routing. text_tokens: [n_vocab], whether a token is text."""
    codes = _Codes(shape, routing, text_tokens, seed)
    return [_routed(spec, index, codes, shape, routing, seed) for index, spec in enumerate(specs)]


def _routed(spec: TensorSpec, index: int, codes: _Codes, shape: Shape, routing: Routing, seed: int) -> TensorSpec:
    if spec.name == "token_embd.weight":
        return replace(spec, rows=codes.embeddings(spec, seed))
    if spec.name == "output.weight":
        return replace(spec, rows=codes.outputs(spec, seed))
    if spec.name.endswith("ffn_gate_inp.weight"):
        rng = default_rng([seed, 4, index])
        weights = _router(codes, use_rates(routing.skew, shape.n_expert, shape.n_expert_used), shape, rng)
        return replace(spec, rows=lambda start, stop: weights[start:stop])
    if spec.name.endswith(("attn_output.bias", "ffn_down_exps.bias", "ffn_gate_inp.bias", "exp_probs_b.bias")):
        return replace(spec, std=0.0)
    if _WRITERS.fullmatch(spec.name):
        # Smaller by depth, so that the scale of the last hidden state, and with it FOLLOWS, is known.
        return replace(spec, std=spec.std / math.sqrt(shape.n_layer), zero_rows=codes.reserved)
    return spec


class _Codes:
    """Groups of tokens, and the reserved dimensions of embeddings and output rows.

    Attributes:
        width: of a code. reserved: dimensions in all. signs: [groups, width]. own, follows: [n_vocab] group numbers.
    """

    def __init__(self, shape: Shape, routing: Routing, text_tokens: NDArray[np.bool_], seed: int) -> None:
        rng = default_rng([seed, 2])
        self.width = min(64, shape.n_embd // 8)
        self.reserved = ONES + 2 * self.width
        self._text = text_tokens
        text = rng.permutation(np.flatnonzero(text_tokens))
        n_groups = len(text) // GROUP
        self.signs: Floats = rng.choice(np.array([-1, 1], np.float32), (n_groups, self.width))
        self.own = rng.integers(n_groups, size=len(text_tokens))
        place = np.arange(len(text))
        self.own[text] = place % n_groups
        self.follows = rng.integers(n_groups, size=len(text_tokens))
        stays = text[place // n_groups % GROUP < round(routing.locality * GROUP)]
        self.follows[stays] = self.own[stays]

    def embeddings(self, spec: TensorSpec, seed: int) -> Callable[[int, int], Floats]:
        def rows(start: int, stop: int) -> Floats:
            values = self._normal(spec, seed, start, stop)
            values[:, :ONES] = spec.std
            values[:, ONES : ONES + self.width] = self.signs[self.own[start:stop]] * spec.std
            values[:, ONES + self.width : self.reserved] = self.signs[self.follows[start:stop]] * spec.std
            return values

        return rows

    def outputs(self, spec: TensorSpec, seed: int) -> Callable[[int, int], Floats]:
        gain = FOLLOWS / (self.width * LOGIT_STD)

        def rows(start: int, stop: int) -> Floats:
            values = self._normal(spec, seed + 1, start, stop)
            values[:, : self.reserved] = 0
            values[:, ONES + self.width : self.reserved] = self.signs[self.own[start:stop]] * gain
            values[~self._text[start:stop]] *= _NON_TEXT
            return values

        return rows

    def _normal(self, spec: TensorSpec, seed: int, start: int, stop: int) -> Floats:
        rng = default_rng([seed, 3, start])
        return rng.standard_normal((stop - start, spec.ne[0]), np.float32) * np.float32(spec.std)


def _router(codes: _Codes, rates: NDArray[np.float64], shape: Shape, rng: Generator) -> Floats:
    """[n_expert, n_embd]: the experts' rows, in a random order of rates."""
    rates = rng.permutation(rates)
    rows = np.zeros((shape.n_expert, shape.n_embd), np.float32)
    at_code = rng.standard_normal((shape.n_expert, codes.width), np.float32)
    at_code *= ROUTER_GAIN / np.linalg.norm(at_code, axis=1, keepdims=True)
    rows[:, ONES : ONES + codes.width] = at_code
    scores = codes.signs[:_FITTED_GROUPS] @ at_code.T
    rows[:, :ONES] = _fitted_biases(scores, rates, shape.n_expert_used)[:, None] / ONES
    return rows * np.float32(router_gain(shape) / ROUTER_GAIN)


def _fitted_biases(scores: Floats, rates: NDArray[np.float64], n_used: int) -> NDArray[np.float64]:
    """[experts]: biases with which the n_used best of scores [groups, experts] have the rates, nearly."""
    wanted = _log_odds(rates, len(scores))
    biases = wanted * ROUTER_GAIN / 1.7  # a normal's quantile is about its log odds by 1.7
    for number in range(_ROUNDS):
        best = np.argpartition(-(scores + biases), n_used - 1, axis=1)[:, :n_used]
        seen = np.bincount(best.ravel(), minlength=len(rates)) / len(scores)
        biases = biases + (wanted - _log_odds(seen, len(scores))) * ROUTER_GAIN / (2 + number / 4)
    return biases


def _log_odds(rates: NDArray[np.float64], n: int) -> NDArray[np.float64]:
    rates = np.clip(rates, 0.25 / n, min(_ALWAYS, 1 - 0.25 / n))
    odds: NDArray[np.float64] = np.log(rates / (1 - rates))
    return odds
