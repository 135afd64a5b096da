"""The OATO paper's cells on this GPU: TTFT by prompt and TPOT under budgets, planners against llama.cpp's own ways.

python bench/gpu/oato.py --make FOLDER [--layers 32,16,8] [--budgets 50%,25%,75%] [--repeats 5] [--out FILE.jsonl]
python bench/gpu/oato.py --model FILE.gguf [--keep] [--planners auto,layers,fit] ..

Planners: paper (Algorithm 1 literally), oato, exact, auto, divided, stream-all, layers (-ngl) and fit (--fit), all with
fused attention. Every round loads each engine of each budget anew. Five loads of each take longer than a stage may, so
the 8B shape has as many of --layers as all rounds have time for by prediction; the model is made in --make (with
--model it is what it is). --fit is given the bytes of -ngl's budget. One JSON line per plan, then one per load.
--keep: budget by budget, each engine is loaded once and stays for all rounds. --planners: only these.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from common import Log, arguments
from loads import add_plans, context_of, distinct, kept, measured, planning_device

from oallama.bench.script import numbers, words
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.modelmaker import make_model, make_sparse_model
from oallama.planning import Workload

CANDIDATES = ("oato", "exact", "divided", "layers")
# What a load costs beside its tokens: a process with a CUDA context, and bytes from memory to their places.
START_S, LOADED_BYTES_S = 2.5, 4e9


def plans(model: Path, budget: str, device: str, options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Of every planner that applies; why the others do not."""
    n_ctx = context_of(max(options.prompts) + options.n_generate)
    settings = Settings(n_ctx=n_ctx, flash_attn="on", n_threads=options.threads)
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


def seconds_of(plan: Any, prompts: tuple[int, ...], n_generate: int) -> float:
    """A load by prediction."""
    promised = plan.predicted
    ttft, tpot = max(promised.ttft_s.values()), max(promised.tpot_s.values())
    nbytes = sum(tensor.nbytes for tensor in plan.tensors.values())
    return START_S + nbytes / LOADED_BYTES_S + (len(prompts) + 1) * ttft + (n_generate + len(prompts)) * tpot


def choose_layers(options: Any, device: str, left: float) -> int:
    """The most layers of which every round fits into `left` seconds; plans are made on a model without weights."""
    whole = make_sparse_model(options.make / "planned.gguf", shape="llama3-8b", file_type="F16")
    try:
        n_layer, *fewer = options.layers
        found = [plans(whole, budget, device, options)[0] for budget in options.budgets]
        every = [plan for made in found for name, plan in made.items() if distinct(made)[name] == name]
        needed = options.repeats * sum(seconds_of(plan, options.prompts, options.n_generate) for plan in every)
        starts = options.repeats * START_S * len(every)
    finally:
        whole.unlink()
    for n in (n_layer, *fewer):
        # All but the start of a process grows with the layers; a fifth of a round's length is kept.
        if starts + (needed - starts) * n / n_layer < 0.8 * left:
            return int(n)
    return int(options.layers[-1])


def model_of(options: Any, device: str, log: Log) -> Path:
    if options.model:
        return Path(options.model)
    n_layer = choose_layers(options, device, log.left())
    path = Path(options.make) / ("8b-F16.gguf" if n_layer == 32 else f"8b-{n_layer}-layers-F16.gguf")
    log.add("layers", n_layer=n_layer, of=options.layers, seconds_left=log.left(), model=path.stem)
    if not path.exists():
        make_model(path, shape="llama3-8b", file_type="F16", overrides={"n_layer": n_layer})
    return path


def load(model: Path, budget: str, name: str, plan: Any, options: Any) -> dict[str, Any]:
    return {"budget": budget, "name": name, **measured(plan, model, options, options.prompts)}


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--make", type=Path, help="folder for the model, made with as many layers as there is time for")
    parser.add_argument("--layers", type=numbers, default=(32, 16, 8))
    parser.add_argument("--budgets", type=words, default=["50%", "25%", "75%"])
    parser.add_argument("--prompts", type=numbers, default=(32, 64, 128, 256, 512))
    parser.add_argument("--n-generate", type=int, default=64)
    parser.add_argument("--planners", type=words, help="(default: all)")
    parser.add_argument("--keep", action="store_true", help="one load of each engine for all rounds")
    options = parser.parse_args()
    if (options.model is None) == (options.make is None):
        parser.error("give one of --model and --make")

    device = planning_device(options.device)
    with Log(options.out) as log:
        model = model_of(options, device, log)
        jobs = {}
        for budget in options.budgets:
            made = plans(model, budget, device, options)
            found = add_plans(log, *made, model=model.stem, budget=budget)
            found = {name: plan for name, plan in found.items() if name in (options.planners or found)}
            if options.keep:
                with ExitStack() as stack:
                    staying = {name: kept(plan, model, options, options.prompts, stack) for name, plan in found.items()}
                    log.rounds("oato", staying, options.repeats, model=model.stem, budget=budget, kept=True)
                continue
            for name, plan in found.items():
                jobs[f"{budget} {name}"] = partial(load, model, budget, name, plan, options)
        if jobs:
            log.rounds("oato", jobs, options.repeats, model=model.stem)


if __name__ == "__main__":
    main()
