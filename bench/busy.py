"""What other work on the machine does to a profile.

python bench/busy.py [--out FILE.jsonl] [--rounds 3] [--loads half,one,bursty,memory]

Each round profiles two layers of a 1B model (Q4_K_M) on the CPU: first on the quiet machine, then beside every load,
each time anew. One JSON line per profile: for 1, 32 and 512 tokens the seconds of all matrix products as a ratio to
those of the round's quiet profile, the worst single product of more than 10 us, the share of products that the profile
says were not taken alone, and the seconds that profiling took. "sure" and "worst_sure" leave these products out.

Loads: half (half of a core, in turns of 10 ms), one (a whole core), bursty (a core for 1 s, nothing for 1 s), memory (a
core that copies memory).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.data.entries import CLEAN, OperatorTime
from oallama.data.profile import Profile
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.modelmaker import make_model
from oallama.planning import OperatorGraph
from oallama.profiling.profiler import profile_machine

SHAPE = {"n_layer": 2, "n_embd": 2048, "n_ff": 5632, "n_head": 32, "n_head_kv": 8, "n_vocab": 32000}
TIERS = (1, 32, 512)
SHORT_S = 10e-6  # products that take less weigh nothing

_TURNS = """
import time
while True:
    end = time.perf_counter() + {busy}
    while time.perf_counter() < end:
        pass
    time.sleep({idle})
"""
_COPIES = """
import numpy
source = numpy.ones(1 << 25)
copy = source.copy()
while True:
    numpy.copyto(copy, source)
"""
LOADS = {
    "half": _TURNS.format(busy=0.01, idle=0.01),
    "one": _TURNS.format(busy=1.0, idle=0.0),
    "bursty": _TURNS.format(busy=1.0, idle=1.0),
    "memory": _COPIES,
}


def main() -> None:
    parser = arguments(__doc__, "busy")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=words, default=list(LOADS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "1b.gguf"
        make_model(model, arch="llama", shape="tiny", file_type="Q4_K_M", overrides=SHAPE)
        graph = autoplan.read_graph(model, Settings(n_ctx=512))
        record(measured(graph, options.rounds, options.loads, Path(folder)), options.out, each={"machine": describe()})


def measured(graph: OperatorGraph, rounds: int, loads: list[str], folder: Path) -> Iterator[dict[str, Any]]:
    for i in range(rounds):
        quiet, seconds = profiled(graph, folder / f"{i}-quiet")
        yield {"load": "none", "round": i, "seconds": seconds, **compared(quiet, quiet)}
        for load in loads:
            note(f"round {i + 1} of {rounds}: {load}")
            with running(load):
                profile, seconds = profiled(graph, folder / f"{i}-{load}")
            yield {"load": load, "round": i, "seconds": seconds, **compared(profile, quiet)}


@contextmanager
def running(load: str) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", LOADS[load]]) as process:
        try:
            time.sleep(0.5)
            yield
        finally:
            process.kill()


def profiled(graph: OperatorGraph, cache: Path) -> tuple[Profile, float]:
    start = time.perf_counter()
    profile = profile_machine(graph, ["CPU"], depths=(256,), cache=cache)
    return profile, round(time.perf_counter() - start, 1)


def compared(profile: Profile, quiet: Profile) -> dict[str, Any]:
    expected = {key(entry): entry for entry in quiet.operators}
    products = [entry for entry in profile.operators if entry.op == "MUL_MAT"]
    sure = [entry for entry in products if entry.clean >= CLEAN]
    return {
        "ratio": {n: ratio([e for e in products if e.n_tokens == n], expected) for n in TIERS},
        "sure": {n: ratio([e for e in sure if e.n_tokens == n], expected) for n in TIERS},
        "worst": worst(products, expected),
        "worst_sure": worst(sure, expected),
        "not_alone": round(1 - len(sure) / len(products), 3),
    }


def ratio(entries: list[OperatorTime], expected: dict[Any, OperatorTime]) -> float | None:
    total = sum(expected[key(entry)].median_s for entry in entries)
    return round(sum(entry.median_s for entry in entries) / total, 3) if total else None


def worst(entries: list[OperatorTime], expected: dict[Any, OperatorTime]) -> float | None:
    long = [entry for entry in entries if expected[key(entry)].median_s > SHORT_S]
    return max((round(entry.median_s / expected[key(entry)].median_s, 2) for entry in long), default=None)


def key(entry: OperatorTime) -> tuple[Any, ...]:
    return entry.op, entry.type, entry.ne, entry.n_tokens, entry.realisation


if __name__ == "__main__":
    main()
