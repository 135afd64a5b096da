"""Our attention on the CPU against sums in float64: shapes, types of cache, masks, instruction sets, threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oallama.data.entries import KERNELS
from oallama.data.plan import HOST
from oallama.engine import native, runtime
from oallama.engine.rpc import LocalRpcServer
from support.hand_plan import hand_plan
from support.logits import compute_logits, nmse

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
SETS = ("base", "avx2", "avx512", "amx")


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    if not native.core().attend_use(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    native.core().attend_use("")


@dataclass(frozen=True)
class Case:
    """One operator. mask: "causal", "window", "none", "alibi", "holes", or "sequences" of one unified cache."""

    n_tokens: int
    n_kv: int
    n_head: int
    n_head_kv: int
    d_k: int = 64
    d_v: int = 64
    type_k: str = "f16"
    type_v: str = "f16"
    mask: str = "causal"
    n_sequences: int = 1
    sinks: bool = False
    softcap: float = 0.0
    seed: int = 0

    def operands(self) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed)
        shape = (self.n_sequences, self.n_tokens, self.n_head, self.d_k)
        k = rng.normal(size=(self.n_sequences * self.n_kv, self.n_head_kv * self.d_k)).astype(np.float32)
        v = rng.normal(size=(self.n_sequences * self.n_kv, self.n_head_kv * self.d_v)).astype(np.float32)
        return {
            "q": (2 * rng.normal(size=shape)).astype(np.float32),
            "k": packed(k, self.type_k),
            "v": packed(v, self.type_v),
            "mask": self.masked(rng),
            "sinks": rng.normal(size=self.n_head).astype(np.float32) if self.sinks else None,
        }

    def masked(self, rng: np.random.Generator) -> np.ndarray[Any, Any] | None:
        if self.mask == "none":
            return None
        seen = np.arange(self.n_kv)[None, :] <= (self.n_kv - self.n_tokens + np.arange(self.n_tokens))[:, None]
        if self.mask == "window":
            seen &= np.arange(self.n_kv)[None, :] > (self.n_kv - self.n_tokens + np.arange(self.n_tokens))[:, None] - 70
        if self.mask == "holes":
            seen &= rng.random(seen.shape) < 0.5
        if self.mask == "sequences":
            seen &= (np.arange(self.n_kv)[None, :] // 64 % 2) == (np.arange(self.n_tokens) % 2)[:, None]
        values = np.where(seen, 0.0, -np.inf)
        if self.mask == "alibi":
            values = np.where(seen, -np.abs(rng.normal(size=seen.shape)), -np.inf)
        return np.broadcast_to(values.astype(np.float16), (self.n_sequences, *values.shape)).copy()


def packed(values: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    kind = gguf.GGMLQuantizationType[name.upper()]
    return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8)


def unpacked(nbytes: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    kind = gguf.GGMLQuantizationType[name.upper()]
    plain = {"f32": np.float32, "f16": np.float16}.get(name)
    values = nbytes.view(plain) if plain else gguf.quants.dequantize(nbytes, kind)
    return np.asarray(values, np.float64)


def computed(
    case: Case, given: dict[str, Any], n_threads: int = 1, marked: bool = True, alone: bool = False
) -> dict[str, Any]:
    mask = given["mask"]
    return dict(
        native.core().attend(
            given["q"],
            given["k"],
            given["v"],
            case.type_k,
            case.type_v,
            n_head_kv=case.n_head_kv,
            d_v=case.d_v,
            mask=None if mask is None else mask.view(np.uint16),
            sinks=given["sinks"],
            scale=case.d_k**-0.5,
            max_bias=8.0 if case.mask == "alibi" else 0.0,
            softcap=case.softcap,
            n_threads=n_threads,
            marked=marked,
            alone=alone,
        )
    )


def reference(case: Case, given: dict[str, Any]) -> np.ndarray[Any, Any]:
    """float64, from the values that the cache really holds."""
    shape = (case.n_sequences, case.n_kv, case.n_head_kv)
    group = case.n_head // case.n_head_kv
    k = np.repeat(unpacked(given["k"], case.type_k).reshape(*shape, case.d_k), group, axis=2)
    v = np.repeat(unpacked(given["v"], case.type_v).reshape(*shape, case.d_v), group, axis=2)
    scores = np.einsum("snhd,sthd->shnt", given["q"].astype(np.float64), k) * case.d_k**-0.5
    if case.softcap:
        scores = case.softcap * np.tanh(scores / case.softcap)
    if given["mask"] is not None:
        slopes = np.ones(case.n_head)
        if case.mask == "alibi":
            below = 1 << int(np.floor(np.log2(case.n_head)))
            rest = [2 ** (-4.0 / below * (2 * i + 1)) for i in range(case.n_head - below)]
            slopes = np.array([2 ** (-8.0 / below * (h + 1)) for h in range(below)] + rest)
        with np.errstate(invalid="ignore"):
            scores = scores + given["mask"].astype(np.float64)[:, None] * slopes[None, :, None, None]
    most = scores.max(axis=-1, keepdims=True)
    if case.sinks:
        most = np.maximum(most, given["sinks"][None, :, None, None])
    most = np.where(np.isneginf(most), 0.0, most)
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    if case.sinks:
        total = total + np.exp(given["sinks"][None, :, None, None] - most)
    weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return np.einsum("shnt,sthd->snhd", weights, v)


def error(found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


def allowed(kernel: str) -> float:
    """Tiles keep 16 bits of a value, words 15 bits of a row's largest one, and a sign. ggml's kernels err by 1e-4 and
    more where a cache is not f32."""
    return next((error for name, error in (("tiles", 2e-5), ("words", 2e-4)) if name in kernel), 2e-6)


CASES = [
    Case(1, 256, 5, 1),
    Case(1, 1000, 40, 8, 128, 128),
    Case(2, 700, 8, 8),
    Case(4, 512, 32, 8, 128, 128, mask="window"),
    Case(8, 300, 8, 1, 96, 160),
    Case(1, 64, 16, 1, 576, 512),
    Case(3, 320, 16, 1, 192, 128, mask="none"),
    Case(37, 333, 10, 2, 64, 64),
    Case(130, 513, 5, 1, 128, 128),
    Case(64, 640, 4, 4, mask="window"),
    Case(5, 256, 12, 4, mask="alibi"),
    Case(40, 256, 12, 4, mask="alibi"),
    Case(1, 512, 8, 2, sinks=True, softcap=20.0),
    Case(33, 512, 8, 2, sinks=True, softcap=20.0),
    Case(4, 512, 8, 2, mask="holes"),
    Case(20, 512, 8, 2, mask="sequences"),
    Case(1, 2048, 8, 2, n_sequences=3),
    Case(3, 4096, 10, 2, type_k="q8_0", type_v="q8_0"),
    Case(1, 777, 40, 8, 128, 128, type_k="q8_0", type_v="q8_0"),
    Case(8, 333, 12, 4, 96, 160, type_k="q8_0", type_v="q4_0", mask="window"),
    Case(2, 130, 3, 3, 32, 64, type_k="q4_0", type_v="q4_0", mask="alibi", softcap=20.0),
    Case(1, 500, 16, 1, 576, 512, type_k="q8_0", type_v="q8_0", sinks=True),
    Case(20, 500, 16, 1, 576, 512, type_k="q8_0", type_v="q8_0", mask="sequences", sinks=True),
    Case(200, 400, 40, 8),
    Case(17, 256, 8, 2, n_sequences=2),
    Case(1, 1, 4, 4),
    Case(3, 256, 8, 4, 80, 16),
    Case(30, 256, 8, 4, 16, 112),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_are_those_of_float64(case: Case, instruction_set: str) -> None:
    given = case.operands()
    done = computed(case, given, n_threads=2)
    assert done["refusal"] is None and done["kernel"].startswith(instruction_set)
    assert error(done["out"], reference(case, given)) < allowed(done["kernel"])


@pytest.mark.parametrize("type_k", TYPES)
@pytest.mark.parametrize("type_v", TYPES)
@pytest.mark.parametrize("n_tokens", [1, 48])
def test_every_pair_of_types(type_k: str, type_v: str, n_tokens: int, instruction_set: str) -> None:
    case = Case(n_tokens, 320, 8, 2, 128, 64, type_k, type_v)
    given = case.operands()
    done = computed(case, given)
    assert error(done["out"], reference(case, given)) < allowed(done["kernel"])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n_tokens=st.integers(1, 70),
    n_kv=st.integers(1, 900),
    heads=st.sampled_from([(1, 1), (4, 4), (5, 1), (8, 2), (7, 7), (24, 8), (16, 1)]),
    d_k=st.sampled_from([32, 64, 96, 128, 256]),
    d_v=st.sampled_from([32, 64, 128]),
    types=st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)),
    mask=st.sampled_from(["causal", "window", "none", "alibi", "holes", "sequences"]),
    n_threads=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_any_shape(
    n_tokens: int, n_kv: int, heads: tuple[int, int], d_k: int, d_v: int, types: tuple[str, str], mask: str,
    n_threads: int, seed: int,
) -> None:  # fmt: skip
    case = Case(n_tokens, n_kv, *heads, d_k, d_v, *types, mask, seed=seed)
    given = case.operands()
    done, exact = computed(case, given, n_threads), reference(case, given)
    assert np.isfinite(done["out"]).all()
    np.testing.assert_allclose(done["out"], exact, rtol=0, atol=max(2e-5, 3 * allowed(done["kernel"])))


@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.usefixtures("instruction_set")
def test_a_broken_query_shows(n_tokens: int, kind: str, number: float) -> None:
    case = Case(n_tokens, 320, 8, 2, type_k=kind, type_v=kind)
    given = case.operands()
    given["q"][0, 0, 3, 5] = number
    out = computed(case, given)["out"]
    assert np.isnan(out[0, 0, 3]).all() and np.isfinite(np.delete(out[0, 0], 3, axis=0)).all()


@pytest.mark.parametrize("case", CASES[:6] + CASES[7:8] + [case for case in CASES if case.type_k != "f16"], ids=str)
@pytest.mark.usefixtures("instruction_set")
def test_errors_are_no_larger_than_ggmls(case: Case) -> None:
    given = case.operands()
    exact = reference(case, given)
    ours, theirs = (error(computed(case, given, 2, marked)["out"], exact) for marked in (True, False))
    assert ours <= theirs


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.usefixtures("instruction_set")
def test_a_first_token_that_most_look_at_costs_no_precision(kind: str, n_tokens: int) -> None:
    """As in many models: it has nearly all of the weight, and its V is small."""
    case = Case(n_tokens, 300, 8, 2, 64, 64, kind, kind)
    given = case.operands()
    assert given["mask"] is not None
    given["mask"][:, :, 0] = 12
    v = unpacked(given["v"], kind).reshape(case.n_kv, -1)
    v[0] *= 0.02
    given["v"] = packed(v.astype(np.float32), kind)
    done, exact = computed(case, given), reference(case, given)
    assert error(done["out"], exact) < allowed(done["kernel"])


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.usefixtures("instruction_set")
def test_what_no_row_sees_changes_no_bit(kind: str, n_tokens: int) -> None:
    case = Case(n_tokens, 256, 8, 2, 64, 64, kind, kind, mask="none")
    given = case.operands()
    unseen = np.random.default_rng(1).random(case.n_kv) < 0.4
    given["mask"] = np.broadcast_to(np.where(unseen, -np.inf, 0.0).astype(np.float16), (1, n_tokens, case.n_kv)).copy()
    before = computed(case, given)["out"]
    for name in ("k", "v"):
        values = unpacked(given[name], kind).reshape(case.n_kv, -1)
        values[unseen] *= 300
        rows = packed(values.astype(np.float32), kind).reshape(case.n_kv, -1)
        given[name] = np.where(unseen[:, None], rows, given[name].reshape(case.n_kv, -1)).reshape(given[name].shape)
    assert np.array_equal(computed(case, given)["out"], before)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("instruction_set")
def test_threads_change_no_bit(case: Case) -> None:
    given = case.operands()
    one = computed(case, given)["out"]
    for n_threads in (2, 3, 7):
        assert np.array_equal(computed(case, given, n_threads)["out"], one)


ALONE = [case for case in CASES if case.n_sequences == 1]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_rows_alone_are_right_with_any_number_of_threads(case: Case, instruction_set: str) -> None:
    given = case.operands()
    one, *others = (computed(case, given, n, alone=True) for n in (1, 2, 7))
    assert one["refusal"] is None and one["kernel"] in {f"{instruction_set} {how} alone" for how in ("dots", "words")}
    assert error(one["out"], reference(case, given)) < allowed(one["kernel"])
    assert all(np.array_equal(one["out"], other["out"]) for other in others)


@pytest.mark.parametrize("n_kv", [1, 63, 300, 1000, 20000])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("mask", ["causal", "alibi"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.usefixtures("instruction_set")
def test_a_row_alone_has_the_same_bits_wherever_its_cells_lie(n_kv: int, kind: str, mask: str, sinks: bool) -> None:
    """Behind others, between others, and beside rows that see other cells."""
    case = Case(1, n_kv, 8, 2, 64, 32, kind, kind, mask, sinks=sinks)
    given = case.operands()
    assert given["mask"] is not None
    expected = computed(case, given, alone=True)["out"][0, 0]
    rng = np.random.default_rng(1)
    for places in (np.arange(n_kv) + 130, np.sort(rng.choice(2 * n_kv + 77, n_kv, replace=False))):
        n_cells = int(places[-1]) + 50
        around = replace(case, n_tokens=3, n_kv=n_cells, mask="holes", seed=2)
        there = around.operands()
        assert there["mask"] is not None
        there["mask"][0, 1] = -np.inf
        there["mask"][0, 1, places] = given["mask"][0, 0]
        there["q"][0, 1], there["sinks"] = given["q"][0, 0], given["sinks"]
        for name in ("k", "v"):
            rows = there[name].reshape(n_cells, -1)
            rows[places] = given[name].reshape(n_kv, -1)
            there[name] = rows
        found = computed(replace(around, mask=mask), there, n_threads=2, alone=True)["out"][0]
        assert np.array_equal(found[1], expected) and not np.array_equal(found[0], expected)


def test_a_row_alone_that_sees_nothing_is_zero() -> None:
    case = Case(2, 200, 8, 2)
    given = case.operands()
    assert given["mask"] is not None
    given["mask"][0, 0] = -np.inf
    out = computed(case, given, alone=True)["out"][0]
    assert not out[0].any() and out[1].any()


def test_rows_alone_of_several_caches_are_ggmls() -> None:
    case = Case(1, 64, 8, 2, n_sequences=2)
    given = case.operands()
    done, plain = computed(case, given, alone=True), computed(case, given, marked=False)
    assert "one cache for all" in done["refusal"] and done["kernel"] == "ggml"
    assert np.array_equal(done["out"], plain["out"])


def test_what_has_no_kernel_is_ggmls() -> None:
    for case, words in (
        (Case(1, 256, 4, 4, 64, 64, "q5_0", "f16"), "type of cache"),
        (Case(1, 256, 4, 4, 72, 72), "multiple of 16"),
    ):
        given = case.operands()
        done, plain = computed(case, given), computed(case, given, marked=False)
        assert words in done["refusal"] and done["kernel"] == "ggml"
        assert np.array_equal(done["out"], plain["out"])


@pytest.mark.parametrize(
    ("case", "how"),
    [
        (Case(1, 256, 4, 4, 64, 64, "q8_0", "q8_0"), "dots"),
        (Case(2, 256, 4, 4, 64, 64, "q8_0", "q8_0"), "dots"),
        (Case(3, 256, 4, 4, 64, 64, "q8_0", "q8_0"), "words"),
        (Case(1, 256, 12, 4, 64, 64, "q8_0", "q8_0"), "words"),
        (Case(1, 256, 4, 4, 64, 64, "q8_0", "q4_0"), "words"),
        (Case(90, 256, 4, 4, 64, 64, "q4_0", "q4_0"), "columns"),
        (Case(25, 256, 4, 4, 64, 64, "q4_0", "q8_0"), "words"),
        (Case(26, 256, 4, 4, 64, 64, "q4_0", "q8_0"), "columns"),
        (Case(3, 256, 4, 4, 64, 64, "q8_0", "f16"), "words"),
        (Case(2, 256, 4, 4, 64, 64, "q8_0", "f16"), "dots"),
        (Case(1, 256, 4, 4, 64, 64, "f16", "q4_0"), "words"),
        (Case(90, 256, 4, 4, 64, 64, "f16", "q8_0"), "columns"),
        (Case(90, 256, 4, 4, 64, 64, "f16", "f16"), "columns"),
    ],
    ids=str,
)
@pytest.mark.parametrize("instruction_set", ["avx2"], indirect=True)
@pytest.mark.usefixtures("instruction_set")
def test_words_are_for_caches_of_bytes(case: Case, how: str) -> None:
    assert computed(case, case.operands())["kernel"] == f"avx2 {how}"


@pytest.mark.parametrize(
    ("n_head", "kinds", "how"),
    [
        (8, ("q8_0", "q8_0"), "dots"),
        (12, ("q8_0", "q8_0"), "words"),
        (4, ("q4_0", "q8_0"), "words"),
        (12, ("f16", "f16"), "dots"),
    ],
)
@pytest.mark.parametrize("instruction_set", ["avx2"], indirect=True)
@pytest.mark.usefixtures("instruction_set")
def test_rows_alone_take_words_by_their_heads(n_head: int, kinds: tuple[str, str], how: str) -> None:
    """However many rows there are: bits must not depend on others."""
    for n_tokens in (1, 5):
        case = Case(n_tokens, 256, n_head, 4, 64, 64, *kinds)
        assert computed(case, case.operands(), alone=True)["kernel"] == f"avx2 {how} alone"


@pytest.mark.parametrize(("broken", "number"), [("k", np.nan), ("k", np.inf), ("v", np.nan), ("v", np.inf)])
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("n_tokens", [1, 40])
@pytest.mark.usefixtures("instruction_set")
def test_a_broken_scale_of_the_cache_shows(broken: str, number: float, kind: str, n_tokens: int) -> None:
    """In all rows of its head, and in no other one."""
    case = Case(n_tokens, 100, 8, 2, 64, 64, kind, kind, mask="none")
    given = case.operands()
    of_block = 34 if kind == "q8_0" else 18
    blocks = given[broken].reshape(100, 2, 2, of_block)
    blocks[7, 1, 1, :2] = np.frombuffer(np.float16(number).tobytes(), np.uint8)
    out = computed(case, {**given, broken: blocks.reshape(given[broken].shape)}, 2)["out"][0]
    assert np.isfinite(out[:, :4]).all()
    assert not np.isfinite(out[:, 4:, 32:]).any() and (broken == "k" or np.isfinite(out[:, 4:, :32]).all())


def test_no_mark_is_ggmls() -> None:
    case = CASES[1]
    given = case.operands()
    plain, ours = computed(case, given, marked=False), computed(case, given)
    assert plain["kernel"] == "ggml" and ours["kernel"].endswith("dots")
    assert not np.array_equal(plain["out"], ours["out"])


@pytest.mark.parametrize("n_head_kv", [0, 3])
def test_heads_must_fit(n_head_kv: int) -> None:
    case = Case(1, 64, 4, 4)
    with pytest.raises(ValueError, match="no multiple of n_head_kv"):
        computed(replace(case, n_head_kv=n_head_kv), case.operands())


@pytest.mark.parametrize("device", [HOST, "RPC0"])
def test_a_plan_marks_the_attention_of_its_model(device: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Logits are those of ggml's kernels, but for rounding."""
    model = tiny("llama")
    plan = hand_plan(model, device)
    jobs: list[dict[str, Any]] = []
    with LocalRpcServer(threads=1, register=False) as server:
        reached = {"devices": ["RPC0"], "rpc": [server.endpoint]} if device != HOST else {}
        for kernel in KERNELS:
            table = tmp_path / f"{kernel}.map"
            table.write_text(replace(plan, context=replace(plan.context, attention=kernel)).to_backend_map())
            jobs.append({"model": str(model), "table": str(table), "flash_attn": 1, **reached})
        theirs, ours = compute_logits(runtime.lib_dir(), jobs, tmp_path)
    assert 0 < nmse(ours, theirs) < 1e-4  # ggml sums V in f16
