"""Requests on the CPU, whole models: weights repacked, tiled, and in memory as both (docs/realisations.md).

python bench/cpu_forms.py [--out FILE.jsonl] [--types Q4_0,Q4_K_M] [--layers 2] [--prompt 512] [--generate 32]
    [--threads N] [--rounds 5] [--no-amx]

By llama-bench. Models have LLaMA-8B's layers, some of them, and 32000 words. Every form is loaded anew in each round,
and rounds are interleaved. "llama.cpp" has no backend map: its own choice. One JSON line per type: medians of TTFT,
TPOT and the request's seconds, and how many times faster "repacked+tiled" is than each of the others, with intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.bench.some_layers import cpu_map, made
from oallama.bench.stats import speedup
from oallama.engine import native, runtime

BOTH = "repacked+tiled"
FORMS = ("llama.cpp", "repacked", "tiled", BOTH)
METRICS = ("ttft_s", "tpot_s", "request_s")


def main() -> None:
    parser = arguments(__doc__, "cpu-forms")
    parser.add_argument("--types", type=words, default=["Q4_0", "Q4_K_M"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--amx", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    os.environ["OALLAMA_AMX"] = str(int(options.amx))  # before the engine is loaded, and for its programs
    models = made((f"llama3-8b:{kind}" for kind in options.types), options.layers)
    lines = (measured(model, name.split(":")[1], options) for name, model in models)
    record(lines, options.out, each={"machine": describe()})


def measured(model: Path, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    tables = {"llama.cpp": ""}
    for form in FORMS[1:]:
        table = model.with_suffix(f".{form}.map")
        table.write_text(cpu_map(model, options.layers, partial(word, form)))
        tables[form] = str(table)
    samples: dict[str, dict[str, list[float]]] = {metric: {form: [] for form in FORMS} for metric in METRICS}
    for round_ in range(options.rounds):
        note(f"{kind}: round {round_ + 1}")
        for form in FORMS:
            for metric, seconds in zip(METRICS, request(model, options, tables[form]), strict=True):
                samples[metric][form].append(seconds)
    result: dict[str, Any] = {"type": kind, "amx": options.amx, "layers": options.layers, "threads": options.threads}
    result |= {"prompt": options.prompt, "generate": options.generate, "rounds": options.rounds}
    for metric, of_forms in samples.items():
        result[metric] = {form: round(median(each), 5) for form, each in of_forms.items()}
    for metric, of_forms in samples.items():
        gained = {form: speedup(of_forms[form], of_forms[BOTH]) for form in FORMS[:-1]}
        result[f"times_{metric}"] = {form: found.to_json() for form, found in gained.items() if found}
    return result


def word(form: str, tensor: Any) -> str:
    """Plain where the CPU does not repack the matrix."""
    (k, m), type = map(int, tensor.shape), tensor.tensor_type.name.lower().replace("_k", "_K")
    return "plain" if form == "repacked" and not native.core().repacks("CPU", type, k, m, 0) else form


def request(model: Path, options: argparse.Namespace, table: str) -> tuple[float, float, float]:
    """TTFT, TPOT and the seconds of both together: medians of three after one that warms up."""
    command = [str(runtime.program("llama-bench")), "-m", str(model), "-t", str(options.threads)]
    command += ["-p", str(options.prompt), "-n", str(options.generate), "-r", "3", "-o", "jsonl"]
    environment = {**os.environ, "OALLAMA_BACKEND_MAP": table}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    prompt, answer = (median(json.loads(line)["samples_ns"]) / 1e9 for line in done.stdout.splitlines())
    ttft, tpot = prompt, answer / options.generate
    return ttft, tpot, ttft + (options.generate - 1) * tpot


if __name__ == "__main__":
    main()
