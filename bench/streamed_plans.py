"""Measures plans that stream end to end: everything resident, auto, minimal, stream-all and the host alone, by budget.

python bench/streamed_plans.py [--model FILE.gguf] [--device NAME] [--budgets 25%,50%,75%] [--prompts 32,128,512,2048]
    [--repeats 5] [--out FILE.jsonl] [--tables FILE.jsonl]

TTFT by prompt length and TPOT of the 64 tokens after it, every round with each engine loaded anew. A plan is made for
the longest prompt and 64 tokens; "resident", "minimal" and "host" know no budget and are measured once. Without
--device each engine has a loopback RPC server of its own, of --server-threads threads, which cannot copy beside
computing: streams are predicted and measured one after the other there. Writes one JSON line per engine and budget;
--tables prints a recorded file.

The full run, about an hour on two cores (9 plans, 5 rounds):
  python bench/streamed_plans.py --threads 1
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.bench.engines import LoadParams
from oallama.bench.machine import describe
from oallama.bench.planned import planned
from oallama.bench.results import Result
from oallama.bench.script import arguments, note, numbers, progress, read, record, words
from oallama.bench.sweep import Sweep, run_bench
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.predicted import predicted_times
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.planning import Workload

N_GENERATE = 64
# By name: planner, and the budget where it has one of its own.
FIXED = {"resident": ("all", "100%"), "minimal": ("minimal", None), "host": ("cpu", "100%")}
BY_BUDGET = ("auto", "stream-all")


def plans(args: argparse.Namespace, device: str) -> dict[tuple[str, str], PlacementPlan]:
    """By engine and budget ("-" for those without); what does not fit is said and left out."""
    longest = max(args.prompts)
    settings = Settings(n_ctx=-(-(longest + N_GENERATE + 1) // 256) * 256, n_threads=args.threads)
    graph = autoplan.read_graph(args.model, settings)
    asked = [(name, "-", *how) for name, how in FIXED.items()]
    asked += [(planner, budget, planner, budget) for budget in args.budgets for planner in BY_BUDGET]
    made = {}
    for name, shown, planner, budget in asked:
        choices = Choices(device=device, planner=planner, workload=Workload(longest, N_GENERATE))  # type: ignore[arg-type]
        try:
            made[name, shown] = autoplan.plan_graph(args.model, graph, budget, settings, choices)
        except OallamaError as error:
            note(f"{name} {shown}: {error}")
    return made


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        device = args.device
        if device is None:
            share_processor()
            device = stack.enter_context(LocalRpcServer(threads=args.server_threads)).devices[0]
        made = plans(args, device)
        engines = []
        for (name, budget), plan in made.items():
            base = LoadParams(n_threads=args.threads, load_mode="none")
            if args.device is None and any(d != HOST for d in plan.devices):
                server = stack.enter_context(LocalRpcServer(threads=args.server_threads, register=False))
                base = replace(base, rpc_servers=(server.endpoint,))
            engines.append(planned(plan, runtime.lib_dir(), base, name=f"{name} {budget}"))
        sweep = Sweep(
            prompts=args.prompts, gens=(N_GENERATE + 1,), repeats=args.repeats, warmup=args.warmup, interleave="reload"
        )
        results = run_bench(args.model, engines, sweep, progress=progress)
    for (name, budget), plan in made.items():
        own = [result for result in results if result.engine == f"{name} {budget}"]
        yield line(args, name, budget, plan, own)


def line(args: argparse.Namespace, name: str, budget: str, plan: PlacementPlan, own: list[Result]) -> dict[str, Any]:
    """Medians by prompt length beside the predictions; streamed: bytes on the host that are copied for every token."""
    predicted = {n: predicted_times(plan, n, N_GENERATE) for n in args.prompts}
    return {
        "engine": name,
        "budget": budget,
        "model": args.model.stem,
        "device": args.device or "RPC",
        "server_threads": args.server_threads,
        "threads": args.threads,
        "planner": plan.planner["name"],
        "n_ubatch": plan.context.n_ubatch,
        "flash_attn": plan.context.flash_attn,
        "n_generate": N_GENERATE,
        "device_bytes": max((result.device_bytes() or 0) for result in own),
        "streamed_bytes": sum(t.nbytes for t in plan.tensors.values() if t.stream_from == 1),
        "streamed_from": min((t.stream_from for t in plan.tensors.values() if t.mode == "stream"), default=None),
        "ttft_s": {r.cell.prompt: statistics.median(r.values("ttft_s")) for r in own},
        "tpot_s": {r.cell.prompt: statistics.median(r.values("tpot_s")) for r in own},
        "predicted_ttft_s": {n: ttft for n, (ttft, _) in predicted.items()},
        "predicted_tpot_s": {n: tpot for n, (_, tpot) in predicted.items()},
        "samples": {r.cell.prompt: {name: r.values(name) for name in ("ttft_s", "tpot_s")} for r in own},
    }


def tables(lines: list[dict[str, Any]]) -> str:
    """Markdown: seconds measured (predicted), one table per machine."""
    machines = defaultdict(list)
    for each in lines:
        machines[each["machine"]["hardware"]["cpu"]].append(each)
    out = []
    for cpu, some in machines.items():
        prompts = list(some[0]["ttft_s"])
        head = ["engine", "budget", "device MB", *(f"TTFT {n}" for n in prompts), f"TPOT {prompts[0]}", "tokens/s"]
        out += [f"{some[0]['model']} on {cpu}, accelerator {some[0]['device']}: ms measured (predicted)", ""]
        out += [_row(head), _row(["---"] * len(head))]
        for each in some:
            ttft = [_both(each["ttft_s"][n], each["predicted_ttft_s"][n]) for n in prompts]
            tpot = each["tpot_s"][prompts[0]]
            cells = [each["engine"], each["budget"], f"{each['device_bytes'] / 1e6:.0f}", *ttft]
            out.append(_row([*cells, _both(tpot, each["predicted_tpot_s"][prompts[0]]), f"{1 / tpot:.1f}"]))
        out.append("")
    return "\n".join(out)


def _both(measured_s: float, predicted_s: float | None) -> str:
    return f"{1e3 * measured_s:.0f}" + ("" if predicted_s is None else f" ({1e3 * predicted_s:.0f})")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = arguments(__doc__, "streamed-plans")
    parser.add_argument("--model", type=Path, default=Path("build/demo/demo-llama-247M-Q8_0.gguf"))
    parser.add_argument("--device")
    parser.add_argument("--budgets", type=words, default=["25%", "50%", "75%"], help="of the weights")
    parser.add_argument("--prompts", type=numbers, default=(32, 128, 512, 2048))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="rounds after each load that do not count")
    parser.add_argument("--threads", type=int, default=0, help="of the host")
    parser.add_argument("--server-threads", type=int, default=2)
    parser.add_argument("--tables", type=Path)
    args = parser.parse_args()
    if args.tables:
        print(tables(read(args.tables)))
        return
    record(measured(args), args.out, each={"machine": describe()})


if __name__ == "__main__":
    main()
