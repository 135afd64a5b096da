"""Plans at 100 % and 50 % of the weights: predicted against measured TTFT and TPOT.

python bench/gpu/predicted.py --model FILE.gguf [--model FILE.gguf] [--budgets 100%,50%] [--planners auto,layers]

One JSON line per plan with what it predicts, then one per load: interleaved, every load anew.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from common import Log, arguments
from loads import add_plans, context_of, measured, planning_device

from oallama.bench.script import numbers, words
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.planning import Workload


def load(model: Path, budget: str, name: str, plan: Any, options: Any) -> dict[str, Any]:
    values = measured(plan, model, options, options.prompts)
    return {"model": model.stem, "budget": budget, "name": name, **values}


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--budgets", type=words, default=["100%", "50%"])
    parser.add_argument("--planners", type=words, default=["auto", "layers"])
    parser.add_argument("--prompts", type=numbers, default=(32, 128, 512))
    parser.add_argument("--n-generate", type=int, default=64)
    options = parser.parse_args()
    device = planning_device(options.device)
    n_ctx = context_of(max(options.prompts) + options.n_generate)
    settings = Settings(n_ctx=n_ctx, flash_attn="on", n_threads=options.threads, use_mmap=False)
    workload = Workload(sorted(options.prompts)[len(options.prompts) // 2], options.n_generate)
    with Log(options.out) as log:
        jobs = {}
        for model, budget in product(options.model, options.budgets):
            graph, plans, failed = autoplan.read_graph(model, settings), {}, {}
            for planner in options.planners:
                choices = autoplan.Choices(device=device, planner=planner, workload=workload)
                try:
                    plans[planner] = autoplan.plan_graph(model, graph, budget, settings, choices)
                except OallamaError as error:
                    failed[planner] = str(error)
            for name, plan in add_plans(log, plans, failed, model=model.stem, budget=budget).items():
                jobs[f"{model.stem} {budget} {name}"] = partial(load, model, budget, name, plan, options)
        log.rounds("predicted", jobs, options.repeats)


if __name__ == "__main__":
    main()
