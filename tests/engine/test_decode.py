"""Our products with few columns on the CPU against sums in float64: types, shapes, mixtures, threads."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.data.entries import TILED_FROM
from oallama.engine import native
from support.products import Mixture, assert_sums, columns_of, computed, error, reference, weight_of, whole_columns

# Values of a block. Kernels look at 256 values together: the last ones of a row can be fewer.
GROUPS = {"q4_0": 32, "q8_0": 32, "mxfp4": 32, "q4_K": 256, "q6_K": 256}
MOST = TILED_FROM - 1  # columns
LONG = 64 * 256 + 3 * 4096  # values of a row

SETS = [name for name in ("avx2", "avx-vnni", "avx512") if native.core().products_use(name)]
native.core().products_use("")

pytestmark = pytest.mark.skipif(not SETS, reason="this CPU has no AVX2")


@pytest.fixture(params=SETS, autouse=True, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    native.core().products_use(request.param)
    yield
    native.core().products_use("")


@pytest.mark.parametrize("type", GROUPS)
@pytest.mark.parametrize("n", range(1, MOST + 1))
def test_values_are_those_of_float64(type: str, n: int) -> None:
    weight, columns = weight_of(type, 77, 1024, n), columns_of(n, 1024, n)
    done = computed(weight, type, columns, n_threads=2)
    assert done["refusal"] is None and done["kernel"] == "thin"
    assert error(done["out"], reference(weight, type, columns)) < 2e-2  # columns have 8 bits


@pytest.mark.parametrize("type", GROUPS)
def test_columns_of_bytes_are_exact(type: str) -> None:
    """Columns that lose nothing as bytes show every mistake of the weight's, at the ends of its range, too."""
    weight, columns = weight_of(type, 40, 512, 1), whole_columns(5, 512, 2)
    columns[0, 3] = 127
    columns[0, 4] = -127
    if type == "q8_0":
        weight.reshape(40, -1, 34)[:, :, 2:20] = 0x80
    assert error(computed(weight, type, columns)["out"], reference(weight, type, columns)) < 1e-6


@pytest.mark.parametrize("exponents", [(0, 1, 2, 3), (1, 200)], ids=["least", "range"])
def test_all_scales_of_mxfp4(exponents: tuple[int, ...]) -> None:
    """The least ones are denormal numbers."""
    weight, columns = weight_of("mxfp4", 40, 512, 1), whole_columns(3, 512, 2)
    blocks = weight.reshape(40, -1, 17)
    blocks[:, :, 0] = np.random.default_rng(3).choice(exponents, blocks.shape[:2])
    assert error(computed(weight, "mxfp4", columns)["out"], reference(weight, "mxfp4", columns)) < 1e-6


