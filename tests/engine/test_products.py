"""Our products of quantised weights on the CPU against sums in float64: types, shapes, instruction sets, threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oallama.data.entries import TILED_FROM, is_tiled
from oallama.data.plan import HOST
from oallama.engine import native, runtime
from support.hand_plan import hand_plan, realised
from support.logits import compute_logits, nmse, tokens
from support.processes import ran_python
from support.products import Mixture, assert_sums, columns_of, computed, error, reference, weight_of, whole_columns

TYPES = {"q4_0": 32, "q8_0": 32, "mxfp4": 32, "q4_K": 256, "q6_K": 256}  # values of a block
SETS = ("base", "avx2", "avx-vnni", "avx512")
SHAPES = [(64, 512, 32), (1, 256, TILED_FROM), (33, 768, 9), (70, 2304, 47), (97, 256, 131)]


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    if not native.core().products_use(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    native.core().products_use("")


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(("n_rows", "k", "n"), SHAPES)
def test_values_are_those_of_float64(type: str, n_rows: int, k: int, n: int, instruction_set: str) -> None:
    weight, columns = weight_of(type, n_rows, k, n), columns_of(n, k, n)
    done = computed(weight, type, columns, n_threads=2)
    assert done["refusal"] is None and done["kernel"] == instruction_set
    assert error(done["out"], reference(weight, type, columns)) < 2e-2  # columns have 8 bits


KERNEL = """
import numpy as np
from oallama.engine import native
weight, columns = np.zeros((16, 68), np.uint8), np.ones((16, 1, 64), np.float32)
print(native.core().multiply(weight, "q8_0", columns)["kernel"])
"""


@pytest.mark.parametrize("largest", SETS)
def test_a_process_takes_no_larger_set_than_it_is_told(largest: str) -> None:
    best = next(name for name in reversed(SETS[: SETS.index(largest) + 1]) if native.core().products_use(name))
    native.core().products_use("")
    done = ran_python(KERNEL, env={"OALLAMA_INSTRUCTIONS": largest})
    assert done.stdout.split() == [best]


def test_an_unknown_set_is_named() -> None:
    environment = {**os.environ, "OALLAMA_INSTRUCTIONS": "avx3"}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "avx512 or amx, got avx3" in done.stderr


@pytest.mark.parametrize("type", TYPES)
def test_columns_of_bytes_are_exact(type: str, instruction_set: str) -> None:
    """Columns that lose nothing as bytes show every mistake of the weight's, at the ends of its range, too."""
    weight = weight_of(type, 40, 512, 1)
    columns = whole_columns(21, 512, 2)
    columns[0, 3] = 127
    columns[0, 4] = -127
    if type == "q8_0":
        weight.reshape(40, -1, 34)[:, :, 2:20] = 0x80
    assert error(computed(weight, type, columns)["out"], reference(weight, type, columns)) < 1e-6


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    type=st.sampled_from(sorted(TYPES)),
    n_rows=st.integers(1, 130),
    n_blocks=st.integers(1, 9),
    n=st.integers(TILED_FROM, 140),
    n_threads=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_any_shape(type: str, n_rows: int, n_blocks: int, n: int, n_threads: int, seed: int) -> None:
    k = n_blocks * TYPES[type]
    weight, columns = weight_of(type, n_rows, k, seed), whole_columns(n, k, seed)
    assert_sums(computed(weight, type, columns, n_threads)["out"], weight, type, columns)


@pytest.mark.parametrize("type", TYPES)
def test_errors_are_no_larger_than_ggmls(type: str) -> None:
    weight, columns = weight_of(type, 300, 1024, 5), columns_of(64, 1024, 5)
    exact = reference(weight, type, columns)
    ours, theirs = (error(computed(weight, type, columns, 2, marked)["out"], exact) for marked in (True, False))
    assert ours <= 1.01 * theirs  # the same blocks for types with blocks of 32: equal but for rounding


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(("n_rows", "n"), [(17, 300), (500, 20)])
def test_threads_change_no_bit(type: str, n_rows: int, n: int) -> None:
    weight, columns = weight_of(type, n_rows, 1024, 7), columns_of(n, 1024, 7)
    one = computed(weight, type, columns)["out"]
    for n_threads in range(2, 9):
        assert np.array_equal(computed(weight, type, columns, n_threads)["out"], one)


def test_sequences_are_columns() -> None:
    weight, columns = weight_of("q4_0", 50, 256, 3), columns_of(11, 256, 3, n_sequences=3)
    flat = computed(weight, "q4_0", columns.reshape(1, 33, 256))["out"]
    assert np.array_equal(computed(weight, "q4_0", columns)["out"].reshape(1, 33, 50), flat)


