"""A model larger than its budget at long depths: TTFT and TPOT of our plan against llama.cpp's --fit.

python bench/gpu/deep.py --model FILE.gguf [--vram 16GiB] [--depths 8192,16384,32768] [--out FILE.jsonl]

Engines fill their caches in turn and share them by file where the form is the same. One JSON line per plan, then one
per depth, engine and round.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from common import Log, arguments, distinct, engine_of, numbers, one_load, planning_device, predicted


def measured(name: str, plan: Any, depth: int, states: Path, options: Any) -> dict[str, Any]:
    from oallama.bench import LoadParams

    folder = states / str(depth)
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        params = LoadParams(load_mode="none", n_threads=options.threads)
        engine = engine_of(plan, options.device, params, stack)
        values = one_load(
            engine,
            options.model,
            (options.n_prompt,),
            options.n_generate,
            depth=depth,
            at=options.n_prompt,
            states=folder,
        )
    return {"name": name, **values}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--vram", default="16GiB")
    parser.add_argument("--depths", type=numbers, default=(8192, 16384, 32768))
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-generate", type=int, default=32)
    parser.add_argument("--states", type=Path, help="folder for filled caches (default: of the system)")
    options = parser.parse_args()
    device = planning_device(options.device)
    with Log(options.out) as log, tempfile.TemporaryDirectory(dir=options.states) as states:
        jobs = {}
        for depth in options.depths:
            line = {"model": options.model.stem, "vram": options.vram, "depth": depth}
            plans = plans_for(depth, device, options, line, log)
            alike = distinct(plans)
            for name, plan in plans.items():
                log.add("plan", **line, name=name, same_as=alike[name], **predicted(plan))
                if alike[name] == name:
                    jobs[f"{depth} {name}"] = partial(measured, name, plan, depth, Path(states), options)
        log.rounds("deep", jobs, options.repeats, model=options.model.stem, vram=options.vram)


def plans_for(depth: int, device: str, options: Any, line: dict[str, Any], log: Log) -> dict[str, Any]:
    """Ours and --fit; `log` hears why one is missing."""
    from oallama.engine.load_settings import Settings
    from oallama.errors import OallamaError
    from oallama.loading import autoplan
    from oallama.planning import Workload

    n_ctx = -(-(depth + options.n_prompt + options.n_generate) // 256) * 256
    settings = Settings(n_ctx=n_ctx, flash_attn="on", n_threads=options.threads)
    choices = autoplan.Choices(device=device, workload=Workload(options.n_prompt, options.n_generate, depth))
    try:
        graph = autoplan.read_graph(options.model, settings)
        found = autoplan.candidates(options.model, graph, options.vram, settings, choices)
    except OallamaError as error:
        log.add("plan", **line, name="auto", error=str(error))
        return {}
    if "fit" in found.failed:
        log.add("plan", **line, name="fit", error=str(found.failed["fit"]))
    return {"auto": found.best, **{name: found.plans[name] for name in ("fit",) if name in found.plans}}


if __name__ == "__main__":
    main()