@settings(max_examples=60)
@given(
    type=st.sampled_from(sorted(GROUPS)),
    n_rows=st.integers(1, 130),
    n_groups=st.integers(1, 20),
    n=st.integers(1, MOST),
    n_threads=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_any_shape(type: str, n_rows: int, n_groups: int, n: int, n_threads: int, seed: int) -> None:
    k = n_groups * GROUPS[type]
    weight, columns = weight_of(type, n_rows, k, seed), whole_columns(n, k, seed)
    done = computed(weight, type, columns, n_threads)
    assert done["kernel"] == "thin"
    assert_sums(done["out"], weight, type, columns)


@pytest.mark.parametrize("type", GROUPS)
@pytest.mark.parametrize("n", [1, 5])
def test_errors_are_no_larger_than_ggmls(type: str, n: int) -> None:
    weight, columns = weight_of(type, 300, 1024, 5), columns_of(n, 1024, 5)
    exact = reference(weight, type, columns)
    ours, theirs = (error(computed(weight, type, columns, 2, marked)["out"], exact) for marked in (True, False))
    assert ours <= 1.01 * theirs  # the same blocks for types with blocks of 32: equal but for rounding


@pytest.mark.parametrize("type", GROUPS)
@pytest.mark.parametrize(("n_rows", "n"), [(17, 7), (500, 1), (129, 4)])
def test_threads_change_no_bit(type: str, n_rows: int, n: int) -> None:
    weight, columns = weight_of(type, n_rows, 1024, 7), columns_of(n, 1024, 7)
    one = computed(weight, type, columns)["out"]
    for n_threads in (2, 3, 4, 5, 8, 64):
        assert np.array_equal(computed(weight, type, columns, n_threads)["out"], one)


@pytest.mark.parametrize("type", GROUPS)
@pytest.mark.parametrize("k", [512, LONG])
def test_a_column_is_the_same_beside_others(type: str, k: int) -> None:
    """So that drafts are checked with the bits of single tokens."""
    weight, columns = weight_of(type, 21, k, 8), columns_of(MOST, k, 8)
    for n in range(1, MOST + 1):
        some = computed(weight, type, columns[:, :n])["out"]
        for i in range(n):
            assert np.array_equal(computed(weight, type, columns[:, i : i + 1])["out"][0, 0], some[0, i])


@pytest.mark.parametrize("type", GROUPS)
@pytest.mark.parametrize("n", [1, 2, 4, MOST])
def test_long_rows_are_summed_by_blocks(type: str, n: int) -> None:
    """Longer than what passes at once for any number of columns, with a last block that is not whole."""
    k = LONG + (256 if GROUPS[type] == 256 else 32)
    weight, columns = weight_of(type, 9, k, n), whole_columns(n, k, n)
    done = computed(weight, type, columns, n_threads=2)
    assert done["kernel"] == "thin"
    assert_sums(done["out"], weight, type, columns)


MIXTURES = [
    Mixture("q4_K", 1, 16, 4, 1),
    Mixture("q4_0", 2, 8, 3, 3),
    Mixture("q8_0", 1, 4, 4, 4, n_rows=130),
    Mixture("q6_K", 2, 32, 4, 1, n_rows=7, skewed=True),
    Mixture("mxfp4", 1, 8, 4, 1, k=2880),  # of gpt-oss: rows of 11 groups and a quarter
    Mixture("q8_0", 5, 16, 2, 1, k=96),
    Mixture("q4_0", 35, 8, 2, 2, skewed=True),
    Mixture("q4_K", 60, 64, 4, 1, n_rows=33),
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_mixtures_are_those_of_float64(mixture: Mixture) -> None:
    given = mixture.operands()
    done = native.core().multiply(**given)
    assert done["refusal"] is None and done["kernel"] == "thin"
    assert error(done["out"], mixture.reference(given)) < 2e-2
    for n_threads in (2, 3, 8, 64):
        assert np.array_equal(native.core().multiply(**given, n_threads=n_threads)["out"], done["out"])


@pytest.mark.parametrize("type", GROUPS)
def test_all_tokens_may_choose_one_expert(type: str) -> None:
    """More columns than a kernel is given at once; other experts have none."""
    given = Mixture(type, 100, 64, 2, 1, n_rows=10).operands()
    given["ids"][:] = [3, 63]
    done = native.core().multiply(**given, n_threads=3)
    assert done["kernel"] == "thin"
    weight = given["weight"].reshape(64, 10, -1)
    for slot, expert in enumerate((3, 63)):
        alone = computed(weight[expert], type, given["columns"][:1])["out"][0, 0]
        assert np.array_equal(done["out"][0, slot], alone)
        assert error(done["out"][:, slot], reference(weight[expert], type, given["columns"])[:, 0]) < 2e-2


def test_a_broken_value_shows() -> None:
    for type in GROUPS:
        weight, columns = weight_of(type, 40, 512, 4), columns_of(4, 512, 4)
        columns[0, 1, 100] = np.nan
        columns[0, 2, 300] = np.inf
        broken = ~np.isfinite(computed(weight, type, columns)["out"][0]).all(axis=1)
        assert list(np.flatnonzero(broken)) == [1, 2]


def test_columns_of_zeros_give_zeros() -> None:
    for type in GROUPS:
        assert not computed(weight_of(type, 40, 256, 4), type, np.zeros((1, 1, 256), np.float32))["out"].any()


def test_what_has_no_kernel_is_ggmls() -> None:
    rng = np.random.default_rng(0)
    q5_0 = gguf.quants.quantize(rng.normal(size=(8, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q5_0)
    columns = columns_of(1, 64, 0)
    done, plain = computed(q5_0, "q5_0", columns), computed(q5_0, "q5_0", columns, marked=False)
    assert done["kernel"] == "ggml" and np.array_equal(done["out"], plain["out"])


def test_no_mark_is_ggmls() -> None:
    weight, columns = weight_of("q4_K", 64, 1024, 0), columns_of(1, 1024, 0)
    assert computed(weight, "q4_K", columns, marked=False)["kernel"] == "ggml"
