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

from oallama.bench.attention_cells import FORMS, Cell, table
from oallama.bench.machine import REPOSITORY
from oallama.bench.script import RESULTS, Lines, read
from oallama.views.style import COLOURS, MARKERS, load_figure_class, save_figure

PICTURE = REPOSITORY / "docs" / "pictures" / "attention-roofline.png"
DEEP = 16384
NAMES = {"fused": "ggml fused", "unfused": "ggml unfused", "ours": "ours"}
DASHES = {"fused": ":", "unfused": "--", "ours": "-"}
SPAN = (3.0, 4500.0)  # flops per byte


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=Path, default=RESULTS / "2026-11-25-attention-xeon.jsonl")
    parser.add_argument("--peak", type=Path, default=RESULTS / "2026-11-24-peak.jsonl")
    parser.add_argument("--products", type=Path, default=RESULTS / "2026-11-25-products.jsonl")
    parser.add_argument("--table", action="store_true", help="print the table in place of drawing")
    parser.add_argument("-o", "--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    cells, peaks = read(options.cells), read(options.peak)
    if options.table:
        print("\n".join(table(cells, read(options.products), peaks[0]["gflop_s"])))
    else:
        draw([line for line in cells if line["cache"] == "f16"], peaks, options.out)


def draw(lines: Lines, peaks: Lines, out: Path) -> None:
    figure = load_figure_class()(figsize=(8, 5.2), layout="constrained")
    plot = figure.subplots()
    plot.set_xscale("log")
    plot.set_yscale("log")
    plot.set_xlim(*SPAN)
    draw_roofs(plot, median(line["read_gb_s"] for line in lines), peaks)
    draw_forms(plot, lines)
    name_cells(plot, lines)
    plot.set_xlabel("flops per byte of K and V read once")
    plot.set_ylabel("GFLOP/s")
    plot.spines[["top", "right"]].set_visible(False)
    save_figure(figure, out)


def draw_roofs(plot: Any, read_gb_s: float, peaks: Lines) -> None:
    low, high = SPAN
    for peak in peaks:
        rate, what = peak["gflop_s"], peak["what"].removeprefix("peak of ").replace("peak", "f32")
        ridge = rate / read_gb_s
        plot.plot([low, ridge, high], [low * read_gb_s, rate, rate], color="black", linewidth=1.5, zorder=1)
        words = f"{what} peak, {rate:,.0f} GFLOP/s"
        plot.annotate(words, (low, rate), (4, 4), textcoords="offset points", fontsize=9)
    begin, slope = 1.05 * low, degrees(atan2(read_gb_s, 1))
    words = f"memory, {read_gb_s:.1f} GB/s"
    plot.text(begin, 1.1 * begin * read_gb_s, words, fontsize=9, rotation=slope, rotation_mode="anchor",
              transform_rotates_text=True)  # fmt: skip


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
                linewidth=1,
                markersize=7,
                color=colour,
                markerfacecolor=colour if deep else "white",
                zorder=3 if deep else 2,
                label=f"{NAMES[form]}, {found[0]['depth']} cached tokens",
            )
    plot.legend(frameon=False, fontsize=9, ncols=3)


def name_cells(plot: Any, lines: Lines) -> None:
    for n_tokens in sorted({line["n_tokens"] for line in lines}):
        intensity = next(Cell.of_line(line).intensity for line in lines if line["n_tokens"] == n_tokens)
        plot.axvline(intensity, color="#cccccc", linewidth=0.8, zorder=0)
        words = f"{n_tokens} token{'s' if n_tokens > 1 else ''}"
        plot.annotate(words, (intensity, 1), (2, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
                      rotation=90, va="top", fontsize=8, color="#555555")  # fmt: skip


if __name__ == "__main__":
    main()
