"""What huge pages are worth on the CPU: operators whose caches or repacked weights are in them and in pages of 4 KiB.

python bench/huge_pages.py [--out FILE.jsonl] [--types q4_0,q4_K,q8_0] [--heads 40/8/128] [--depth 8192]
    [--tokens 1,4,128] [--threads N] [--rounds 5] [--seconds 0.3]

Each round times all operators in two processes, one with OALLAMA_HUGE_PAGES=0, in turns, from cold memory (profiling's
OpBench). types: of repacked weights, 4096 x 4096. One JSON line per operator: medians in ms with huge and with small
pages, and how many times faster huge ones are, with the interval.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from statistics import median
from typing import Any

from oallama.base.environment import HUGE_PAGES
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, numbers, record, words
from oallama.bench.stats import speedup
from oallama.engine import native

COLD_BYTES = 512 << 20
WIDTH = 4096


def main() -> None:
    parser = arguments(__doc__, "huge-pages")
    parser.add_argument("--types", type=words, default=["q4_0", "q4_K", "q8_0"])
    parser.add_argument("--heads", default="40/8/128")
    parser.add_argument("--depth", type=int, default=8192)
    parser.add_argument("--tokens", type=numbers, default=[1, 4, 128])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--times", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.times:
        print(json.dumps(times(options)))
        return
    record(compared(options), options.out, each={"machine": describe(), "threads": options.threads})


def compared(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rounds: dict[str, list[dict[str, float]]] = {"huge": [], "small": []}
    for round_ in range(options.rounds):
        note(f"round {round_ + 1}")
        for pages in sorted(rounds, reverse=bool(round_ % 2)):
            env = {**os.environ, HUGE_PAGES.name: "0" if pages == "small" else "1"}
            command = [sys.executable, *sys.argv, "--times"]
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            rounds[pages].append(json.loads(done.stdout))
    for operator in rounds["huge"][0]:
        huge, small = ([each[operator] for each in rounds[pages]] for pages in ("huge", "small"))
        gained = speedup(small, huge)
        assert gained
        ms = {"huge": round(1e3 * median(huge), 4), "small": round(1e3 * median(small), 4)}
        yield {"operator": operator, "ms": ms, "times": gained.to_json()}


def times(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of every operator in this process."""
    bench = native.core().OpBench("CPU", options.threads, True, COLD_BYTES)
    n_head, n_head_kv, width = map(int, options.heads.split("/"))
    heads = {"n_head": n_head, "n_head_kv": n_head_kv, "head_dim_k": width, "head_dim_v": width}
    cache = {"type_k": "f16", "type_v": "f16", "depth": options.depth, "flash": True}
    found = {}
    for kernel, n in product(("oallama", "ggml"), options.tokens):
        done = bench.attention(max_s=options.seconds, kernel=kernel, n_tokens=n, **heads, **cache)
        found[f"attention by {kernel}, {n} tokens behind {options.depth}"] = float(done["median_s"])
    matrix = {"k": WIDTH, "m": WIDTH, "n_expert": 0, "n_used": 0, "realisation": "repacked"}
    for kind, n in product(options.types, options.tokens):
        done = bench.mul_mat(max_s=options.seconds, type=kind, n_tokens=n, **matrix)
        found[f"repacked {kind}, {n} tokens"] = float(done["median_s"])
    return found


if __name__ == "__main__":
    main()
