"""Measures streamed weights: memory of minimal mode, time against llama.cpp's uploads, and that decode is not slowed.

python bench/streaming.py memory|uploads|decode [--model FILE.gguf] [--device NAME] [--out FILE.jsonl]

memory: device bytes of minimal mode and of everything resident, over prompt lengths, really loaded and run (--model)
and by dry run (published shapes in sparse files). uploads: TTFT with the feed-forward weights on the host, streamed
from 32 tokens on, against llama.cpp's own uploads of the same weights (op_offload). decode: TPOT with these weights
streamed from 32 tokens on against the same plan without streams. Runs are interleaved, the medians of rounds compared.
Without --device a loopback RPC server of one thread is used. Writes the machine, then one JSON line per measurement.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.bench.engines import Engine, LoadParams, Worker
from oallama.bench.machine import describe
from oallama.bench.maps import backend_map
from oallama.bench.results import Result
from oallama.bench.script import arguments, numbers, progress, record
from oallama.bench.sweep import Sweep, run_bench
from oallama.data.operators import TOKEN_EMBEDDING, OperatorGraph, TensorInfo, layer_of
from oallama.engine import runtime, skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.loading import autoplan
from oallama.modelmaker import make_sparse_model

PROMPTS = (128, 512, 2048, 4096)
SHAPES = ("llama3-8b", "qwq-32b")
FROM = 32
ON_HOST = "ffn_"


# ---- tables --------------------------------------------------------------------------------------------------------


def table(graph: OperatorGraph, device: str, mode: str, *, all_of_them: bool = False) -> str:
    """Matrices of the feed-forwards (or all) on the host in this mode, everything else on the device.

    mode "resident": nothing but the embedding is on the host. With all of them KV caches are on the host, too.
    """
    targets = {op.weight for op in graph.targets(1)}
    home = "CPU" if all_of_them and mode != "resident" else device

    def place(tensor: TensorInfo) -> str:
        moved = mode != "resident" and tensor.name in targets and (all_of_them or ON_HOST in tensor.name)
        return f"CPU {mode}" if moved else f"{device} resident"

    first = ["slots 2" if all_of_them else "slots 3", *["caches stream"] * (home == "CPU")]
    return backend_map(graph, home, place, first)


# ---- memory --------------------------------------------------------------------------------------------------------


def memory(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = stack.enter_context(LocalRpcServer(threads=2))
        device = server.devices[0]
        for shape in SHAPES:
            path = Path(folder, f"{shape}.gguf")
            make_sparse_model(path, shape=shape, file_type="Q4_K_M")
            for n_prompt in PROMPTS:
                yield memory_line(path, shape, device, n_prompt, None)
        for n_prompt in PROMPTS:
            yield memory_line(args.model, args.model.stem, device, n_prompt, server)


def memory_line(path: Path, name: str, device: str, n_prompt: int, server: LocalRpcServer | None) -> dict[str, Any]:
    """Device bytes of both ways, the bound on the minimal one, and with a server those of a real run."""
    n_ctx = -(-(n_prompt + 32) // 256) * 256
    settings = Settings(n_ctx=n_ctx, devices=(device,), flash_attn="on", n_outputs_max=1, n_threads=2)
    graph = autoplan.read_graph(path, settings)
    tables = {mode: table(graph, device, mode, all_of_them=True) for mode in ("resident", "stream 1")}
    found = {mode: skeleton.dry_run(path, settings, text)[device] for mode, text in tables.items()}
    total = {mode: sum(sizes.values()) for mode, sizes in found.items()}
    groups: dict[int | None, int] = {}
    for tensor in graph.tensors:
        if tensor.name != TOKEN_EMBEDDING:
            groups[layer_of(tensor.name)] = groups.get(layer_of(tensor.name), 0) + tensor.nbytes
    kv_layer = found["resident"]["kv"] // graph.n_layer
    line = {
        "what": "memory",
        "model": name,
        "n_prompt": n_prompt,
        "n_ctx": n_ctx,
        "how": "dry run",
        "resident_bytes": total["resident"],
        "minimal_bytes": total["stream 1"],
        "saved": 1 - total["stream 1"] / total["resident"],
        "bound_bytes": 2 * max(groups.values()) + found["resident"]["compute"] + kv_layer,
    }
    if server is not None:
        line["how"] = "loaded and run"
        params = LoadParams(
            n_ctx=n_ctx, n_outputs_max=1, n_gpu_layers=-1, flash_attn="on", rpc_servers=(server.endpoint,),
            devices=(device,), n_threads=2,
        )  # fmt: skip
        for mode, key in (("resident", "resident_bytes"), ("stream 1", "minimal_bytes")):
            with Worker(Engine(mode, runtime.lib_dir(), params, backend_map=tables[mode])) as worker:
                loaded = worker.load(path, params.resolved(n_ctx))
                worker.run(0, [], list(range(300, 300 + n_prompt)), 4)
                line[key] = replace(loaded, memory=worker.unload()).device_bytes()[device]
        line["saved"] = 1 - line["minimal_bytes"] / line["resident_bytes"]
    return line


# ---- time ----------------------------------------------------------------------------------------------------------


def compared(args: argparse.Namespace, rivals: dict[str, str], sweep: Sweep) -> list[Result]:
    """Samples of rivals (name: table), each with an RPC server of its own where no device was named."""
    with ExitStack() as stack:
        engines = []
        for name, text in rivals.items():
            params = LoadParams(n_gpu_layers=-1, n_threads=args.threads, load_mode="none", flash_attn="on")
            if args.device is None:
                server = stack.enter_context(LocalRpcServer(threads=1, register=False))
                params = replace(params, rpc_servers=(server.endpoint,), devices=("RPC0",))
            else:
                params = replace(params, devices=(args.device,))
            engines.append(Engine(name, runtime.lib_dir(), params, backend_map=text, baseline=not engines))
        return run_bench(args.model, engines, sweep, progress=progress)


def time_lines(what: str, results: list[Result], metric: str) -> Iterator[dict[str, Any]]:
    by_cell: dict[Any, dict[str, list[float]]] = {}
    for result in results:
        by_cell.setdefault(result.cell, {})[result.engine] = result.values(metric)
    for cell, samples in sorted(by_cell.items()):
        (first, base), (second, ours) = samples.items()
        ratio = statistics.median(base) / statistics.median(ours)
        yield {
            "what": what, "n_prompt": cell.prompt, "n_generate": cell.gen, "metric": metric, "ratio": ratio,
            first: base, second: ours,
        }  # fmt: skip


def uploads(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ratio above 1: streaming is faster than llama.cpp's uploads."""
    graph = autoplan.read_graph(args.model, Settings(n_ctx=1024))
    device = args.device or "RPC0"
    rivals = {"uploaded": table(graph, device, "upload"), "streamed": table(graph, device, f"stream {FROM}")}
    sweep = Sweep(prompts=args.prompts, gens=(2,), repeats=args.repeats)
    yield from time_lines("uploads", compared(args, rivals, sweep), "ttft_s")


def decode(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Ratio above 1: faster with streams."""
    graph = autoplan.read_graph(args.model, Settings(n_ctx=1024))
    device = args.device or "RPC0"
    rivals = {"host": table(graph, device, "host"), "streamed": table(graph, device, f"stream {FROM}")}
    # A load decides how fast a model in memory is (bench/README.md): every round loads anew.
    sweep = Sweep(prompts=(64,), gens=(64,), repeats=args.repeats, interleave="reload")
    yield from time_lines("decode", compared(args, rivals, sweep), "tpot_s")


def main() -> None:
    parser = arguments(__doc__, "streaming")
    parser.add_argument("what", choices=("memory", "uploads", "decode"))
    parser.add_argument("--model", type=Path, default=Path("build/demo/demo-llama-247M-Q8_0.gguf"))
    parser.add_argument("--device")
    parser.add_argument("--prompts", type=numbers, default=(16, 32, 64, 128, 256))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    ways = {"memory": memory, "uploads": uploads, "decode": decode}
    record(ways[args.what](args), args.out, head={"machine": describe()})


if __name__ == "__main__":
    main()
