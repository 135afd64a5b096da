"""How many copies keep operands cold? Operators of the CPU, timed on copies of several times the last-level cache.

python bench/cold_copies.py [--out FILE.jsonl] [--times 2,3,4,6,8,16] [--rounds 5] [--threads 0] [--seconds 0.1]

The profiler reads the copies of a weight, or of a cache, in turn, so that each is read from memory as in a model. Too
few of them are partly still in the last-level cache when their turn comes again. Each round times every operator at
every size, in turn, with the profiler's OpBench. One JSON line per operator: medians in µs by size, and how many times
longer the largest size takes than each, with an interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, numbers, record
from oallama.bench.stats import speedup
from oallama.engine import native, runtime
from oallama.profiling.fingerprint import cpu_set
from oallama.profiling.profiler import largest_cache

WEIGHT = {"type": "q8_0", "k": 1024, "m": 2816, "n_expert": 0, "n_used": 0}
HEADS = {"n_head": 16, "n_head_kv": 4, "head_dim_k": 64, "head_dim_v": 64, "type_k": "f16", "type_v": "f16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"q8_0 1024x2816, {n_tokens} tokens, {realisation}": (
        "mul_mat", {**WEIGHT, "n_tokens": n_tokens, "realisation": realisation}
    )
    for n_tokens in (1, 32)
    for realisation in ("plain", "tiled")
} | {
    f"attention of {kernel}, 1 token behind 1024": (
        "attention", {**HEADS, "n_tokens": 1, "depth": 1024, "flash": True, "kernel": kernel}
    )
    for kernel in ("ggml", "oallama")
}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, "cold-copies")
    parser.add_argument("--times", type=numbers, default="2,3,4,6,8,16", help="the last-level cache")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each measurement")
    options = parser.parse_args()
    runtime.quiet()
    threads = options.threads or len(cpu_set())
    found = measured(options.times, options.rounds, threads, options.seconds)
    record(found, options.out, each={"machine": describe()})


def measured(times: list[int], rounds: int, threads: int, seconds: float) -> Iterator[dict[str, Any]]:
    cache, taken = largest_cache(), defaultdict(list)
    for number in range(rounds):
        note(f"round {number + 1} of {rounds}")
        for size in times:
            bench = native.core().OpBench("CPU", threads, True, size * cache)
            for name, (kind, case) in CASES.items():
                taken[name, size].append(getattr(bench, kind)(max_s=seconds, **case)["median_s"])
    for name in CASES:
        largest = taken[name, max(times)]
        ratios = {size: speedup(largest, taken[name, size]) for size in times}
        yield {
            "operator": name, "threads": threads, "cache_bytes": cache,
            "median_us": {size: round(1e6 * median(taken[name, size]), 2) for size in times},
            "largest_takes": {size: [round(r.value, 3), round(r.low, 3), round(r.high, 3)]
                              for size, r in ratios.items() if r},
        }  # fmt: skip


if __name__ == "__main__":
    main()
