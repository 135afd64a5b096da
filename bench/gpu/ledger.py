"""Device bytes that oallama's ledger does not know: free memory before and after a load and prompts, less our buffers.

python bench/gpu/ledger.py --model FILE.gguf [--cases 100%:on,100%:off,50%:on] [--ctx 8192] [--out FILE.jsonl]

Free memory is the device's own word (cudaMemGetInfo); the CUDA context is there before the first look, so it is told
apart by nvidia-smi. One process and one JSON line per case (budget of the weights : flash attention).
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from common import ROOT, Log, arguments, gpus
from loads import planning_device, prompt_of

from oallama import Llama
from oallama.bench.script import words
from oallama.engine import device_list
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan, start
from oallama.planning import Workload

SHORT = 512


def case(options: Any, text: str) -> dict[str, Any]:
    """In a process of its own, whose context and pools are new."""
    command = [sys.executable, str(ROOT / "bench/gpu/ledger.py"), "--model", str(options.model), "--case", text]
    command += ["--device", options.device, "--threads", str(options.threads), "--ctx", str(options.ctx)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise OallamaError(f"ended with {done.returncode}: {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def child(options: Any, text: str) -> dict[str, Any]:
    driver = gpus()
    used_before = [gpu["memory.used"] for gpu in driver]
    budget, flash = text.split(":")
    device = planning_device(options.device)
    settings = Settings(n_ctx=options.ctx, flash_attn=flash, n_threads=options.threads, use_mmap=False)
    choices = autoplan.Choices(device=device, planner="exact", workload=Workload(SHORT, 64))
    plan = start.plan_model(options.model, budget, settings, choices)
    free = {"before": device_list.device(device).memory_free}
    llm = Llama(str(options.model), plan=plan, n_threads=options.threads, verbose=False)
    free["loaded"] = device_list.device(device).memory_free
    for name, n in (("short prompt", min(SHORT, options.ctx // 2)), ("long prompt", options.ctx - 64)):
        llm.reset()
        llm.eval(prompt_of(n))
        free[name] = device_list.device(device).memory_free
    for _ in range(4):
        llm.eval([301])
    free["decoded"] = device_list.device(device).memory_free
    ours = llm.placement()[device].measured
    unknown = {name: free["before"] - left - ours.total for name, left in free.items() if name != "before"}
    return {
        "budget": budget, "flash_attn": flash, "n_ctx": options.ctx, "free_bytes": free, "unknown_bytes": unknown,
        "ours_bytes": {"weights": ours.weights, "kv": ours.kv, "compute": ours.compute, "total": ours.total},
        "predicted_bytes": plan.predicted.devices[device].buffers,
        "predicted_pool_bytes": plan.predicted.devices[device].pool,
        "nvidia_smi_used_mib": {"before": used_before, "after": [gpu["memory.used"] for gpu in gpus()]},
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", type=words, default=["100%:on", "100%:off", "50%:on"])
    parser.add_argument("--ctx", type=int, default=8192)
    parser.add_argument("--case", help="in this process, one line")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(child(options, options.case)))
        return
    with Log(options.out) as log:
        jobs = {text: partial(case, options, text) for text in options.cases}
        log.rounds("ledger", jobs, options.repeats, model=Path(options.model).stem)


if __name__ == "__main__":
    main()
