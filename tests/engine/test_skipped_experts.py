"""Skipped choices of a mixture on the CPU: they give rows of zeros, and change no bit of the others."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from oallama.engine import native
from support import rpc_wire
from support.products import Array, weight_of
from support.rpc_wire import F32, I32, Server, allocate, ask, graph, is_served, message, tensor

BLOCKS = {"f32": 32, "f16": 32, "q8_0": 32, "q4_0": 32, "q4_K": 256, "q6_K": 256, "mxfp4": 32}
FORMS: dict[str, dict[str, bool]] = {
    "plain": {"marked": False},
    "repacked": {"marked": False, "repacked": True},
    "own": {"marked": True},
}
SETS = ("base", "avx2", "avx-vnni", "avx512")
TOKENS = (1, 2, 7, 40, 200)
SHARES = ("none", "some", "all")


def mixture(dice: np.random.Generator, type: str, n_tokens: int) -> dict[str, Any]:
    """A random mixture. In 2 of 3 the experts are few for its tokens, so that kernels for many columns take it."""
    n_experts = int(dice.integers(2, 9)) if n_tokens < 16 or dice.random() < 0.3 else int(dice.integers(2, 5))
    n_used = int(dice.integers(1, n_experts + 1))
    k = BLOCKS[type] * int(dice.integers(1, 1 + 1024 // BLOCKS[type]))
    n_rows = 8 * int(dice.integers(1, 12))  # whole rows of repacked blocks
    slots = n_used if dice.random() < 0.5 else 1
    ids = np.stack([dice.permutation(n_experts)[:n_used] for _ in range(n_tokens)]).astype(np.int32)
    return {
        "weight": weight_of(type, n_experts * n_rows, k, int(dice.integers(1000))),
        "type": type,
        "columns": dice.normal(size=(n_tokens, slots, k)).astype(np.float32),
        "ids": ids,
        "n_experts": n_experts,
    }


def skipped(dice: np.random.Generator, given: dict[str, Any], share: str) -> Array:
    """Which choices are skipped: "some" are those of some experts, as where another device has them."""
    if share != "some":
        return np.full(given["ids"].shape, share == "all")
    away = dice.permutation(given["n_experts"])[: int(dice.integers(1, given["n_experts"]))]
    return np.isin(given["ids"], away)


def without(dice: np.random.Generator, given: dict[str, Any], away: Array) -> dict[str, Any]:
    negative = dice.choice([-1, -2, -(2**31)], size=away.shape)
    return given | {"ids": np.where(away, negative, given["ids"]).astype(np.int32)}


def multiply(given: dict[str, Any], n_threads: int = 1, **form: bool) -> Array:
    return np.asarray(native.core().multiply(**given, n_threads=n_threads, **form)["out"])


def same_but_zeros(found: Array, whole: Array, away: Array) -> None:
    """Zeros have no sign; results were NaN before."""
    assert not found[away].view(np.uint32).any()
    assert np.isfinite(whole).all() and np.array_equal(found[~away], whole[~away])


@pytest.mark.parametrize("n_tokens", TOKENS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("type", BLOCKS)
def test_skipped_choices_are_zeros_and_others_the_same(type: str, form: str, n_tokens: int) -> None:
    dice = np.random.default_rng([len(type), ord(type[-1]), len(form), n_tokens])
    for share in SHARES:
        given = mixture(dice, type, n_tokens)
        away = skipped(dice, given, share)
        whole, fewer = multiply(given, **FORMS[form]), without(dice, given, away)
        for n_threads in (1, 2, int(dice.integers(3, 9))):
            same_but_zeros(multiply(fewer, n_threads, **FORMS[form]), whole, away)


@pytest.mark.parametrize("n_tokens", (1, 40))
@pytest.mark.parametrize("type", ("q4_0", "q8_0", "q4_K", "q6_K", "mxfp4"))
def test_the_forms_are_reached(type: str, n_tokens: int) -> None:
    """By some of the mixtures above; a CPU or type that lacks a form has ggml's plain one in its place."""
    dice = np.random.default_rng(1)
    few = {"thin"} if native.core().thin_has(type) else {"ggml"}
    repacks = {"repacked"} if type in ("q4_0", "q4_K", "mxfp4") and native.core().products_use("avx2") else {"ggml"}
    native.core().products_use("")
    kernels: dict[str, set[str]] = {form: set() for form in FORMS}
    for _ in range(10):
        given = mixture(dice, type, n_tokens)
        for form, options in FORMS.items():
            kernels[form].add(native.core().multiply(**given, **options)["kernel"])
    assert kernels["plain"] == {"ggml"} and repacks & kernels["repacked"]
    assert kernels["own"] & (few if n_tokens == 1 else set(SETS))


@pytest.mark.parametrize("type", ("q4_0", "q8_0", "q4_K", "q6_K", "mxfp4"))
@pytest.mark.parametrize("instruction_set", SETS)
def test_any_choice_may_be_skipped(type: str, instruction_set: str) -> None:
    """By our kernels single choices of an expert, too: whether they compute depends on the shape alone."""
    if not native.core().products_use(instruction_set):
        pytest.skip(f"this CPU has no {instruction_set}")
    try:
        dice = np.random.default_rng(5)
        for n_tokens in (2, 40, 200):
            given = mixture(dice, type, n_tokens)
            while n_tokens > 2 and native.core().multiply(**given)["kernel"] == "ggml":
                given = mixture(dice, type, n_tokens)
            away = dice.random(given["ids"].shape) < dice.choice([0.1, 0.5, 0.9])
            whole, fewer = multiply(given), without(dice, given, away)
            for n_threads in (1, 3):
                same_but_zeros(multiply(fewer, n_threads), whole, away)
    finally:
        native.core().products_use("")