MIXTURES = [
    Mixture("mxfp4", 70, 8, 2, 1),
    Mixture("q4_K", 64, 4, 4, 4),
    Mixture("q4_0", 200, 16, 3, 3, skewed=True),
    Mixture("q8_0", 37, 4, 1, 1),
    Mixture("q6_K", 90, 32, 4, 1, n_rows=7, skewed=True),
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_mixtures_are_those_of_float64(mixture: Mixture, instruction_set: str) -> None:
    given = mixture.operands()
    done = native.core().multiply(**given, n_threads=2)
    assert done["refusal"] is None and done["kernel"] == instruction_set
    assert error(done["out"], mixture.reference(given)) < 2e-2


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_threads_change_no_bit_of_a_mixture(mixture: Mixture) -> None:
    given = mixture.operands()
    one = native.core().multiply(**given)["out"]
    for n_threads in range(2, 9):
        assert np.array_equal(native.core().multiply(**given, n_threads=n_threads)["out"], one)


@pytest.mark.parametrize("few", [1, 0])
def test_few_rows_for_each_expert_are_for_other_kernels(few: int) -> None:
    n_tokens = TILED_FROM * 8 // 2 - few
    done = native.core().multiply(**Mixture("q4_0", n_tokens, 8, 2, 1).operands())
    assert (done["kernel"] in SETS) == is_tiled(n_tokens, 8, 2) == (not few)


def test_a_broken_value_shows() -> None:
    weight, columns = weight_of("q4_K", 40, 512, 4), columns_of(16, 512, 4)
    columns[0, 5, 100] = np.nan
    columns[0, 9, 300] = np.inf
    out = computed(weight, "q4_K", columns)["out"][0]
    broken = ~np.isfinite(out).all(axis=1)
    assert list(np.flatnonzero(broken)) == [5, 9]


def test_columns_of_zeros_give_zeros(instruction_set: str) -> None:
    columns = np.zeros((1, 16, 256), np.float32)
    assert not computed(weight_of("q6_K", 40, 256, 4), "q6_K", columns)["out"].any()


def test_what_has_no_kernel_is_ggmls() -> None:
    rng = np.random.default_rng(0)
    q5_0 = gguf.quants.quantize(rng.normal(size=(8, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q5_0)
    columns = columns_of(16, 64, 0)
    done, plain = computed(q5_0, "q5_0", columns), computed(q5_0, "q5_0", columns, marked=False)
    assert "type of weight" in done["refusal"] and done["kernel"] == "ggml"
    assert np.array_equal(done["out"], plain["out"])


def test_few_columns_are_for_other_kernels() -> None:
    weight = weight_of("q4_0", 8, 64, 0)
    assert computed(weight, "q4_0", columns_of(TILED_FROM - 1, 64, 0))["kernel"] not in SETS
    assert computed(weight, "q4_0", columns_of(TILED_FROM, 64, 0))["kernel"] in SETS


def test_no_mark_is_ggmls() -> None:
    weight, columns = weight_of("q4_0", 64, 1024, 0), columns_of(32, 1024, 0)
    plain, ours = computed(weight, "q4_0", columns, marked=False), computed(weight, "q4_0", columns)
    assert plain["kernel"] == "ggml" and ours["kernel"] in SETS
    assert not np.array_equal(plain["out"], ours["out"])


def test_bytes_must_fit() -> None:
    with pytest.raises(ValueError, match="expected a multiple of 144"):
        computed(np.zeros(100, np.uint8), "q4_K", columns_of(8, 256, 0))
    with pytest.raises(ValueError, match="whole blocks"):
        computed(np.zeros(100, np.uint8), "q4_K", columns_of(8, 100, 0))


@pytest.mark.parametrize("n_tokens", [3, 70])  # by csrc/decode, and by csrc/products
def test_a_plan_marks_the_weights_of_its_model(n_tokens: int, tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Logits are those of ggml's kernels, but for rounding."""
    model = tiny("llama", "Q4_0")
    jobs: list[dict[str, Any]] = []
    for realisation in ("plain", "tiled"):
        table = tmp_path / f"{realisation}.map"
        table.write_text(realised(hand_plan(model, HOST), realisation).to_backend_map())
        jobs.append({"model": str(model), "table": str(table), "tokens": tokens(n_tokens, seed=7)})
    theirs, ours = compute_logits(runtime.lib_dir(), jobs, tmp_path)
    assert 0 < nmse(ours, theirs) < 1e-3
