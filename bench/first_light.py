"""Times the steps before a run: making, parsing, profiling and planning models of published shapes.

python bench/first_light.py [--out FILE.jsonl] [--make-model] [--device NAME]

One JSON line per measurement. Planning uses QwQ-32B's real shapes in a sparse file (no weight is stored). Without
--device a loopback RPC server is the accelerator. --make-model also writes LLaMA3-8B in F16 (16 GB, removed again).
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.loading import autoplan
from oallama.modelmaker import make_model, make_sparse_model
from oallama.planning import OperatorGraph
from oallama.profiling.profiler import profile_machine

TIERS = (1, 512)


def main() -> None:
    parser = arguments(__doc__, "first-light")
    parser.add_argument("--make-model", action="store_true")
    parser.add_argument("--device")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.make_model:
            record(make(folder), options.out, each=describe())
        device = options.device or LocalRpcServer().devices[0]
        record(profile(folder, device), options.out, each=describe())
        record(plan(folder, device), options.out, each=describe())


def make(folder: Path) -> Iterator[dict[str, Any]]:
    start = time.monotonic()
    path = make_model(folder / "8b.gguf", shape="llama3-8b", file_type="F16")
    seconds, nbytes = time.monotonic() - start, path.stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    yield {"what": "make_model llama3-8b F16", "seconds": seconds, "bytes": nbytes, "peak_rss_bytes": peak}
    path.unlink()


def profile(folder: Path, device: str) -> Iterator[dict[str, Any]]:
    for file_type in ("F16", "Q4_K_M"):
        path = make_sparse_model(folder / "8b.gguf", shape="llama3-8b", file_type=file_type)
        graph = OperatorGraph.from_engine(skeleton.read_graphs(path, Settings(n_ctx=4096), TIERS))
        for name in ("CPU", device):
            cache = folder / f"cache-{name}-{file_type}"
            start = time.monotonic()
            made = profile_machine(graph, [name], cache=cache)
            seconds = time.monotonic() - start
            per_device = 2 if name != "CPU" else 1  # the CPU is always profiled, too
            yield {
                "what": f"profile llama3-8b {file_type}, tiers {TIERS}",
                "devices": [d.name for d in made.devices],
                "seconds": seconds,
                "seconds_per_device": seconds / per_device,
                "entries": len(made.operators) + len(made.attention) + len(made.links),
            }


def plan(folder: Path, device: str) -> Iterator[dict[str, Any]]:
    path = make_sparse_model(folder / "32b.gguf", shape="qwq-32b", file_type="Q4_K_M")
    settings = Settings(n_ctx=4096)
    choices = autoplan.Choices(device=device, planner="oato")
    start = time.monotonic()
    graph = autoplan.read_graph(path, settings)
    yield {"what": "parse qwq-32b Q4_K_M", "seconds": time.monotonic() - start, "operators": len(graph.operators(1))}
    autoplan.plan_graph(path, graph, "50%", settings, choices)  # profiles what is missing
    for budget in ("25%", "50%", "75%", "14GiB"):
        start = time.monotonic()
        made = autoplan.plan_graph(path, graph, budget, settings, choices)
        yield {
            "what": f"plan qwq-32b Q4_K_M under {budget}",
            "seconds": time.monotonic() - start,
            "targets": len(graph.targets(1)),
            "predicted": {name: m.total for name, m in made.predicted.devices.items()},
        }


if __name__ == "__main__":
    main()
