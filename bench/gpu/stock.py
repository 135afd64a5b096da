"""Our llama-bench without a map: with and without CUDA graphs, dependent launches (PDL) and fusion, interleaved.

python bench/gpu/stock.py --model FILE.gguf [--model FILE.gguf] [--out FILE.jsonl] [--repeats 3]

One JSON line per model, variant and round: tokens per second of a prompt of 512 tokens and of 64 generated ones.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from common import Log, arguments

from oallama.engine import runtime
from oallama.errors import OallamaError

# As read by the pinned ggml-cuda: any value of DISABLE_GRAPHS, 0 of PDL, 1 of DISABLE_FUSION.
VARIANTS: dict[str, dict[str, str]] = {
    "as it is": {},
    "no graphs": {"GGML_CUDA_DISABLE_GRAPHS": "1"},
    "no PDL": {"GGML_CUDA_PDL": "0"},
    "no fusion": {"GGML_CUDA_DISABLE_FUSION": "1"},
}


def llama_bench(model: Path, variables: dict[str, str], n_prompt: int, n_generate: int, threads: int) -> dict[str, Any]:
    # fmt: off
    command = [
        str(runtime.program("llama-bench")), "-m", str(model), "-ngl", "99", "-fa", "on", "-t", str(threads), "-r", "3",
        "-p", str(n_prompt), "-n", str(n_generate), "-o", "json",
    ]
    # fmt: on
    environment = {k: v for k, v in os.environ.items() if k not in ("OALLAMA_BACKEND_MAP",)}
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise OallamaError(f"llama-bench ended with {done.returncode}: {done.stderr[-500:]}")
    rows = json.loads(done.stdout)
    return {
        "model": model.stem, "variables": variables,
        **{("prompt" if row["n_prompt"] else "generate"): {"tokens_per_s": row["avg_ts"], "samples": row["samples_ts"]}
           for row in rows},
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-generate", type=int, default=64)
    options = parser.parse_args()
    with Log(options.out) as log:
        jobs = {
            f"{model.stem}, {name}": partial(
                llama_bench, model, variables, options.n_prompt, options.n_generate, options.threads
            )
            for model in options.model
            for name, variables in VARIANTS.items()
        }
        log.rounds("llama-bench", jobs, options.repeats)


if __name__ == "__main__":
    main()
