"""Plans at 100 % and 50 % of the weights: predicted against measured TTFT and TPOT.

python bench/gpu/predicted.py --model FILE.gguf [--model FILE.gguf] [--budgets 100%,50%] [--planners auto,layers]

One JSON line per plan with what it predicts, then one per load: interleaved, every load anew.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from common import Log, arguments, distinct, engine_of, numbers, one_load, planning_device, predicted


def measured(model: Path, budget: str, name: str, plan: Any, options: Any) -> dict[str, Any]:
    from oallama.bench import LoadParams

    with ExitStack() as stack:
        engine = engine_of(plan, options.device, LoadParams(load_mode="none", n_threads=options.threads), stack)
        values = one_load(engine, model, options.prompts, options.n_generate)
    return {"model": model.stem, "budget": budget, "name": name, **values}


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--budgets", type=lambda text: text.split(","), default=["100%", "50%"])
    parser.add_argument("--planners", type=lambda text: text.split(","), default=["auto", "layers"])
    parser.add_argument("--prompts", type=numbers, default=(32, 128, 512))
    parser.add_argument("--n-generate", type=int, default=64)
    options = parser.parse_args()
    from oallama.engine.load_settings import Settings
    from oallama.errors import OallamaError
    from oallama.loading import autoplan
    from oallama.planning import Workload

    device = planning_device(options.device)
    n_ctx = -(-(max(options.prompts) + options.n_generate) // 256) * 256
    settings = Settings(n_ctx=n_ctx, flash_attn="on", n_threads=options.threads)
    workload = Workload(sorted(options.prompts)[len(options.prompts) // 2], options.n_generate)
    with Log(options.out) as log:
        jobs = {}
        for model, budget in product(options.model, options.budgets):
            graph, plans = autoplan.read_graph(model, settings), {}
            for planner in options.planners:
                choices = autoplan.Choices(device=device, planner=planner, workload=workload)
                try:
                    plans[planner] = autoplan.plan_graph(model, graph, budget, settings, choices)
                except OallamaError as error:
                    log.add("plan", model=model.stem, budget=budget, name=planner, error=str(error))
            alike = distinct(plans)
            for name, plan in plans.items():
                log.add("plan", model=model.stem, budget=budget, name=name, same_as=alike[name], **predicted(plan))
                if alike[name] == name:
                    jobs[f"{model.stem} {budget} {name}"] = partial(measured, model, budget, name, plan, options)
        log.rounds("predicted", jobs, options.repeats)


if __name__ == "__main__":
    main()
