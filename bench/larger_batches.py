"""Prompts in micro-batches of 256 to 4096 tokens where weights are streamed: predicted and measured TTFT.

python bench/larger_batches.py [--model FILE.gguf] [--budget 30%] [--prompt 2048] [--threads 1] [--repeats 3]
    [--planner stream-all] [--out FILE.jsonl]

The same budget planned for each micro-batch alone. "stream-all" copies what does not fit once for every micro-batch; on
loopback the exact planner would leave it on the host, which has the same processor. Each engine has a loopback RPC
server of its own, which cannot copy beside computing. Engines take turns, loaded anew each round. Without --model a
llama of 8 layers is made. One JSON line per plan.
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

from oallama.bench.engines import LoadParams
from oallama.bench.machine import describe
from oallama.bench.planned import planned
from oallama.bench.script import arguments, progress, record
from oallama.bench.sweep import Sweep, run_bench
from oallama.data.predicted import predicted_times
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_model
from oallama.planning import Workload

SHAPE = {"n_layer": 8, "n_embd": 1024, "n_ff": 2816, "n_head": 16, "n_head_kv": 4}
SIZES = (256, 512, 1024, 2048, 4096)
N_GENERATE = 2


def measured(args: argparse.Namespace, model: Path) -> Iterator[dict[str, Any]]:
    asked = Settings(n_ctx=args.prompt + 256, n_batch=512, n_threads=args.threads)
    graph = autoplan.read_graph(model, asked)
    with ExitStack() as stack:
        share_processor()
        device = stack.enter_context(LocalRpcServer(threads=1)).devices[0]
        work = Workload(args.prompt, N_GENERATE)
        choices = Choices(device=device, planner=args.planner, workload=work, fixed_ubatch=True, fixed_batch=True)
        plans = {}
        for size in [n for n in SIZES if n <= args.prompt]:
            fixed = replace(asked, n_batch=size, n_ubatch=size)
            plans[str(size)] = autoplan.plan_graph(model, graph, args.budget, fixed, choices)
        engines = []
        for name, plan in plans.items():
            server = stack.enter_context(LocalRpcServer(threads=1, register=False))
            base = LoadParams(n_threads=args.threads, rpc_servers=(server.endpoint,), load_mode="none")
            engines.append(planned(plan, runtime.lib_dir(), base, name=name))
        sweep = Sweep(prompts=(args.prompt,), gens=(N_GENERATE,), repeats=args.repeats, interleave="reload")
        results = run_bench(model, engines, sweep, progress=progress)
    for result in results:
        plan = plans[result.engine]
        took = result.values("ttft_s")
        yield {
            "n_ubatch": plan.context.n_ubatch,
            "planner": args.planner,
            "prompt": args.prompt,
            "budget": args.budget,
            "threads": args.threads,
            "modes": sorted({tensor.mode for tensor in plan.tensors.values()}),
            "streamed_bytes": sum(t.nbytes for t in plan.tensors.values() if t.mode == "stream"),
            "ttft_s": statistics.median(took),
            "predicted_ttft_s": predicted_times(plan, args.prompt, N_GENERATE)[0],
            "samples_s": took,
            "device_bytes": result.device_bytes(),
        }


def main() -> None:
    parser = arguments(__doc__, "larger-batches")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--budget", default="30%")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--planner", default="stream-all")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "llama-8-layers-Q8_0.gguf"
        if options.model is None:
            make_model(model, arch="llama", shape="small", file_type="Q8_0", overrides=SHAPE)
        record(measured(options, model), options.out, each={"machine": describe()})


if __name__ == "__main__":
    main()
