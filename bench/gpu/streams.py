"""All weights streamed for every micro-batch: bytes a second against the pinned peak, time against the better bound.

python bench/gpu/streams.py --model FILE.gguf [--prompts 128,512,2048,16384] [--out FILE.jsonl]

Engines, each loaded once: resident (what computing takes), streamed, streamed with the host keeping the order of copies
and computing (host order), and upload (llama.cpp's own, weight by weight). Lines: the link's peak; one per engine and
round; one per way of streaming and prompt with copied bytes per second, their share of the peak, and the streamed time
over max(copies at the peak, resident time). The first prompt after a load stands apart (first_ttft_s).
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from common import Log, arguments
from loads import Running, on_device, planning_device

from oallama.base.environment import STREAM_QUEUE
from oallama.bench import Engine, LoadParams
from oallama.bench.maps import backend_map
from oallama.bench.script import numbers
from oallama.engine import native, runtime
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan

LINK_BYTES = 64 << 20
MODES = {"resident": "resident", "streamed": "stream 1", "host order": "stream 1", "upload": "upload"}
STREAMED = ("streamed", "host order")


def table(graph: Any, device: str, mode: str) -> str:
    """Every matrix in this mode; embedding on the host, KV caches and small weights on the device."""
    targets = {op.weight for op in graph.targets(1)}
    moved = f"{device} resident" if mode == "resident" else f"CPU {mode}"
    return backend_map(graph, device, lambda t: moved if t.name in targets else f"{device} resident", ["slots 3"])


def start(options: Any, graph: Any, mode: str, prompts: tuple[int, ...], stack: ExitStack) -> Running:
    params = LoadParams(
        n_gpu_layers=-1, flash_attn="on", load_mode="none", n_threads=options.threads, n_outputs_max=1,
        n_batch=options.ubatch, n_ubatch=options.ubatch,
    )  # fmt: skip
    placed = on_device(options.device, params, stack)
    assert placed.devices is not None
    env = {STREAM_QUEUE.name: "0"} if mode == "host order" else {}
    engine = Engine(mode, runtime.lib_dir(), placed, backend_map=table(graph, placed.devices[0], MODES[mode]), env=env)
    return stack.enter_context(Running(engine, options.model, prompts, 2, at=min(prompts)))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=numbers, default=(128, 512, 2048, 16384))
    parser.add_argument("--ubatch", type=int, default=512)
    options = parser.parse_args()
    device = planning_device(options.device)
    with Log(options.out) as log, ExitStack() as stack:
        links = native.core().link_bench(device, [LINK_BYTES])
        rates = {f"{r['direction']} {r['memory']}": r["bytes"] / r["median_s"] for r in links}
        log.add("link", bytes_s=rates)
        peak = rates.get("h2d pinned", rates["h2d pageable"])
        graph = autoplan.read_graph(options.model, Settings(n_ctx=1024))
        copied = sum(graph.tensor[op.weight].nbytes for op in graph.targets(1) if op.weight)
        found: dict[str, dict[int, list[float]]] = {}
        running: dict[str, Running] = {}

        def timed(mode: str, prompts: tuple[int, ...]) -> dict[str, Any]:
            if mode not in running:
                running[mode] = start(options, graph, mode, prompts, stack)
            values = running[mode].sample()
            for n, seconds in values["ttft_s"].items():
                found.setdefault(mode, {}).setdefault(n, []).append(seconds)
            return values

        # llama.cpp uploads from pageable memory, and from 32 tokens on; its longest prompt would take the stage's time.
        short = tuple(n for n in options.prompts if n <= 2048)
        jobs = {mode: partial(timed, mode, short if mode == "upload" else options.prompts) for mode in MODES}
        log.rounds("streams", jobs, options.repeats, kept=True, model=Path(options.model).stem, ubatch=options.ubatch)
        for mode, n in product(STREAMED, options.prompts):
            if not all(found.get(name, {}).get(n) for name in ("resident", mode)):
                continue
            resident, streamed = (statistics.median(found[name][n]) for name in ("resident", mode))
            nbytes = copied * -(-n // options.ubatch)
            log.add(
                "stream rate", name=mode, prompt=n, copied_bytes=nbytes, bytes_s=nbytes / streamed, peak_bytes_s=peak,
                of_peak=nbytes / streamed / peak, resident_s=resident, streamed_s=streamed,
                over_best=streamed / max(nbytes / peak, resident),
            )  # fmt: skip


if __name__ == "__main__":
    main()
