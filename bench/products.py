"""Products of quantised weights with many rows of activations on the CPU: our kernels against ggml's.

python bench/products.py [--out FILE.jsonl] [--types q4_0,q4_K,...] [--rows 16,32,128,512] [--shapes 4096x4096]
    [--mixture 128x8] [--sets avx2,avx512] [--threads N] [--rounds 5] [--seconds 0.3]

shapes: k x m of the weight. mixture: experts, each with such a weight, and how many a row chooses. sets: instruction
sets of ours; empty: the best of this CPU. Rounds are interleaved, form by form, over copies of the weight that caches
do not hold (profiling's OpBench). One JSON line per cell: by form the medians of the rounds in ms and GFLOP/s; how
many times faster ours is than the best of ggml's forms without AMX, with its interval, and than AMX where the CPU has
it. ggml's instruction set is that of the machine that compiled it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from statistics import median
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, numbers, record, words
from oallama.bench.stats import speedup
from oallama.engine import native

COLD_BYTES = 256 << 20
TYPES = ["q4_0", "q8_0", "mxfp4", "q4_K", "q6_K"]


def main() -> None:
    parser = arguments(__doc__, "products")
    parser.add_argument("--types", type=words, default=TYPES)
    parser.add_argument("--rows", type=numbers, default=[16, 32, 128, 512])
    parser.add_argument("--shapes", type=words, default=["4096x4096"])
    parser.add_argument("--mixture", type=lambda text: tuple(map(int, text.split("x"))), default=(0, 0))
    parser.add_argument("--sets", type=words, default=[""])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3)
    options = parser.parse_args()
    cells = product(options.shapes, options.types, options.rows)
    how = (options.mixture, options.sets, options.threads, options.rounds, options.seconds)
    lines = (cell(*each, *how) for each in cells)
    record(lines, options.out, each={"machine": describe()})


@dataclass(frozen=True)
class Form:
    realisation: str
    instruction_set: str = ""  # of ours
    amx: bool = False  # in a process of its own: ggml asks once


def forms_of(weight: dict[str, Any], sets: Sequence[str]) -> dict[str, Form]:
    """By name: "plain", "repacked", "AMX", "ours", "ours avx2"."""
    core = native.core()
    forms = {"plain": Form("plain")}
    if core.repacks("CPU", *weight.values()):
        forms["repacked"] = Form("repacked")
    if with_amx().submit(lies_in, weight).result() == "AMX":
        forms["AMX"] = Form("repacked", amx=True)
    return forms | {f"ours {name}".rstrip(): Form("tiled", name) for name in sets}


def cell(
    shape: str,
    kind: str,
    n: int,
    mixture: tuple[int, int],
    sets: Sequence[str],
    n_threads: int,
    rounds: int,
    seconds: float,
) -> Any:
    k, m = map(int, shape.split("x"))
    n_expert, n_used = mixture
    note(f"{kind} {shape}, {n} rows")
    weight = {"type": kind, "k": k, "m": m, "n_expert": n_expert}
    forms = forms_of(weight, sets)
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            work = (form, {**weight, "n_tokens": n, "n_used": n_used}, n_threads, seconds)
            times[name].append(with_amx().submit(timed, *work).result() if form.amx else timed(*work))
    found = {name: median(each) for name, each in times.items()}
    ours = [name for name in forms if name.startswith("ours")]
    rival = min((name for name in forms if name not in (*ours, "AMX")), key=found.__getitem__)
    return {
        "shape": shape,
        "type": kind,
        "rows": n,
        **({"n_expert": n_expert, "n_used": n_used} if n_expert else {}),
        "threads": n_threads,
        "ms": {name: round(1e3 * s, 4) for name, s in found.items()},
        "gflop_s": {name: round(2e-9 * k * m * n * max(1, n_used) / s, 1) for name, s in found.items()},
        "rival": rival,
        "times_rival": {name: gained(times, name, rival) for name in ours},
        "times_amx": {name: gained(times, name, "AMX") for name in ours if "AMX" in forms},
    }


def gained(times: dict[str, list[float]], ours: str, rival: str) -> dict[str, Any]:
    found = speedup(times[rival], times[ours])
    assert found
    return found.to_json()


def timed(form: Form, shape: dict[str, Any], n_threads: int, seconds: float) -> float:
    core = native.core()
    core.products_use(form.instruction_set)
    bench = core.OpBench("CPU", n_threads, True, COLD_BYTES)
    return float(bench.mul_mat(max_s=seconds, realisation=form.realisation, **shape)["median_s"])


def lies_in(weight: dict[str, Any]) -> str:
    bench = native.core().OpBench("CPU", 1, True, 0)
    bench.mul_mat(max_s=0.01, n_tokens=1, n_used=min(1, weight["n_expert"]), **weight)
    return str(bench.buffer_type)


@cache
def with_amx() -> ProcessPoolExecutor:
    """A process that takes AMX where the CPU has it; this one does not."""
    return ProcessPoolExecutor(1, get_context("spawn"), amx, ("1",))


def amx(setting: str) -> None:
    os.environ["OALLAMA_AMX"] = setting


if __name__ == "__main__":
    amx("0")
    main()
