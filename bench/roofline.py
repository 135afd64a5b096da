"""Attention on the CPU against its roofs: a picture and a table, from recorded lines.

python bench/roofline.py            # draws docs/pictures/attention-roofline.png
python bench/roofline.py --table    # prints the table of docs/attention.md

Arithmetic intensity is flops per byte of K and V read once. Roofs are the rate of reading memory that was measured
between the cells, and what bench/peak.py reached. Needs matplotlib (pip install oallama[plot]).
"""

from __future__ import annotations

import argparse
from math import atan2, degrees
from pathlib import Path
from statistics import median
from typing import Any

from oallama.bench.attention_cells import FORMS, Cell, matrix_rate, table
from oallama.bench.machine import REPOSITORY
from oallama.bench.script import RESULTS, Lines, read
from oallama.views.style import COLOURS, MARKERS, load_figure_class, save_figure

PICTURE = REPOSITORY / "docs" / "pictures" / "attention-roofline.png"
DEEP = 16384
NAMES = {"fused": "ggml fused", "unfused": "ggml unfused", "ours": "ours"}
DASHES = {"fused": ":", "unfused": "--", "ours": "-"}
SPAN = (3.5, 12000.0)  # flops per byte; lines are named at their right ends
GREY = "#666666"
PEAKS = [RESULTS / "2026-11-24-peak.jsonl", RESULTS / "2026-11-25-peak.jsonl"]  # f32, AMX


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=Path, default=RESULTS / "2026-11-25-attention-xeon-huge.jsonl")
    parser.add_argument("--peaks", type=Path, nargs="+", default=PEAKS)
    parser.add_argument("--products", type=Path, default=RESULTS / "2026-11-25-products.jsonl")
    parser.add_argument("--table", action="store_true", help="print the table in place of drawing")
    parser.add_argument("-o", "--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    cells, peaks = read(options.cells), [line for file in options.peaks for line in read(file)]
    if options.table:
        print("\n".join(table(cells, read(options.products), peaks[0]["gflop_s"])))
    else:
        draw([line for line in cells if line["cache"] == "f16"], peaks, read(options.products), options.out)


def draw(lines: Lines, peaks: Lines, products: Lines, out: Path) -> None:
    figure = load_figure_class()(figsize=(8, 5.2), layout="constrained")
    plot = figure.subplots()
    plot.set_xscale("log")
    plot.set_yscale("log")
    plot.set_xlim(*SPAN)
    spots = {line["n_tokens"]: Cell.of_line(line).intensity for line in lines}
    draw_roofs(plot, median(line["read_gb_s"] for line in lines), peaks)
    draw_matrices(plot, spots, products)
    draw_forms(plot, lines)
    for spot in spots.values():
        plot.axvline(spot, color="#dddddd", linewidth=0.8, zorder=0)
    named = [f"{spot:.0f}\n{n} token{'s' * (n > 1)}" for n, spot in spots.items()]
    plot.set_xticks(list(spots.values()), named, fontsize=9)
    plot.tick_params(which="minor", bottom=False)
    plot.yaxis.set_major_formatter("{x:,.0f}")
    plot.set_xlabel("flops per byte of K and V read once, and query tokens")
    plot.set_ylabel("GFLOP/s")
    plot.set_title("filled: 16384 cached tokens; hollow: 4096", loc="left", fontsize=9, color=GREY)
    plot.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out)


def draw_roofs(plot: Any, read_gb_s: float, peaks: Lines) -> None:
    low, high = SPAN
    for peak in peaks:
        rate, what = peak["gflop_s"], peak["what"].removeprefix("peak of ").replace("peak", "f32")
        ridge = rate / read_gb_s
        plot.plot([low, ridge, high], [low * read_gb_s, rate, rate], color="black", linewidth=1.5, zorder=1)
        words = f"peak of {what}: {rate:,.0f} GFLOP/s"
        plot.annotate(words, (ridge, rate), (6, 4), textcoords="offset points", fontsize=9)
    begin, slope = 1.05 * low, degrees(atan2(read_gb_s, 1))
    words = f"memory: {read_gb_s:.1f} GB/s"
    plot.text(begin, 1.25 * begin * read_gb_s, words, fontsize=9, rotation=slope, rotation_mode="anchor",
              transform_rotates_text=True)  # fmt: skip


def draw_matrices(plot: Any, spots: dict[int, float], products: Lines) -> None:
    """What bounds many tokens: products of matrices with as many rows."""
    rates = {n: rate for n in spots if (rate := matrix_rate(n, products, 0.0))}
    plot.plot([spots[n] for n in rates], list(rates.values()), "x", linestyle="-.", linewidth=1, color=GREY, zorder=1)
    name_end(plot, spots[max(rates)], rates[max(rates)], "Q8_0 matrices", GREY)


def draw_forms(plot: Any, lines: Lines) -> None:
    """A marker per form; filled and joined where the cache is deep, hollow where it is not."""
    for number, form in enumerate(FORMS):
        colour = COLOURS[number]
        for deep in (False, True):
            found = [line for line in lines if (line["depth"] == DEEP) == deep]
            spots = [(Cell.of_line(line).intensity, line["gflop_s"][form]) for line in found]
            plot.plot(
                *zip(*spots, strict=True),
                MARKERS[number],
                linestyle=DASHES[form] if deep else "none",
                linewidth=1.2,
                markersize=7,
                color=colour,
                markerfacecolor=colour if deep else "white",
                zorder=2 if deep else 3,
            )
        name_end(plot, spots[-1][0], max(line["gflop_s"][form] for line in lines[-2:]), NAMES[form], colour)


def name_end(plot: Any, x: float, y: float, words: str, colour: str) -> None:
    plot.annotate(words, (x, y), (9, 0), textcoords="offset points", fontsize=10, color=colour, va="center")


if __name__ == "__main__":
    main()
