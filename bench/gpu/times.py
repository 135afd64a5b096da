"""Where a prompt's and a token's seconds go: predicted, by lanes of our trace, by kernels and copies that CUPTI saw.

python bench/gpu/times.py --model FILE.gguf [--vram 50%] [--planner auto] [--depth 0] [--n-prompt 512] [--n-generate 8]
    [--out FILE.jsonl]

One load. A JSON line each for "prefill" (of --n-prompt tokens behind --depth) and "decode" (seconds of one token):
wall_s, the median of --repeats passes that nobody watches; predicted_s and its parts; lanes, of a pass in which splits
are waited for one by one; gpu, of a pass that CUPTI watches: seconds with a kernel, with a copy, with both, copies by
kind, the longest kernels by name. gpu needs PyTorch, whose profiler reads CUPTI; null without it.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from common import Log, arguments
from loads import context_of, planning_device, predicted, prompt_of

from oallama import Llama
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan, start
from oallama.planning import Workload
from oallama.tracing import Stage, Timeline, recorded_spans
from oallama.tracing.timeline import intersection, length, union

KERNELS = 16  # by name, the longest
Work = Callable[[], None]


def seconds_of(work: Work) -> float:
    since = time.perf_counter()
    work()
    return time.perf_counter() - since


def lanes(work: Work, name: str, passes: int) -> dict[str, dict[str, float]]:
    """Busy seconds, bytes and spans of every lane, of one of the passes that `work` makes."""
    with recorded_spans() as spans:
        begin = time.monotonic()
        work()
        stage = Stage(name, begin, time.monotonic())
    counts = Counter(span.lane for span in spans)
    return {"all": {"busy_s": stage.seconds / passes}} | {
        use.lane: {"busy_s": use.busy_s / passes, "bytes": use.nbytes / passes, "spans": counts[use.lane] / passes}
        for use in Timeline(tuple(spans), (stage,)).use(stage)
    }


def watched(work: Work, passes: int) -> dict[str, Any] | None:
    """Kernels and copies on the GPU; None without PyTorch or its GPU."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        wall = seconds_of(work)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return summary(events, passes) | {"wall_s": wall / passes}


def summary(events: Iterable[dict[str, Any]], passes: int) -> dict[str, Any]:
    """Of Chrome's trace events, in microseconds there, in seconds of one pass here."""
    kernels, copies = [], []
    by_name: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        begin, seconds, name = event["ts"] / 1e6, event["dur"] / 1e6, event["name"]
        if event["cat"] == "kernel":
            kernels.append((begin, begin + seconds))
            by_name[name.removeprefix("void ")[:90]].append(seconds)
        else:
            copies.append((begin, begin + seconds))
            by_kind[name].append((seconds, int(event["args"].get("bytes", 0))))
    computing, copying = union(kernels), union(copies)
    both = length(intersection(computing, copying))
    begins, ends = zip(*kernels, *copies, strict=True) if kernels or copies else ((), ())
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:KERNELS]
    return {
        "kernels_s": length(computing) / passes, "copies_s": length(copying) / passes, "both_s": both / passes,
        "first_to_last_s": (max(ends, default=0) - min(begins, default=0)) / passes,
        "kernels": len(kernels) / passes,
        "longest": [{"name": name, "s": sum(s) / passes, "n": len(s) / passes} for name, s in longest],
        "copies": {kind: {"s": sum(s for s, _ in rows) / passes, "bytes": sum(b for _, b in rows) / passes,
                          "n": len(rows) / passes} for kind, rows in by_kind.items()},
    }  # fmt: skip


def pass_of(llm: Llama, depth: int, tokens: Sequence[int], one_by_one: bool) -> Work:
    """Forgets what came behind `depth` tokens, computes these, and waits for all devices."""
    from llama_cpp import llama_synchronize  # behind oallama

    def work() -> None:
        llm.n_tokens = depth
        for batch in [[t] for t in tokens] if one_by_one else [list(tokens)]:
            llm.eval(batch)
        llama_synchronize(llm.ctx)

    return work


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--vram", default="50%")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--n-prompt", type=int, default=512)
    parser.add_argument("--n-generate", type=int, default=8)
    options = parser.parse_args()
    device, depth, n_prompt = planning_device(options.device), options.depth, options.n_prompt
    n_ctx = context_of(depth + n_prompt + options.n_generate)
    settings = Settings(n_ctx=n_ctx, flash_attn="on", n_threads=options.threads, use_mmap=False)
    workload = Workload(n_prompt, options.n_generate, depth)
    choices = autoplan.Choices(device=device, planner=options.planner, workload=workload)
    with Log(options.out) as log:
        plan = start.plan_model(options.model, options.vram, settings, choices)
        line = {"model": options.model.stem, "vram": options.vram, "depth": depth, "n_prompt": n_prompt}
        log.add("plan", **line, **predicted(plan))
        llm = Llama(str(options.model), plan=plan, n_threads=options.threads, use_mmap=False, verify=False,
                    verbose=False)  # fmt: skip
        try:
            llm.eval(prompt_of(depth) or [301])
            for name, n, one_by_one in (("prefill", n_prompt, False), ("decode", options.n_generate, True)):
                behind = depth + (n_prompt if one_by_one else 0)
                work = pass_of(llm, behind, prompt_of(n), one_by_one)
                passes = n if one_by_one else 1
                work()
                walls = [seconds_of(work) / passes for _ in range(options.repeats)]
                parts = {
                    cause: s / max(1, n - 1) if one_by_one else s for cause, s in plan.predicted.parts[name].items()
                }
                log.add("times", **line, stage=name, tokens=n, wall_s=statistics.median(walls), walls_s=walls,
                        predicted_s=sum(parts.values()), predicted_parts_s=parts, lanes=lanes(work, name, passes),
                        gpu=watched(work, passes))  # fmt: skip
        finally:
            llm.close()


if __name__ == "__main__":
    main()
