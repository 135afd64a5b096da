"""One layer's attention on the CPU: our kernels against ggml's fused and unfused forms.

python bench/attention.py [--out FILE.jsonl] [--depths 256,4096,16384] [--tokens 1,2,4,32,128,512] [--types f16,q8_0]
    [--heads 40/8/128,32/32/128] [--threads N] [--rounds 5] [--seconds 0.3]
python bench/attention.py --efficiencies NAME --from FILE.jsonl --peak-gflops N

heads: of queries / of K and V / width. Rounds are interleaved, form by form, from cold caches of K and V
(profiling's OpBench). One JSON line per cell: by form the medians of the rounds in ms, GB/s of K and V read once,
GFLOP/s; how many times faster ours is than the better of the two others, with its interval; the machine's read rate,
measured between the rounds. With --efficiencies nothing is measured: prints the file of shares that datasheets take
(python/oallama/data/attention). The peak is that of all threads of these lines, in f32 (bench/peak.py measures it).
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from oallama.bench.attention_cells import FORMS, Cell
from oallama.bench.machine import REPOSITORY, describe
from oallama.bench.script import arguments, note, numbers, read, record, words
from oallama.bench.stats import speedup
from oallama.engine import native
from oallama.errors import OallamaError
from oallama.profiling.cpu_attention import SCHEMA

COLD_BYTES = 512 << 20


def main() -> None:
    parser = arguments(__doc__, "attention")
    parser.add_argument("--depths", type=numbers, default=[256, 1024, 4096, 16384])
    parser.add_argument("--tokens", type=numbers, default=[1, 2, 4, 32, 128, 512])
    parser.add_argument("--types", type=words, default=["f16", "q8_0"])
    parser.add_argument("--heads", type=words, default=["40/8/128", "32/8/128", "16/4/128", "32/32/128"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--efficiencies", metavar="NAME")
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--peak-gflops", type=float)
    options = parser.parse_args()
    if options.efficiencies:
        if not options.source or not options.peak_gflops:
            parser.error("--efficiencies needs --from and --peak-gflops")
        print(efficiencies(options.efficiencies, options.source, options.peak_gflops))
        return
    cells = product(options.heads, options.types, options.tokens, options.depths)
    lines = (measured(*each, options.threads, options.rounds, options.seconds) for each in cells if each[2] <= each[3])
    record(lines, options.out, each={"machine": describe()})


def measured(heads: str, cache: str, n_tokens: int, depth: int, n_threads: int, rounds: int, seconds: float) -> Any:
    cell = Cell.of(heads, cache, n_tokens, depth)
    note(f"{heads} {cache}, {n_tokens} tokens behind {depth}")
    shape = {"type_k": cache, "type_v": cache, "head_dim_k": cell.width, "head_dim_v": cell.width}
    shape |= {"n_head": cell.n_head, "n_head_kv": cell.n_head_kv, "n_tokens": n_tokens, "depth": depth}
    times: dict[str, list[float]] = {form: [] for form in FORMS}
    rates = []
    for _ in range(rounds):
        rates.append(read_rate(n_threads))
        for form in FORMS:
            if form == "unfused" and cache not in ("f16", "f32", "bf16"):
                continue  # V is written transposed
            times[form].append(timed(form, shape, n_threads, seconds))
    found = {form: median(each) for form, each in times.items() if each}
    rival = min((form for form in found if form != "ours"), key=lambda form: found[form])
    gained = speedup(times[rival], times["ours"])
    assert gained
    return {
        "heads": heads,
        "cache": cache,
        "n_tokens": n_tokens,
        "depth": depth,
        "threads": n_threads,
        "ms": {form: round(1e3 * s, 4) for form, s in found.items()},
        "gb_s": {form: round(cell.kv_bytes / s / 1e9, 2) for form, s in found.items()},
        "gflop_s": {form: round(cell.flops / s / 1e9, 1) for form, s in found.items()},
        "rival": rival,
        "ours_times_rival": gained.to_json(),
        "read_gb_s": round(median(rates), 2),
    }


def timed(form: str, shape: dict[str, Any], n_threads: int, seconds: float) -> float:
    bench = native.core().OpBench("CPU", n_threads, True, COLD_BYTES)
    kernel = "oallama" if form == "ours" else "ggml"
    return float(bench.attention(max_s=seconds, flash=form != "unfused", kernel=kernel, **shape)["median_s"])


def efficiencies(name: str, source: Path, peak_gflops: float) -> str:
    """The cells of a recorded file as shares of its machine's peaks. Raises OallamaError for lines of two machines."""
    lines = read(source)
    machines = {(line["machine"]["hardware"]["cpu"], line["threads"]) for line in lines}
    if len(machines) != 1:
        raise OallamaError(f"{source} has lines of {len(machines)} machines or thread counts: expected one")
    ((cpu, n_threads),) = machines
    cells = []
    for line, form in ((each, form) for each in lines for form in each["ms"]):
        cell = Cell.of_line(line)
        seconds = line["ms"][form] / 1e3
        cells.append(
            {
                "kernel": "oallama" if form == "ours" else "ggml",
                "flash": form != "unfused",
                "type": cell.cache,
                "n_head": cell.n_head,
                "n_head_kv": cell.n_head_kv,
                "head_dim": cell.width,
                "n_tokens": cell.n_tokens,
                "depth": cell.depth,
                "bandwidth_efficiency": float(f"{cell.kv_bytes / seconds / 1e9 / line['read_gb_s']:.3g}"),
                "compute_efficiency": float(f"{cell.flops / seconds / 1e9 / peak_gflops:.3g}"),
            }
        )
    machine = f"{n_threads} threads of {cpu}, {peak_gflops:g} GFLOP/s"
    source = source.resolve().relative_to(REPOSITORY)
    head = {"schema": SCHEMA, "name": name, "source": str(source), "measured_on": machine}
    text = json.dumps(head, indent=1).removesuffix("\n}")
    return text + ',\n "cells": [\n' + ",\n".join(f"  {json.dumps(cell)}" for cell in cells) + "\n ]\n}"


_memory: list[np.ndarray[Any, Any]] = []


def read_rate(n_threads: int) -> float:
    """GB/s of reading memory with all threads."""
    if len(_memory) < n_threads:
        _memory[:] = [np.ones(COLD_BYTES // 8 // n_threads, np.uint64) for _ in range(n_threads)]
    with ThreadPoolExecutor(n_threads) as pool:
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, _memory[:n_threads]))
            best = min(best, time.perf_counter() - begin)
    return COLD_BYTES / best / 1e9


if __name__ == "__main__":
    main()
