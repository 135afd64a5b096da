"""What a second start takes before a model is loaded: the plan that is kept is found, read and turned into a table.

python bench/planner_start.py [--out FILE.jsonl] [--repeats 5]

Published shapes in sparse files, times from a datasheet under this machine's fingerprint, a loopback RPC server as the
accelerator, a cache of its own. Every start is a process of its own. One JSON line per model: seconds that a start with
a kept plan takes beyond one without a plan (`added_s`), and of imports and of the engine, which both take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record

MODELS = (("llama3-8b", "Q4_K_M", "4GiB"), ("qwq-32b", "Q4_K_M", "16GiB"), ("qwen3-235b-a22b", "Q4_K_M", "22GiB"))
N_CTX, SHEET = 16384, "rtx4090-xeon4314"


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        return child(*sys.argv[2:])
    parser = arguments(__doc__, "planner-start")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    record(measured(options), options.out, each={"machine": describe()})


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from oallama.modelmaker import make_sparse_model

    for shape, file_type, budget in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            path = make_sparse_model(Path(folder) / f"{shape}.gguf", shape=shape, file_type=file_type)
            environment = {**os.environ, "XDG_CACHE_HOME": folder}
            command = [sys.executable, __file__, "child", str(path), budget]
            starts = [
                json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
                for _ in range(1 + options.repeats)
            ]
        first, *later = starts
        assert first["made"] and not any(start["made"] for start in later)
        yield {
            "shape": shape, "file_type": file_type, "budget": budget, "n_ctx": N_CTX, "tensors": first["tensors"],
            "first_s": first["added_s"], "seconds": [start["added_s"] for start in later],
            **{key: statistics.median(s[key] for s in later) for key in ("added_s", "imports_s", "engine_s")},
        }  # fmt: skip


def child(path: str, budget: str) -> None:
    """One start: as `Llama(vram=...)` and then `oallama run` do it, up to the load."""
    start = time.perf_counter()
    import oallama.llama  # noqa: F401  # what a start without a plan imports, too

    imported = time.perf_counter()
    from oallama.engine import device_list

    device_list.devices()
    ready = time.perf_counter()
    from oallama.engine.load_settings import Settings
    from oallama.engine.rpc import LocalRpcServer
    from oallama.loading import given_plan
    from oallama.loading.autoplan import Choices
    from oallama.loading.start import plan_model

    server = LocalRpcServer()
    (device,) = server.devices
    settings = Settings(n_ctx=N_CTX, n_threads=len(os.sched_getaffinity(0)))
    profile = Path(path).with_suffix(".json")
    made = not profile.exists()
    if made:
        _profile(path, device, settings).save(profile)
    choices = Choices(device=device, profile=profile)
    begin = time.perf_counter()
    plan = plan_model(path, budget, settings, choices)
    given_plan.check_plan(plan, path, replace(settings, **asdict(plan.context)))
    plan.to_backend_map()
    added = time.perf_counter() - begin
    times = {"imports_s": imported - start, "engine_s": ready - imported, "added_s": added}
    print(json.dumps({"made": made, "tensors": len(plan.tensors), **times}))


def _profile(path: str, device: str, settings: Any) -> Any:
    """A datasheet's times as if they were this machine's."""
    from oallama.loading import autoplan
    from oallama.profiling.datasheet import Datasheet, make_profile
    from oallama.profiling.fingerprint import fingerprint

    made = make_profile(autoplan.read_graph(path, settings), Datasheet.load(SHEET))
    (sheets,) = (d.name for d in made.devices if d.name != "CPU")
    renamed: dict[str, Any] = {
        "devices": tuple(replace(d, name=device) if d.name == sheets else d for d in made.devices)
    }
    for kind in ("operators", "attention", "links", "switches", "overlaps", "concurrency", "chains"):
        entries = getattr(made, kind)
        renamed[kind] = tuple(replace(e, device=device) if e.device == sheets else e for e in entries)
    return replace(made, fingerprint=fingerprint([device, "CPU"], settings.n_threads), **renamed)


if __name__ == "__main__":
    main()
