"""A benchmark's results as a markdown or terminal table, CSV, and JSON lines (schema: bench/README.md)."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.jsonfile import write_text_atomic
from ..base.printing import model_name
from ..data.predicted import error_percent
from ..views.bench_table import print_rows
from .machine import portable
from .results import Comparison, Result, Sample, compare, first_prompts
from .stats import Ratio, Summary

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = 1
MIB = 1024 * 1024
METRICS = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
COLUMNS = (
    "model", "size", "params", "engine", "placement", "test", "TTFT ms p50", "TPOT ms p50", "t/s",
    "device MiB predicted", "device MiB measured", "vs baseline TTFT / TPOT",
)  # fmt: skip
TEXT_COLUMNS = 5  # the first ones are aligned left, numbers right


def rows(results: Sequence[Result]) -> list[list[str]]:
    """The cells of the table in the order of COLUMNS, one row for each result with samples; times are p50 ± std."""
    return [_row(result, compare(result, results)) for result in results if result.samples]


def _row(result: Result, versus: Comparison | None) -> list[str]:
    assert result.loaded is not None
    model = result.loaded.model
    ttft, tpot = result.summary("ttft_s"), result.summary("tpot_s")
    predicted = None if result.predicted_bytes is None else sum(result.predicted_bytes.values())
    return [
        model_name(model["description"], model["n_params"]),
        f"{model['size_bytes'] / 1024**3:.2f} GiB",
        _count(model["n_params"]),
        result.engine,
        result.placement or "-",
        str(result.cell),
        _milliseconds(ttft),
        _milliseconds(tpot),
        f"{1 / tpot.p50:.2f}" if tpot and tpot.p50 else "-",
        _mib(predicted),
        _mib(result.device_bytes()),
        _versus(result, versus),
    ]


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.2f} M"


def _milliseconds(summary: Summary | None) -> str:
    return f"{summary.p50 * 1e3:.2f} ± {summary.std * 1e3:.2f}" if summary else "-"


def _mib(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / MIB:.2f}"


def _versus(result: Result, versus: Comparison | None) -> str:
    if result.baseline:
        return "baseline"
    return f"{_times(versus.ttft)} / {_times(versus.tpot)}" if versus else "-"


def _times(ratio: Ratio | None) -> str:
    return f"{ratio.value:.2f}x" if ratio else "-"


def notes(results: Sequence[Result]) -> list[str]:
    """What a reader of the table must know besides it: what was observed, and the definitions."""
    definitions = (
        "p50 ± standard deviation. TTFT without tokenisation; TPOT = (E2E - TTFT) / (n - 1); t/s = 1 / TPOT. "
        "Above 1x is faster than the baseline."
    )
    return [*observations(results), definitions]


def observations(results: Sequence[Result]) -> list[str]:
    """Failures, other tokens than the baseline's, and first prompts after a load."""
    lines: dict[str, None] = {}  # a set that keeps its order
    for result in results:
        if result.error:
            lines[f"{result.engine} was left out: {result.error}"] = None
        if not result.deterministic():
            lines[f"{result.engine} gave different tokens in different runs of one cell."] = None
        versus = compare(result, results)
        if versus and not versus.same_tokens:
            lines[f"{result.engine} gave other tokens than the baseline; compare their perplexity."] = None
    return [*lines, *first_prompts(results)]


def markdown(results: Sequence[Result]) -> str:
    """A table that looks like llama-bench's, and the notes below it."""
    table = [[cell.replace("|", "\\|") for cell in row] for row in (list(COLUMNS), *rows(results))]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    aligned = [
        "| " + " | ".join(_pad(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True))) + " |"
        for row in table
    ]
    rule = [("-" * (w + 2)) if i < TEXT_COLUMNS else "-" * (w + 1) + ":" for i, w in enumerate(widths)]
    lines = [aligned[0], "|" + "|".join(rule) + "|", *aligned[1:], "", *(f"- {note}" for note in notes(results))]
    return "\n".join(lines) + "\n"


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < TEXT_COLUMNS else cell.rjust(width)


def print_table(results: Sequence[Result], console: Console | None = None) -> None:
    """The same as a terminal table; the model, the same in every row, goes into the title."""
    print_rows(COLUMNS, rows(results), notes(results), TEXT_COLUMNS, console)


