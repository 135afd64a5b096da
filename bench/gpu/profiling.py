"""Seconds of profiling a model, and what was found of links, device changes and overlap.

python bench/gpu/profiling.py --model FILE.gguf[:CTX] [--model FILE.gguf] [--ctx 8192] [--out FILE.jsonl]

The profile is measured anew for the first model; a later one adds its shapes. It stays in the cache, for the stages
that plan.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import Log, arguments
from loads import planning_device

from oallama.data.plan import HOST
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.profiling import profiler


def shown(profile: Any, device: str) -> dict[str, Any]:
    """Links in bytes per second, the rest as measured."""
    return {
        "links": [
            {"direction": e.direction, "memory": e.memory, "bytes": e.bytes, "bytes_s": e.bytes / e.median_s}
            for e in profile.links if e.device == device
        ],
        "switch_s": [e.median_s for e in profile.switches if e.device == device],
        "overlap": [e.share for e in profile.overlaps if e.device == device],
        "concurrency": [e.share for e in profile.concurrency if e.device == device],
        "entries": len(profile.operators) + len(profile.attention) + len(profile.links),
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--ctx", type=int, default=8192)
    parser.add_argument("--task-seconds", type=float, help="most seconds of measuring a task (a rehearsal's, coarse)")
    options = parser.parse_args()
    device = planning_device(options.device)
    if options.task_seconds is not None:
        assert hasattr(profiler, "_MAX_SECONDS")
        profiler._MAX_SECONDS = options.task_seconds
    profiler.forget([device], options.threads)
    with Log(options.out) as log:
        for name in options.model:
            file, _, n_ctx = name.partition(":")
            model = Path(file)
            settings = Settings(n_ctx=int(n_ctx or options.ctx), n_threads=options.threads)
            graph = autoplan.read_graph(model, settings)
            steps: list[tuple[float, str]] = []
            start = time.monotonic()
            profile = autoplan.profile_for(
                graph,
                autoplan.Choices(device=device),
                autoplan.resolve(settings, graph.n_ctx_train),
                lambda done, total, what, steps=steps: steps.append((time.monotonic(), what)),
            )
            seconds = time.monotonic() - start
            longest = sorted(((b - a, what) for (a, what), (b, _) in pairwise(steps)), reverse=True)
            by_device = {d: sum(s for s, what in longest if what.startswith(f"{d}:")) for d in (device, HOST)}
            log.add("profile", model=model.stem, n_ctx=settings.n_ctx, seconds=seconds, seconds_by_device=by_device,
                    longest=longest[:12], **shown(profile, device))  # fmt: skip


if __name__ == "__main__":
    main()
