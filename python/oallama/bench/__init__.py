"""TTFT and TPOT of engines side by side: interleaved runs, reports, and unpatched llama.cpp as the baseline."""

from ..views.bench_plot import write_plot
from .baselines import all_on_device, baselines, cpu_only, ffn_on_cpu, find_baseline_lib, fitted, layer_split
from .engines import Engine, LoadParams
from .planned import planned
from .report import csv_text, jsonl, markdown, print_table, write_reports
from .results import Cell, ExpectedTimes, Result, compare, first_prompts
from .sweep import Sweep, run_bench

__all__ = [
    "Cell",
    "Engine",
    "ExpectedTimes",
    "LoadParams",
    "Result",
    "Sweep",
    "all_on_device",
    "baselines",
    "compare",
    "cpu_only",
    "csv_text",
    "ffn_on_cpu",
    "find_baseline_lib",
    "first_prompts",
    "fitted",
    "jsonl",
    "layer_split",
    "markdown",
    "planned",
    "print_table",
    "run_bench",
    "write_plot",
    "write_reports",
]
