"""Prompts on the CPU, whole models: our kernels for products (docs/products.md) against llama.cpp's, by llama-bench.

python bench/cpu_prompts.py [--out FILE.jsonl] [--types Q4_0,Q4_K_M] [--layers 2] [--prompt 512] [--threads N]
    [--rounds 5]

Models have LLaMA-8B's layers, some of them, and 32000 words. Rounds are interleaved. One JSON line per type: medians of
the rounds in tokens/s of llama.cpp with and without AMX (its own choice of repacked weights), of all weights plain, and
of all tiled; how many times faster tiled is than the faster of the forms without AMX, with its interval.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.bench.some_layers import cpu_map, made
from oallama.bench.stats import speedup
from oallama.engine import runtime

FORMS = ("llama.cpp", "AMX", "plain", "tiled")


def main() -> None:
    parser = arguments(__doc__, "cpu-prompts")
    parser.add_argument("--types", type=words, default=["Q4_0", "Q4_K_M"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    models = made((f"llama3-8b:{kind}" for kind in options.types), options.layers)
    lines = (measured(model, name.split(":")[1], options) for name, model in models)
    record(lines, options.out, each={"machine": describe()})


def measured(model: Path, kind: str, options: Any) -> dict[str, Any]:
    environments = {"llama.cpp": {"OALLAMA_AMX": "0"}, "AMX": {"OALLAMA_AMX": "1"}}
    for realisation in ("plain", "tiled"):
        table = model.with_suffix(f".{realisation}.map")
        table.write_text(cpu_map(model, options.layers, lambda tensor, word=realisation: word))
        environments[realisation] = {"OALLAMA_AMX": "0", "OALLAMA_BACKEND_MAP": str(table)}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for round_ in range(options.rounds):
        note(f"{kind}: round {round_ + 1}")
        for form in FORMS:
            seconds[form].append(prompt_s(model, options, environments[form]))
    found = {form: median(each) for form, each in seconds.items()}
    rival = min(("llama.cpp", "plain"), key=found.__getitem__)
    gained = speedup(seconds[rival], seconds["tiled"])
    assert gained
    return {
        "type": kind,
        "layers": options.layers,
        "prompt": options.prompt,
        "threads": options.threads,
        "tokens_s": {form: round(options.prompt / s, 1) for form, s in found.items()},
        "rival": rival,
        "times_rival": gained.to_json(),
    }


def prompt_s(model: Path, options: Any, environment: dict[str, str]) -> float:
    """Seconds of the prompt: the median of three after one that warms up."""
    command = [str(runtime.program("llama-bench")), "-m", str(model), "-t", str(options.threads)]
    command += ["-p", str(options.prompt), "-n", "0", "-r", "3", "-o", "jsonl"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return median(json.loads(done.stdout.splitlines()[-1])["samples_ns"]) / 1e9


if __name__ == "__main__":
    main()
