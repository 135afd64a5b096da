"""What smaller compute buffers buy: bytes of weights on the device and predicted times, step by step.

python bench/arena_gains.py [--out FILE.jsonl] [--datasheet rtx4090-xeon4314]

Published shapes in sparse files, a profile computed from a datasheet, dry runs on a stand-in device. The exact planner
plans each case with logits for all rows and the micro-batch as asked for (llama.cpp's buffers), then with one row of
logits per sequence, then with offline arenas too; and with a micro-batch of its own choice, by ggml and with offline
arenas. One JSON line per case and step.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.data.plan import HOST
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_sparse_model
from oallama.planning import Workload
from oallama.profiling.datasheet import Datasheet, make_profile

# shape, budget, micro-batch, prompt
CASES = (
    ("llama3-8b", "3GiB", 512, 512),
    ("llama3-8b", "3GiB", 2048, 4096),
    ("qwq-32b", "16GiB", 512, 512),
    ("qwq-32b", "16GiB", 2048, 4096),
    ("qwen3-30b-a3b", "4GiB", 512, 512),
    ("qwen3-30b-a3b", "4GiB", 2048, 4096),
    ("qwen3-235b-a22b", "22GiB", 2048, 4096),
)
STEPS: dict[str, dict[str, Any]] = {
    "all logits": {"all_logits": True, "fixed_ubatch": True},
    "one row of logits": {"fixed_ubatch": True},
    "offline arenas": {"fixed_ubatch": True, "offline_arenas": True},
    "micro-batch chosen": {},
    "micro-batch chosen, offline arenas": {"offline_arenas": True},
}
N_CTX = 8192


def main() -> None:
    parser = arguments(__doc__, "arena-gains")
    parser.add_argument("--datasheet", default="rtx4090-xeon4314")
    options = parser.parse_args()
    record(measured(options), options.out, each={"machine": describe()})


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    sheet = Datasheet.load(options.datasheet)
    for shape, budget, n_ubatch, n_prompt in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = make_sparse_model(Path(folder) / f"{shape}.gguf", shape=shape, file_type="Q4_K_M")
            settings = Settings(n_ctx=N_CTX, n_ubatch=n_ubatch, flash_attn="on", n_threads=sheet.cpu.cores)
            graph = autoplan.read_graph(path, settings)
            profile, workload = make_profile(graph, sheet), Workload(n_prompt, 128, 1024)
            for step, how in STEPS.items():
                choices = Choices(planner="exact", profile=profile, elsewhere=True, workload=workload, **how)
                plan = autoplan.plan_graph(path, graph, budget, settings, choices)
                device = next(name for name in plan.devices if name != HOST)
                memory, middle = plan.predicted.devices[device], 1024 + n_prompt + 64
                yield {
                    "shape": shape, "budget": budget, "datasheet": options.datasheet, "n_ctx": N_CTX, "step": step,
                    "n_ubatch_asked": n_ubatch, "n_ubatch": plan.context.n_ubatch, "n_prompt": n_prompt,
                    "weights": memory.weights, "kv": memory.kv, "compute": memory.compute,
                    "ttft_s": plan.predicted.ttft_s[n_prompt], "tpot_s": plan.predicted.tpot_s[middle],
                    "request_s": plan.predicted.request_s, "planner": plan.planner["params"],
                }  # fmt: skip


if __name__ == "__main__":
    main()
