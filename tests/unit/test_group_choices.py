"""Choices of a mixture by experts for a GPU (csrc/segments/group_choices.h), with a loop in place of a warp."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from support.paths import ROOT
from support.processes import ran

INTS = ctypes.POINTER(ctypes.c_int32)
NOWHERE = -9


class Groups(ctypes.Structure):
    """oa_choice_groups."""

    _fields_ = [
        *((name, INTS) for name in ("ids", "ids_src1", "ids_dst", "bounds")),
        *((name, ctypes.c_int) for name in ("n_experts", "n_tokens", "n_used", "n_rows", "ids_stride", "token_stride")),
        ("inverse", ctypes.c_bool),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("choices") / "choices.so"
    source = ROOT / "tests/native/group_choices_twin.cpp"
    ran("c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC",
        f"-I{ROOT / 'csrc/segments'}", source, "-o", path)  # fmt: skip
    return ctypes.CDLL(str(path))


def choices(n_tokens: int, n_used: int, n_experts: int, nothing: float) -> np.ndarray:
    """[n_tokens, n_used] int32: different experts of a token, but for the last one, which is nothing."""
    rng = np.random.default_rng(n_tokens + n_used)
    ids = np.array([rng.permutation(n_experts - 1)[:n_used] for _ in range(n_tokens)], np.int32)
    ids[rng.random(ids.shape) < nothing] = n_experts - 1
    return ids


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("n_rows", ["one", "all"])
@pytest.mark.parametrize(
    ("n_tokens", "n_used", "nothing"),
    [(1, 8, 0.5), (17, 4, 0.7), (64, 8, 0.0), (64, 8, 1.0), (70, 6, 0.4), (33, 1, 0.5)],
)
def test_every_choice_has_a_row(
    library: ctypes.CDLL, n_tokens: int, n_used: int, nothing: float, n_rows: str, inverse: bool
) -> None:
    """By experts, then by choices; nothing's rows come last and belong to no expert."""
    n_experts, padding = 20, 3
    wide = np.full((n_tokens, n_used + padding), NOWHERE, np.int32)
    wide[:, :n_used] = ids = choices(n_tokens, n_used, n_experts, nothing)
    src1, dst = np.full(ids.size, NOWHERE, np.int32), np.full(ids.size, NOWHERE, np.int32)
    bounds = np.full(n_experts + 1, NOWHERE, np.int32)
    rows = 1 if n_rows == "one" else n_used
    pointers = (array.ctypes.data_as(INTS) for array in (wide, src1, dst, bounds))
    library.group_choices(
        ctypes.byref(Groups(*pointers, n_experts, n_tokens, n_used, rows, n_used + padding, rows, inverse))
    )

    order = np.argsort(ids.ravel(), kind="stable")
    assert np.array_equal(dst, order)
    if inverse:
        assert np.array_equal(src1[order], np.arange(ids.size))
    else:
        assert np.array_equal(src1, order // n_used * rows + order % n_used % rows)
    counts = np.bincount(ids.ravel(), minlength=n_experts)[:-1]
    assert np.array_equal(bounds[:-1], np.concatenate([[0], np.cumsum(counts)]))
    assert bounds[-1] == bounds[-2]
