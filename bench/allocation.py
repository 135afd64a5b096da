"""The pipeline allocator: how long it takes, what it proves, and how its plans fare when their numbers are wrong.

python bench/allocation.py [--out FILE.jsonl] [--repeats 20] [--draws 200] [--only speed|robustness]

Random clusters, hosts spread log-normally on a gigabit network, and the layers of a 70B model, all equal (--kinds: in
as many runs of different ones). "speed" takes a problem from its description to the plan, one thread. "robustness"
multiplies every speed and link by a factor of its own in [1/1.5, 1.5] and compares plans with the best plan of each
draw. One JSON line per case.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oallama.bench.machine import describe, save_lines
from oallama.cluster.allocation.allocation import allocate
from oallama.cluster.allocation.network import LinkQuality, Network
from oallama.cluster.allocation.problem import LINK_MODELS, Device, Layer, Problem
from oallama.cluster.allocation.robust import allocate_robust, perturb, robustness

# layers, devices beside the client, memory of all over what the layers need
SPEED = ((32, 4, 1.5), (80, 8, 1.5), (80, 32, 1.5), (80, 32, 2.5), (80, 32, 5.0))
REFERENCE = (16, 4, 1.5)
ROBUST = ((32, 4, 2.0), (80, 8, 1.5), (80, 8, 3.0), (80, 16, 3.0))
FACTOR = 1.5


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=20, help="clusters per case")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=int, default=1)
    parser.add_argument("--links", default=",".join(LINK_MODELS))
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--only", choices=("speed", "robustness"))
    options = parser.parse_args()
    lines = []
    for links in options.links.split(","):
        if options.only != "robustness":
            lines += [speed(case, links, "grouped", options) for case in SPEED]
            lines.append(speed(REFERENCE, links, "grouped", options))
            lines.append(speed(REFERENCE, links, "milp", options))
    if options.only != "speed":
        lines += [line for case in ROBUST for line in robust(case, options)]
    save_lines(({**line, "machine": describe(sys.argv)} for line in lines), options.out, append=True)


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


def robust(case: tuple[int, int, float], options: argparse.Namespace) -> list[dict[str, Any]]:
    """How the nominal plan, one made without QoS terms, one by memory and robust ones fare in the same draws."""
    n_layers, n_devices, tightness = case
    lines = []
    for repeat in range(5):
        problem = make_problem(np.random.default_rng([options.seed, repeat]), *case, options.kinds)
        blind = replace(problem, settings=replace(problem.settings, wq1=0.0, wq2=0.0, wq3=0.0))
        plans = {
            "nominal": allocate(problem).layers,
            "no-qos": allocate(blind).layers,
            "by-memory": by_memory(problem),
            "robust-worst": allocate_robust(problem, criterion="worst", seed=1)[0].layers,
            "robust-mean": allocate_robust(problem, criterion="mean", seed=1)[0].layers,
        }
        # Other draws than the robust plans were chosen with.
        rng = np.random.default_rng([options.seed, repeat, 2])
        found = robustness(list(plans.values()), [perturb(problem, rng, FACTOR) for _ in range(options.draws)])
        ratios = {
            name: {"mean": one.mean, "p95": one.p95, "worst": one.worst} for name, one in zip(plans, found, strict=True)
        }
        lines.append(
            {
                "what": "robustness",
                "layers": n_layers,
                "devices": n_devices,
                "tightness": tightness,
                "kinds": options.kinds,
                "factor": FACTOR,
                "draws": options.draws,
                "seed": [options.seed, repeat],
                "ratios": ratios,
            }
        )
        shown = ", ".join(f"{name} {r['mean']:.3f}/{r['p95']:.3f}/{r['worst']:.3f}" for name, r in ratios.items())
        print(f"{n_layers} x {n_devices}, {tightness} (mean/p95/worst): {shown}", flush=True)
    return lines


def by_memory(problem: Problem) -> tuple[str, ...]:
    """llama.cpp's own split: layers in proportion to memory, within the room of each device."""
    size = max(layer.memory_bytes for layer in problem.layers)
    rooms = [int(problem.settings.beta * device.memory_bytes) // size for device in problem.devices]
    n, shares = len(problem.layers), np.cumsum(rooms) / sum(rooms)
    ends = np.rint(shares * n).astype(int)
    return tuple(problem.devices[int(np.searchsorted(ends, at, side="right"))].name for at in range(n))


if __name__ == "__main__":
    main()
