"""Where a step of several sequences goes on one core: why batching pays less than it could.

python bench/sequences_step.py [--sequences 1,2,4,6,8] [--types F16,Q8_0,Q4_0] [--context 256] [--threads 1]
    [--rounds 5] [--steps 12] [--out FILE.jsonl]

The model is llama, small, with six layers, as in bench/capacity.py. A step is a token of each sequence. One JSON line
per type and number of sequences: seconds of a step without the operator timer; with it, seconds of products with
weights, of attention and of all else; GFLOP/s of the products and GB/s of their weights. Numbers of sequences take
turns in a round, the largest first. peak_gflop_s: of as many cores with independent multiply-adds (bench/peak.py);
read_gb_s: what as many threads read.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from attention import read_rate
from gguf import GGUFReader
from peak import measured as measured_peak

from oallama.bench.machine import describe
from oallama.bench.script import arguments, numbers, record, words
from oallama.engine import native
from oallama.modelmaker import make_model
from oallama.weave.sequences import Sequences


def main() -> None:
    parser = arguments(__doc__, "sequences-step")
    parser.add_argument("--sequences", type=numbers, default=[1, 2, 4, 6, 8])
    parser.add_argument("--types", type=words, default=["F16", "Q8_0", "Q4_0"])
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of a round, each without and with the timer")
    options = parser.parse_args()
    record(lines(options), options.out, each={"machine": describe()})


def lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    peak = measured_peak(3, bf16_tiles=False)
    machine = {
        "peak_gflop_s": round(peak["gflop_s"] / peak["cpus"] * options.threads, 1),
        "read_gb_s": round(read_rate(options.threads), 2),
    }
    for file_type in options.types:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            make_model(path, shape="small", file_type=file_type, overrides={"n_layer": 6})
            weights = [t for t in GGUFReader(path).tensors if len(t.shape) == 2 and t.name != "token_embd.weight"]
            n_weights, nbytes = sum(t.n_elements for t in weights), sum(t.n_bytes for t in weights)
            for n, rounds in measured(path, options).items():
                found = {key: median(each[key] for each in rounds) for key in rounds[0]}
                yield {
                    "type": file_type, "sequences": n, "context": options.context, "threads": options.threads,
                    **{key: round(value, 6) for key, value in found.items()},
                    "products_gflop_s": round(2 * n * n_weights / found["products_s"] / 1e9, 1),
                    "weights_gb_s": round(nbytes / found["products_s"] / 1e9, 2), **machine,
                }  # fmt: skip


def measured(path: Path, options: argparse.Namespace) -> dict[int, list[dict[str, float]]]:
    """Seconds of the rounds' steps by number of sequences."""
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    sizes = {"n_seq": max(options.sequences), "n_ctx": 8192, "n_threads": options.threads}
    with Sequences(path, **sizes) as model:
        for _ in range(options.rounds):
            for number in range(max(options.sequences)):
                model.step({number: [300 + (number * 31 + i * 7) % 1000 for i in range(options.context)]})
            for n in sorted(options.sequences, reverse=True):  # the cache has these alone
                for number in range(n, max(options.sequences)):
                    model.remove(number)
                found[n].append(one_round(model, n, options))
            for number in range(max(options.sequences)):
                model.remove(number)
    return found


def one_round(model: Sequences, n: int, options: argparse.Namespace) -> dict[str, float]:
    core = native.core()
    untimed = [step(model, n) for _ in range(options.steps)]
    timed: list[dict[str, float]] = []
    core.op_timer_take()
    core.op_timer_enable(True)
    for _ in range(options.steps):
        step(model, n)
        timed.append(parts(core.op_timer_take()))
    core.op_timer_enable(False)
    for number in range(n):  # contexts stay as long as they were
        model.remove(number, options.context)
    return {"step_s": median(untimed), **{key: median(each[key] for each in timed) for key in timed[0]}}


def step(model: Sequences, n: int) -> float:
    begin = time.perf_counter()
    model.step({number: [500] for number in range(n)})
    return time.perf_counter() - begin


def parts(records: list[Any]) -> dict[str, float]:
    """Seconds of one graph's operators."""
    found = {"products_s": 0.0, "attention_s": 0.0, "others_s": 0.0}
    for _, _, op, operand, seconds, _ in records:
        kind = "products_s" if op == "MUL_MAT" and operand.endswith(".weight") else "others_s"
        found["attention_s" if op == "FLASH_ATTN_EXT" else kind] += seconds
    return found


if __name__ == "__main__":
    main()