@pytest.mark.parametrize("n_tokens", TOKENS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("type", BLOCKS)
def test_the_last_expert_may_be_marked_as_nothing(type: str, form: str, n_tokens: int) -> None:
    """Its bytes are not read: here they are not zeros. Several choices of a token may be nothing."""
    dice = np.random.default_rng([7, n_tokens])
    given = mixture(dice, type, n_tokens)
    whole, last = multiply(given, **FORMS[form]), given["n_experts"] - 1
    away = skipped(dice, given, "some") | (given["ids"] == last)
    fewer = given | {"ids": np.where(away, last, given["ids"]).astype(np.int32)}
    for n_threads in (1, 2, 5):
        same_but_zeros(multiply(fewer, n_threads, last_nothing=True, **FORMS[form]), whole, away)


@pytest.mark.parametrize("type", BLOCKS)
def test_an_expert_of_zeros_is_nothing_without_the_mark(type: str) -> None:
    """So that devices that do not know the mark compute the same."""
    given = mixture(np.random.default_rng(8), type, 40)
    last = given["n_experts"] - 1
    given["weight"].reshape(given["n_experts"], -1)[last] = 0
    found = multiply(given, marked=False)
    assert (given["ids"] == last).any() and not found[given["ids"] == last].any()
    assert np.array_equal(found, multiply(given, marked=False, last_nothing=True))


# ---- by network -----------------------------------------------------------------------------------------------------


class Operators:
    """f32 operators on an RPC server: 3 rows of 2 experts, 2 tokens, of which each chooses 2."""

    rows, x, bias, ids, product, total = (1, (4, 3, 2), 0), (2, (4, 1, 2), 256), (3, (3, 2), 512), 768, 1024, 1280

    def __init__(self, server: Server) -> None:
        self.socket = server.connect()
        assert is_served(self.socket)
        self.buffer, self.base = allocate(self.socket, 4096)
        dice = np.random.default_rng(9)
        self.values = [dice.normal(size=ne[::-1]).astype(np.float32) for _, ne, _ in (self.rows, self.x, self.bias)]

    def tensor(self, ident: int, ne: tuple[int, ...], at: int, kind: int = F32, **more: Any) -> bytes:
        return tensor(ident, kind, ne, self.buffer, self.base + at, **more)

    def send(self, whole: bytes, data: bytes) -> None:
        self.socket.sendall(message(rpc_wire.SET_TENSOR, whole + struct.pack("<BQ", 0, 0) + data))

    def computed(self, chosen: Array, last_nothing: bool = False) -> tuple[Array, Array]:
        """The products, and they plus biases; empty where the server ended the connection."""
        op, params = rpc_wire.operators(), (*[0] * 14, int(last_nothing))
        self.socket.sendall(message(rpc_wire.BUFFER_CLEAR, struct.pack("<QB", self.buffer, 255)))
        sources = [self.tensor(*one) for one in (self.rows, self.x, self.bias)]
        for whole, values in zip(sources, self.values, strict=True):
            self.send(whole, values.tobytes())
        ids = self.tensor(4, (2, 2), self.ids, I32)
        self.send(ids, chosen.astype(np.int32).tobytes())
        product = self.tensor(5, (3, 2, 2), self.product, op=op["MUL_MAT_ID"], src=(1, 2, 4), params=params)
        total = self.tensor(6, (3, 2, 2), self.total, op=op["ADD_ID"], src=(5, 3, 4))
        self.socket.sendall(message(rpc_wire.GRAPH_COMPUTE, graph((5, 6), (*sources, ids, product, total))))
        found = [ask(self.socket, rpc_wire.GET_TENSOR, one + struct.pack("<QQ", 0, 48)) for one in (product, total)]
        first, second = (np.frombuffer(one, np.float32).reshape(-1, 2, 3) for one in found)
        return first, second

    def expected(self, chosen: Array, away: Array) -> tuple[Array, Array]:
        rows, x, bias = self.values
        there = np.maximum(chosen, 0)
        products = np.einsum("tumk,tuk->tum", rows[there], np.repeat(x, 2, axis=1)) * ~away[..., None]
        return products, products + bias[there] * (chosen >= 0)[..., None]


@pytest.mark.parametrize(
    ("chosen", "last_nothing"),
    [([[0, 1], [1, 0]], False), ([[-1, 1], [1, -7]], False), ([[-1, -1], [-1, -1]], False), ([[1, 1], [0, 1]], True)],
)
def test_a_server_computes_the_choices_that_are_left(chosen: list[list[int]], last_nothing: bool) -> None:
    ids = np.array(chosen)
    away = (ids < 0) | (last_nothing & (ids == 1))
    with Server("--isolate") as server:
        operators = Operators(server)
        for found, exact in zip(operators.computed(ids, last_nothing), operators.expected(ids, away), strict=True):
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
        assert not operators.computed(ids, last_nothing)[0][away].any()


@pytest.mark.parametrize("last_nothing", (False, True))
def test_experts_that_are_not_there_end_the_client_alone(last_nothing: bool) -> None:
    with Server("--isolate") as server:
        assert not Operators(server).computed(np.array([[0, 1], [-1, 2]]), last_nothing)[0].size
        assert Operators(server).computed(np.array([[0, 1], [1, -1]]))[0].size
