"""The OATO paper's cells on this GPU: TTFT by prompt and TPOT under budgets, planners against llama.cpp's own ways.

python bench/gpu/oato.py --model FILE.gguf [--budgets 50%,25%,75%] [--planners auto,layers,fit] [--keep]
    [--repeats 5] [--out FILE.jsonl]

Planners: paper (Algorithm 1 literally), oato, exact, auto, divided, stream-all, layers (-ngl) and fit (--fit), all with
fused attention; --planners: only these. Budget by budget, every round loads each engine anew; with --keep each is
loaded once and stays for all rounds. --fit is given the bytes of -ngl's budget. One JSON line per plan, then one per
round and engine.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import Log, arguments
from loads import add_plans, context_of, jobs, planning_device

from oallama.bench.script import numbers, words
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.planning import Workload

CANDIDATES = ("oato", "exact", "divided", "layers")


def plans(model: Path, budget: str, device: str, options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Of every planner that applies; why the others do not."""
    n_ctx = context_of(max(options.prompts) + options.n_generate)
    settings = Settings(n_ctx=n_ctx, flash_attn="on", n_threads=options.threads, use_mmap=False)
    middle = sorted(options.prompts)[len(options.prompts) // 2]
    choices = {"device": device, "workload": Workload(middle, options.n_generate)}
    graph = autoplan.read_graph(model, settings)
    found: dict[str, Any] = {}
    try:
        made = autoplan.candidates(model, graph, budget, settings, autoplan.Choices(**choices, all_candidates=True))
        found = {"auto": made.best, **{name: made.plans[name] for name in CANDIDATES if name in made.plans}}
        failed = {name: str(made.failed.get(name, "not made")) for name in CANDIDATES if name not in made.plans}
    except OallamaError as error:
        failed = {"auto": str(error)}
    # --fit takes bytes of all, not a share of the weights.
    nbytes = next(iter(found["layers"].budgets.values()), budget) if "layers" in found else budget
    for name, vram, more in (
        ("paper", budget, {"planner": "oato", "paper": True}),
        ("stream-all", budget, {"planner": "stream-all"}),
        ("fit", nbytes, {"planner": "fit"}),
    ):
        try:
            found[name] = autoplan.plan_graph(model, graph, vram, settings, autoplan.Choices(**choices, **more))
        except OallamaError as error:
            failed[name] = str(error)
    return found, failed


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--budgets", type=words, default=["50%", "25%", "75%"])
    parser.add_argument("--prompts", type=numbers, default=(32, 64, 128, 256, 512))
    parser.add_argument("--n-generate", type=int, default=64)
    parser.add_argument("--planners", type=words, help="(default: all)")
    parser.add_argument("--keep", action="store_true", help="one load of each engine for all rounds")
    options = parser.parse_args()
    device, model = planning_device(options.device), options.model
    with Log(options.out) as log:
        for budget in options.budgets:
            found = add_plans(log, *plans(model, budget, device, options), model=model.stem, budget=budget)
            chosen = {name: plan for name, plan in found.items() if name in (options.planners or found)}
            with ExitStack() as stack:
                loads = jobs(chosen, model, options, options.prompts, stack)
                log.rounds("oato", loads, options.repeats, model=model.stem, budget=budget, kept=options.keep)


if __name__ == "__main__":
    main()
