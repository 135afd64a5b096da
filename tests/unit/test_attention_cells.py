"""What an attention operator reads and computes at least, and what cachegrind's counts say of it."""

from __future__ import annotations

import pytest

from oallama.bench import cachegrind
from oallama.bench.attention_cells import Cell, bound_s, matrix_rate, share, table

CELL = Cell.of("40/8/128", "f16", 4, 1000)
COUNTS = """desc: LL cache: 2097152 B, 64 B, 16-way associative
cmd: attention_operator 1
events: Ir I1mr ILmr Dr D1mr DLmr Dw D1mw DLmw
fl=???
fn=run
12 7 1 1 2 0 0 1 0 0
summary: 4096000 10 10 900 80 64000 300 20 500
"""
PRODUCTS = [
    {"type": "q8_0", "rows": 32, "gflop_s": {"plain": 150.0, "ours": 600.0}},
    {"type": "q4_0", "rows": 32, "gflop_s": {"ours": 900.0}},
]


def line(n_tokens: int, gb_s: float, gflop_s: float) -> dict[str, object]:
    return {
        "heads": "40/8/128",
        "cache": "f16",
        "n_tokens": n_tokens,
        "depth": 1000,
        "ms": {"fused": 3.0, "unfused": 2.0, "ours": 1.0},
        "gb_s": {"ours": gb_s},
        "gflop_s": {"ours": gflop_s},
        "read_gb_s": 10.0,
        "ours_times_rival": {"value": 2.0},
    }


def test_sizes_of_a_cell() -> None:
    assert CELL.n_values == 1000 * 8 * 2 * 128
    assert CELL.kv_bytes == 2 * CELL.n_values
    assert CELL.flops == 2 * CELL.n_multiply_adds == 4 * 4 * 1000 * 40 * 128
    assert CELL.intensity == pytest.approx(20)  # 4 tokens x 5 rows x 2 flops, and 2 bytes a value
    assert Cell.of("40/8/128", "q8_0", 4, 1000).intensity == pytest.approx(20 * 2 / (34 / 32))


def test_bound_is_memory_or_products() -> None:
    assert bound_s(CELL, read_gb_s=4.096, gflop_s=1e6) == pytest.approx(1e-3)
    assert bound_s(CELL, read_gb_s=1e6, gflop_s=81.92) == pytest.approx(1e-3)


def test_rate_of_matrices() -> None:
    assert matrix_rate(32, PRODUCTS, 455.0) == 600.0
    assert matrix_rate(4, PRODUCTS, 455.0) == 455.0  # not recorded: the peak
    assert matrix_rate(32, PRODUCTS, 700.0) == 700.0


def test_few_rows_are_judged_by_memory_and_many_by_matrices() -> None:
    assert share(line(4, 5.0, 1.0), 600.0) == (0.5, 0.75)
    assert share(line(32, 5.0, 300.0), 600.0) == (0.5, 0.60)


def test_table_says_what_is_missed() -> None:
    found = list(table([line(1, 8.0, 1.0), line(32, 1.0, 300.0)], PRODUCTS, 455.0))
    assert found[2].startswith("| f16 | 1, 1000 | 3.0 | 2.0 | 0.41 | 1.0 | 2.0x |")
    assert found[2].endswith("| 80 % of the read rate, 10.0 GB/s | 75 %: met |")
    assert found[3].endswith("| 50 % of 600 GFLOP/s | 60 %: missed |")


def test_totals_of_cachegrind() -> None:
    found = cachegrind.totals(COUNTS)
    assert found["Ir"] == 4096000 and found["DLmr"] == 64000 and found["DLmw"] == 500 and len(found) == 9


@pytest.mark.parametrize("text", ["", "events: Ir Dr\n", "events: Ir Dr\nsummary: 1\n"])
def test_a_file_without_totals_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected totals"):
        cachegrind.totals(text)


def test_counts_of_an_operator_are_a_difference() -> None:
    ready = dict.fromkeys(cachegrind.totals(COUNTS), 0) | {"Ir": 2048000}
    found = cachegrind.of_operator(CELL, ready, cachegrind.totals(COUNTS))
    assert found["instructions"] == 2048000
    assert found["instructions_per_value"] == 1.0
    assert found["instructions_per_multiply_add"] == 0.05
    assert found["read_bytes"] == found["kv_bytes"] == 4096000 and found["times_kv"] == 1.0
    assert found["written_bytes"] == 32000
    assert found["events"]["Dr"] == 900


def test_table_of_counts() -> None:
    line = {"cache": "f16", "n_tokens": 1, "depth": 4096, "form": "fused", "kernel": "ggml", "times_kv": 5.0}
    line |= {"instructions_per_value": 1.5, "instructions_per_multiply_add": 0.3}
    found = list(cachegrind.table([line, line | {"form": "ours", "kernel": "avx2 dots"}]))
    assert found[2] == "| f16 | 1, 4096 | ggml fused | 1.50 | 0.300 | 5.00x of K and V |"
    assert "| ours, dots |" in found[3]
