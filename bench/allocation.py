"""The pipeline allocator: how long it takes, and what it proves.

python bench/allocation.py [--out FILE.jsonl] [--repeats 20]

Random clusters, hosts spread log-normally on a gigabit network, and the layers of a 70B model, all equal (--kinds: in
as many runs of different ones). Timed from the problem's description to the plan, one thread. One JSON line per case.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record, words
from oallama.cluster.allocation.allocation import allocate
from oallama.cluster.allocation.network import LinkQuality, Network
from oallama.cluster.allocation.problem import LINK_MODELS, Device, Layer, Problem

# layers, devices beside the client, memory of all over what the layers need
SPEED = ((32, 4, 1.5), (80, 8, 1.5), (80, 32, 1.5), (80, 32, 2.5), (80, 32, 5.0))
REFERENCE = (16, 4, 1.5)


def make_problem(rng: np.random.Generator, n_layers: int, n_devices: int, tightness: float, kinds: int = 1) -> Problem:
    """A client that computes no layers and `n_devices` hosts; a layer of about 0.5 GB and 0.9 GFLOP (70B, 4 bits)."""

    def factor(spread: float = 0.6) -> float:
        return float(rng.lognormal(0, spread))

    different = [Layer(8.7e8 * factor(0.1), int(5e8 * factor(0.1)), 8192 * 4, kv_bytes=10**7) for _ in range(kinds)]
    layers = tuple(different[i * kinds // n_layers] for i in range(n_layers))
    need = sum(layer.memory_bytes for layer in layers)
    shares = np.array([factor() for _ in range(n_devices)])
    names = ["client", *(f"d{i}" for i in range(n_devices))]
    memory = [0, *(int(share * need * tightness / 0.9) for share in shares / shares.sum())]
    devices = tuple(
        Device(name, size, 6e10 * factor(), 1e12 * factor()) for name, size in zip(names, memory, strict=True)
    )
    links = {
        (a, b): LinkQuality(
            latency_s=2e-4 * factor(),
            bandwidth=1.17e8 * factor(),
            jitter_s=1e-4 * factor(1.0),
            loss=float(rng.choice([0, 0, 0, 1e-3, 1e-2])),
        )
        for a in names
        for b in names
        if a != b
    }
    return Problem(devices, Network(links), layers, Layer(1.6e9, 0, 8192 * 4))


def main() -> None:
    parser = arguments(__doc__, "allocation")
    parser.add_argument("--repeats", type=int, default=20, help="clusters per case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=int, default=1)
    parser.add_argument("--links", type=words, default=LINK_MODELS)
    parser.add_argument("--time-limit", type=float, default=20.0)
    options = parser.parse_args()
    record(cases(options), options.out, each={"machine": describe()}, quiet=True)


def cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for links in options.links:
        yield from (speed(case, links, "grouped", options) for case in (*SPEED, REFERENCE))
        yield speed(REFERENCE, links, "milp", options)


def speed(case: tuple[int, int, float], links: Any, solver: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of allocate() over random clusters."""
    n_layers, n_devices, tightness = case
    seconds, gaps, used = [], [], []
    for repeat in range(options.repeats + 1):  # the first warms up
        rng = np.random.default_rng([options.seed, repeat])
        problem = replace(make_problem(rng, *case, options.kinds), links=links)
        start = time.perf_counter()
        found = allocate(problem, solver, time_limit_s=options.time_limit)
        seconds.append(time.perf_counter() - start)
        gaps.append(found.gap)
        used.append(len(found.ranges))
    seconds, gaps, used = seconds[1:], gaps[1:], used[1:]
    line = {
        "what": "speed", "solver": solver, "links": links, "layers": n_layers, "devices": n_devices,
        "tightness": tightness, "kinds": options.kinds, "seed": options.seed, "seconds": seconds,
        "median_s": statistics.median(seconds), "max_s": max(seconds), "max_gap": max(gaps),
        "proven": sum(gap < 1e-6 for gap in gaps), "clusters": len(gaps), "devices_used": used,
    }  # fmt: skip
    print(
        f"{solver} {links} {n_layers} x {n_devices}, {tightness}: median {line['median_s'] * 1e3:.1f} ms, max "
        f"{line['max_s'] * 1e3:.0f} ms, proven {line['proven']}/{len(gaps)}, gap at most {line['max_gap']:.1e}",
        flush=True,
    )
    return line


if __name__ == "__main__":
    main()
