"""Two virtual GPUs on one (GGML_CUDA_DEVICES=2), half of the layers each, feed-forwards streamed: right, and how fast.

python bench/gpu/virtual.py --model FILE.gguf [--out FILE.jsonl]

Beside it the same without streams, and one device alone. One JSON line per engine and round; `tokens` are to be those
of one device, the device's bytes show copies that nobody asked for (pipeline parallelism takes four).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common import Log, arguments
from loads import one_load
from maps import halves

from oallama.bench import Engine, LoadParams
from oallama.bench.script import numbers
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.loading import autoplan


def load(options: Any, devices: tuple[str, ...], streamed: str, graph: Any) -> dict[str, Any]:
    params = LoadParams(n_gpu_layers=-1, flash_attn="on", n_threads=options.threads, devices=devices)
    with ExitStack() as stack:
        if options.device == "RPC":
            servers = [stack.enter_context(LocalRpcServer(register=False)) for _ in devices]
            params = replace(params, rpc_servers=tuple(server.endpoint for server in servers))
        variables = {"GGML_CUDA_DEVICES": str(len(devices))} if len(devices) > 1 else {}
        table = halves(graph, devices, streamed)
        made = Engine("+".join(devices), runtime.lib_dir(), params, env=variables, backend_map=table)
        return {"devices": devices, **one_load(made, options.model, options.prompts, options.n_generate)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=numbers, default=(32, 512))
    parser.add_argument("--n-generate", type=int, default=32)
    options = parser.parse_args()
    family = options.device.rstrip("0123456789")
    one, two = (f"{family}0",), (f"{family}0", f"{family}1")
    with Log(options.out) as log:
        graph = autoplan.read_graph(options.model, Settings(n_ctx=1024))
        jobs = {
            "one": partial(load, options, one, "", graph),
            "two": partial(load, options, two, "", graph),
            "two, streamed": partial(load, options, two, "ffn_", graph),
        }
        log.rounds("virtual", jobs, options.repeats, model=Path(options.model).stem)


if __name__ == "__main__":
    main()
