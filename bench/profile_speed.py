"""What a first profile takes, and how far two profiles of the same machine differ.

python bench/profile_speed.py [--out FILE.jsonl] [--rounds 5]

A model of 270 million parameters (18 layers, a vocabulary of 262144), a loopback RPC server as the accelerator. Each
round profiles into an empty cache. One JSON line: seconds of every round, of each device (links and what concerns both
count for the accelerator), and of the same model with another context afterwards; the spread of an entry over the
rounds as a share of its median, as quantiles over all entries.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.data.profile import Profile
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_model

SHAPE = {"n_layer": 18, "n_embd": 640, "n_ff": 2048, "n_head": 4, "n_head_kv": 1, "n_vocab": 262144}
N_CTX, LATER_N_CTX = 4096, 8192


def main() -> None:
    parser = arguments(__doc__, "profile-speed")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    share_processor()
    runtime.quiet()
    record(measured(options), options.out, each={"machine": describe()})


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, LocalRpcServer() as server:
        path = make_model(Path(folder) / "m.gguf", arch="qwen2", shape="small", file_type="Q8_0", overrides=SHAPE)
        rounds = [_round(path, server.devices[0], Path(folder) / f"cache{i}") for i in range(options.rounds)]
    times: dict[Any, list[float]] = defaultdict(list)
    for one in rounds:
        for key, seconds in _entries(one["profile"]):
            times[key].append(seconds)
    spreads = [(max(t) - min(t)) / statistics.median(t) for t in times.values()]
    yield {
        "model": SHAPE,
        "n_ctx": [N_CTX, LATER_N_CTX],
        "tasks": rounds[0]["tasks"],
        "seconds": [one["seconds"] for one in rounds],
        "devices_s": {d: [one["devices_s"][d] for one in rounds] for d in rounds[0]["devices_s"]},
        "later_s": [one["later_s"] for one in rounds],
        "entries": len(spreads),
        "range_over_median": {f"p{q}": float(np.percentile(spreads, q)) for q in (50, 90, 100)},
    }


def _round(path: Path, device: str, cache: Path) -> dict[str, Any]:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    devices_s: dict[str, float] = defaultdict(float)
    tasks = 0
    last, of = time.perf_counter(), ""

    def report(_done: float, _total: float, what: str) -> None:
        nonlocal last, of, tasks
        now = time.perf_counter()
        if of:
            devices_s[of] += now - last
            tasks += 1
        last, of = now, what.partition(":")[0] if ":" in what else ""

    begin = time.perf_counter()
    profile = _profile(path, device, N_CTX, report)
    seconds, found = time.perf_counter() - begin, dict(devices_s)
    begin = time.perf_counter()
    _profile(path, device, LATER_N_CTX, lambda *_: None)
    later_s = time.perf_counter() - begin
    return {"profile": profile, "seconds": seconds, "devices_s": found, "tasks": tasks, "later_s": later_s}


def _profile(path: Path, device: str, n_ctx: int, report: Any) -> Profile:
    settings = Settings(n_ctx=n_ctx)
    graph = autoplan.read_graph(path, settings)
    settings = autoplan.resolve(settings, graph.n_ctx_train)
    return autoplan.profile_and_devices(graph, settings, Choices(device=device), report)[0]


def _entries(profile: Profile) -> Iterator[tuple[Any, float]]:
    for field in ("operators", "attention", "chains", "shapes", "links"):
        for entry in getattr(profile, field):
            yield repr(replace(entry, median_s=0.0, best_s=0.0, **_zero(entry))), entry.median_s


def _zero(entry: Any) -> dict[str, Any]:
    return {name: 0 for name in ("spread_s", "repeats", "clean") if hasattr(entry, name)}


if __name__ == "__main__":
    main()