def record(result: Result, results: Sequence[Result], token_times: bool = False) -> dict[str, Any]:
    """The JSON object of one result; with token_times also when each token of each run came, and which it was."""
    versus, cell, loaded = compare(result, results), result.cell, result.loaded
    summaries = {name: result.summary(name) for name in METRICS}
    ttft, tpot = summaries["ttft_s"], summaries["tpot_s"]
    measured = loaded.device_bytes() if loaded else None
    return {
        "schema": SCHEMA,
        **result.environment,
        "engine": result.engine,
        "placement": result.placement,
        "baseline": result.baseline,
        "plan_hash": result.plan_hash,
        "lib_dir": portable(result.lib_dir),
        "params": result.params,
        "env": result.env,
        "model": loaded.model if loaded else None,
        "test": str(cell),
        "n_prompt": cell.prompt,
        "n_depth": cell.depth,
        "n_gen": cell.gen,
        "error": result.error,
        "load_s": loaded.load_s if loaded else None,
        "first_prompts": [{"n_prompt": n, "ttft_s": s} for n, s in loaded.first_prompts] if loaded else None,
        **{name: s.to_json() if s else None for name, s in summaries.items()},
        "prompt_tokens_per_s": cell.prompt / ttft.p50 if ttft else None,
        "tokens_per_s": 1 / tpot.p50 if tpot and tpot.p50 else None,
        "samples": [_sample(s, token_times) for s in result.samples],
        "warmups": [_sample(s, token_times) for s in result.warmups],
        "deterministic": result.deterministic(),
        "vs_baseline": _comparison(versus),
        "memory": {
            "predicted_device_bytes": result.predicted_bytes,
            "measured_device_bytes": measured,
            "error_percent": _memory_error(result.predicted_bytes, measured),
            "buffers": loaded.memory if loaded else None,
            "peak_rss_bytes": loaded.peak_rss_bytes if loaded else None,
            "gpu_process_bytes": loaded.gpu_process_bytes if loaded else None,
        },
        "devices": loaded.devices if loaded else None,
        "prediction": {
            "ttft_s": result.prediction.ttft_s,
            "ttft_error_percent": error_percent(result.prediction.ttft_s, ttft.p50 if ttft else None),
            "tpot_s": result.prediction.tpot_s,
            "tpot_error_percent": error_percent(result.prediction.tpot_s, tpot.p50 if tpot else None),
        },
    }


def _sample(sample: Sample, token_times: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "round": sample.round,
        "ttft_s": sample.ttft_s,
        "tpot_s": sample.tpot_s,
        "e2e_s": sample.e2e_s,
        "tokens_sha256": sample.tokens_sha256,
    }
    return data | {"token_times_s": sample.token_times_s, "tokens": sample.tokens} if token_times else data


def _comparison(versus: Comparison | None) -> dict[str, Any] | None:
    if versus is None:
        return None
    ratios = {"ttft": versus.ttft, "tpot": versus.tpot, "e2e": versus.e2e}
    return {**{k: r.to_json() if r else None for k, r in ratios.items()}, "same_tokens": versus.same_tokens}


def _memory_error(predicted: dict[str, int] | None, measured: dict[str, int] | None) -> float | None:
    if predicted is None or measured is None:
        return None
    return error_percent(sum(predicted.values()), sum(measured.values()))


def jsonl(results: Sequence[Result], token_times: bool = False) -> str:
    """One JSON object a line, one line a result."""
    return "".join(json.dumps(record(r, results, token_times)) + "\n" for r in results)


def flat(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    """The columns of the CSV; an empty field where nothing is known."""
    full = record(result, results)
    memory, prediction, versus = full["memory"], full["prediction"], full["vs_baseline"] or {}
    out = {name: full[name] for name in ("engine", "placement", "baseline", "plan_hash", "commit", "dirty", "time")}
    out |= {"model": (full["model"] or {}).get("description"), "model_file": full["model_file"]["name"]}
    out |= {name: full[name] for name in ("n_prompt", "n_depth", "n_gen")}
    out |= {"repeats": len(result.samples), "error": full["error"]}
    for name in METRICS:
        for statistic in ("p50", "p90", "p99", "mean", "std", "min"):
            out[f"{name}_{statistic}"] = (full[name] or {}).get(statistic)
    out |= {name: full[name] for name in ("prompt_tokens_per_s", "tokens_per_s")}
    out["load_s"] = full["load_s"][0] if full["load_s"] else None
    for name in ("predicted_device_bytes", "measured_device_bytes"):
        out[name] = None if memory[name] is None else sum(memory[name].values())
    out["peak_rss_bytes"] = memory["peak_rss_bytes"]
    out |= {f"predicted_{name}": prediction[name] for name in ("ttft_s", "tpot_s")}
    for name in ("ttft", "tpot", "e2e"):
        for end in ("value", "low", "high"):
            out[f"speedup_{name}_{end}"] = (versus.get(name) or {}).get(end)
    return out | {"same_tokens": versus.get("same_tokens")}


def csv_text(results: Sequence[Result]) -> str:
    """A header and one line a result."""
    table = [flat(r, results) for r in results]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]) if table else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def write_reports(results: Sequence[Result], stem: str | os.PathLike[str], token_times: bool = False) -> list[Path]:
    """Write <stem>.md, .csv and .jsonl, each whole or not at all; returns their paths."""
    texts = {"md": markdown(results), "csv": csv_text(results), "jsonl": jsonl(results, token_times)}
    paths = []
    for suffix, text in texts.items():
        path = Path(f"{os.fspath(stem)}.{suffix}")
        write_text_atomic(path, text, "the benchmark report")
        paths.append(path)
    return paths
