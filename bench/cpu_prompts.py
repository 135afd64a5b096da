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
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from gguf import GGUFReader

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.bench.stats import speedup
from oallama.engine import runtime
from oallama.modelmaker import make_model

FORMS = ("llama.cpp", "AMX", "plain", "tiled")


def main() -> None:
    parser = arguments(__doc__, "cpu-prompts")
    parser.add_argument("--types", type=words, default=["Q4_0", "Q4_K_M"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = (measured(Path(folder), kind, options) for kind in options.types)
        record(lines, options.out, each={"machine": describe()})


def measured(folder: Path, kind: str, options: Any) -> dict[str, Any]:
    note(f"{kind}: making the model")
    model = folder / f"{kind}.gguf"
    make_model(model, shape="llama3-8b", file_type=kind, overrides={"n_layer": options.layers, "n_vocab": 32000})
    environments = {"llama.cpp": {"OALLAMA_AMX": "0"}, "AMX": {"OALLAMA_AMX": "1"}}
    for realisation in ("plain", "tiled"):
        table = folder / f"{kind}-{realisation}.map"
        table.write_text(backend_map(model, options.layers, realisation))
        environments[realisation] = {"OALLAMA_AMX": "0", "OALLAMA_BACKEND_MAP": str(table)}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for round_ in range(options.rounds):
        note(f"{kind}: round {round_ + 1}")
        for form in FORMS:
            seconds[form].append(prompt_s(model, options, environments[form]))
    model.unlink()
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


def backend_map(model: Path, n_layer: int, realisation: str) -> str:
    """All on the CPU, all matrices in one realisation."""
    lines = ["# oallama backend map v1", *(f"layer {il} CPU" for il in range(n_layer + 1))]
    for tensor in GGUFReader(model).tensors:
        matrix = len(tensor.shape) == 2 and tensor.name != "token_embd.weight"
        lines.append(f"tensor {tensor.name} CPU host {realisation if matrix else ''}".rstrip())
    return "\n".join(lines) + "\n"


def prompt_s(model: Path, options: Any, environment: dict[str, str]) -> float:
    """Seconds of the prompt: the median of three after one that warms up."""
    command = [str(runtime.program("llama-bench")), "-m", str(model), "-t", str(options.threads)]
    command += ["-p", str(options.prompt), "-n", "0", "-r", "3", "-o", "jsonl"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return median(json.loads(done.stdout.splitlines()[-1])["samples_ns"]) / 1e9


if __name__ == "__main__":
    main()
