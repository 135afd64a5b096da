"""Which operators besides products with weights and attention cost more than 1 % of a pass, and what predictions say.

PYTHONPATH=tests python bench/other_operators.py [--arch REGEX] [--out FILE.jsonl]

The models are upstream's tiny ones of all architectures with the widths of a published model (wide_models.py). Each
decodes and reads a prompt of 512 tokens on the CPU under the operator timer. One JSON line per model and stage: the
pass; seconds of all other operators as measured, as priced when all of them count as small ones, and as priced with
those timed by kind and shape; the share of the pass of every kind above 1 %.
"""

from __future__ import annotations

import ctypes
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from wide_models import build, wide_models

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.data.operators import OperatorGraph, attention_chains
from oallama.engine import load_settings, native, runtime
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from support.archs import architectures

STAGES = {"decode": 1, "prompt": 512}
REPEATS = 5
THREADS = 1
LEAST = 0.01


def measure(path: Path) -> list[dict[str, Any]]:
    """Lines of one model; run in a process of its own."""
    settings = Settings(n_ctx=1024, n_batch=512, n_ubatch=512, n_threads=THREADS, devices=())
    graph = autoplan.read_graph(path, settings, tuple(STAGES.values()))
    took = timed(path, settings)
    bench = native.core().OpBench("CPU", THREADS, True, 64 << 20)
    lines = []
    for stage, n in STAGES.items():
        small = bench.small(n_embd=graph.tensor["token_embd.weight"].ne[0], n_tokens=n, max_s=0.3)["median_s"]
        lines.append({"model": path.stem, "stage": stage, **compare(graph, n, took[stage], small, bench)})
    return lines


def compare(graph: OperatorGraph, n: int, took: dict[str, float], small: float, bench: Any) -> dict[str, Any]:
    attends = {index for chain in attention_chains(graph.operators(n)).values() for index in chain}
    others = [op for op in graph.operators(n) if not op.is_target and op.index not in attends]
    by_key = {op.shape.key: op.shape for op in others if op.shape is not None}
    times = {key: bench.node(shape.as_node(), n_tokens=n, max_s=0.3)["median_s"] for key, shape in by_key.items()}
    total = sum(took.values())
    kinds, priced = defaultdict[str, float](float), defaultdict[str, float](float)
    for op in others:
        kinds[op.op] += took.get(f"{op.op} {op.name}", 0.0)
        priced[op.op] += times[op.shape.key] if op.shape is not None else small
    large = {kind: s / total for kind, s in sorted(kinds.items(), key=lambda item: -item[1]) if s > LEAST * total}
    return {
        "pass_s": total,
        "others_s": sum(kinds.values()),
        "as_small_s": small * len(others),
        "by_shape_s": sum(priced.values()),
        "n_shapes": len(times),
        "shares": {kind: round(share, 4) for kind, share in large.items()},
        "priced_shares": {kind: round(priced[kind] / total, 4) for kind in large},
    }


def timed(path: Path, settings: Settings) -> dict[str, dict[str, float]]:
    """Stage -> "OP name" -> median seconds of the node."""
    llama_cpp, core = runtime.llama_cpp(), native.core()
    runtime.quiet()
    params = load_settings.make_params(settings)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params.model)
    context = llama_cpp.llama_init_from_model(model, params.context)
    memory = llama_cpp.llama_get_memory(context)
    found: dict[str, dict[str, list[float]]] = {stage: defaultdict(list) for stage in STAGES}
    tokens = (llama_cpp.llama_token * 512)(*np.random.default_rng(1).integers(0, 128, 512).tolist())

    def run(n: int) -> list[Any]:
        core.op_timer_take()
        core.op_timer_enable(True)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, n)):
            raise RuntimeError(f"llama_decode fails for {path.stem}")
        core.op_timer_enable(False)
        return list(core.op_timer_take())

    for repeat in range(REPEATS):
        if memory:
            llama_cpp.llama_memory_clear(memory, True)
        for stage, n in (("prompt", 512), ("decode", 1), ("decode", 1)):
            for i, (_, name, op, _, seconds, _) in enumerate(run(n)):
                if repeat:
                    found[stage][f"{ggml_op(op)} {name}", i].append(seconds)  # type: ignore[index]
    merged: dict[str, dict[str, float]] = {stage: defaultdict(float) for stage in STAGES}
    for stage, nodes in found.items():
        for (name, _), values in nodes.items():  # type: ignore[misc]
            merged[stage][name] += statistics.median(values)
    return merged


def ggml_op(description: str) -> str:
    """The operator behind ggml's description of it: those of UNARY and GLU have names of their own."""
    if description in GLU:
        return "GLU"
    return description if description in OPS else "UNARY"


GLU = {"REGLU", "GEGLU", "SWIGLU", "SWIGLU_OAI", "GEGLU_ERF", "GEGLU_QUICK"}
OPS: set[str] = set()


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        base = ctypes.CDLL(str(runtime.lib_dir() / "libggml-base.so"))
        base.ggml_op_name.restype = ctypes.c_char_p
        OPS.update(base.ggml_op_name(i).decode() for i in range(96))
        print(json.dumps(measure(Path(sys.argv[2]))))
        return
    parser = arguments(__doc__, "other-operators")
    parser.add_argument("--arch", default="", help="regular expression of architectures; all by default")
    options = parser.parse_args()
    names = [name for name in architectures() if re.search(options.arch, name)]
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))

        def lines() -> Iterator[dict[str, Any]]:
            for path in wide_models(program, Path(folder), names):
                command = [sys.executable, __file__, "--one", str(path)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    note(f"{path.stem}: {done.stderr.strip().splitlines()[-1:]}")
                    continue
                yield from json.loads(done.stdout.splitlines()[-1])

        record(lines(), options.out, each={"machine": describe()})


if __name__ == "__main__":
    main()
