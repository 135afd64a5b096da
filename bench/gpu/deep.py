"""A model larger than its budget at long depths: TTFT and TPOT of our plan against llama.cpp's --fit.

python bench/gpu/deep.py --model FILE.gguf [--vram 16GiB] [--depths 8192,16384,32768] [--keep] [--out FILE.jsonl]

Engines fill their caches in turn and share them by file where the form is the same. One JSON line per plan, then one
per depth, engine and round.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import Log, arguments
from loads import add_plans, context_of, jobs, planning_device

from oallama.bench.script import numbers
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.planning import Workload


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--vram", default="16GiB")
    parser.add_argument("--depths", type=numbers, default=(8192, 16384, 32768))
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-generate", type=int, default=32)
    parser.add_argument("--keep", action="store_true", help="one load of each engine for all rounds of a depth")
    parser.add_argument("--states", type=Path, help="folder for filled caches (default: of the system)")
    options = parser.parse_args()
    device = planning_device(options.device)
    with Log(options.out) as log, tempfile.TemporaryDirectory(dir=options.states) as states:
        for depth in options.depths:
            line = {"model": options.model.stem, "vram": options.vram, "depth": depth}
            found = add_plans(log, *plans_for(depth, device, options), **line)
            folder = Path(states) / str(depth)
            folder.mkdir()
            with ExitStack() as stack:
                loads = jobs(found, options.model, options, (options.n_prompt,), stack, depth=depth, states=folder)
                log.rounds("deep", loads, options.repeats, **line, kept=options.keep)


def plans_for(depth: int, device: str, options: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Ours and --fit; why one is missing."""
    n_ctx = context_of(depth + options.n_prompt + options.n_generate)
    settings = Settings(n_ctx=n_ctx, flash_attn="on", n_threads=options.threads, use_mmap=False)
    workload = Workload(options.n_prompt, options.n_generate, depth)
    choices = autoplan.Choices(device=device, workload=workload, all_candidates=True)
    try:
        graph = autoplan.read_graph(options.model, settings)
        found = autoplan.candidates(options.model, graph, options.vram, settings, choices)
    except OallamaError as error:
        return {}, {"auto": str(error)}
    fit = {"fit": found.plans["fit"]} if "fit" in found.plans else {}
    return {"auto": found.best, **fit}, {"fit": str(found.failed["fit"])} if "fit" in found.failed else {}


if __name__ == "__main__":
    main()
