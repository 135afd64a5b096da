"""How the CPU's kernels do on the shapes of the paper's models: the efficiencies by shape of a datasheet.

python bench/shapes.py [--models llama3-8b,minicpm3-4b,qwq-32b] [--type F16] [--threads N] [--seconds 0.6] [--out FILE]
python bench/shapes.py --datasheet NAME --from FILE.jsonl

Times every distinct matrix of the models at one token and at 512, from cold memory; two minutes on two cores. One JSON
line per shape: bytes/s of one token, flop/s of 512, both also as shares of the best of all shapes. With --datasheet
nothing is measured: prints that shipped datasheet with "shapes" of its CPU, its own efficiencies times these shares. It
refuses times that were taken beside other work. The paper's study takes what it prints:

python bench/shapes.py --datasheet rtx4090-xeon4314 --from bench/results/2026-11-27-shapes-epyc.jsonl > shaped.json
python -m oallama.studies.paper.study --datasheet shaped.json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, read, record, words
from oallama.data.entries import CLEAN
from oallama.data.plan import HOST
from oallama.data.shipped import find
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.modelmaker import make_sparse_model
from oallama.profiling.datasheet import FOLDER, Datasheet
from oallama.profiling.fingerprint import cpu_set
from oallama.profiling.profiler import Probe
from oallama.profiling.workload import tasks_for
from oallama.studies.paper.study import MODELS

TIERS = (1, 512)


def measured(models: list[str], file_type: str, n_threads: int, seconds: float) -> Iterator[dict[str, Any]]:
    """By shape of a dense matrix; of a type with two layouts on the CPU the one that llama.cpp takes there."""
    weights: dict[tuple[str, int, int], int] = {}
    tasks: dict[Any, None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            path = make_sparse_model(Path(folder) / f"{model}.gguf", shape=model, file_type=file_type)
            graph = autoplan.read_graph(path, Settings(n_ctx=1024), TIERS)
            for op in graph.targets(1):
                tensor = graph.tensor[op.weight or ""]
                if len(tensor.ne) < 3 or tensor.ne[2] == 1:
                    weights[tensor.type, tensor.ne[0], tensor.ne[1]] = tensor.nbytes
            needed = tasks_for(graph, depths=(1024,), type_k="f16", type_v="f16", accelerator=False)
            tasks |= {task: None for task in needed if task.kind == "mul_mat" and not task.args["n_expert"]}
    probe = Probe(HOST, n_threads, seconds)
    found: dict[tuple[str, int, int], dict[str, Any]] = {}
    for task in tasks:
        shape = task.args["type"], task.args["k"], task.args["m"]
        if shape not in weights:
            continue
        note(task.describe())
        (entry,) = probe.measure(task)
        line = found.setdefault(shape, {"type": shape[0], "k": shape[1], "m": shape[2]})
        line |= {f"median_{entry.n_tokens}_s": entry.median_s, f"clean_{entry.n_tokens}": entry.clean}
    for shape, line in found.items():
        line["gb_s"] = weights[shape] / line["median_1_s"] / 1e9
        if "median_512_s" in line:  # the output matrix sees one token
            line["gflop_s"] = 2.0 * shape[1] * shape[2] * 512 / line["median_512_s"] / 1e9
    for key in ("gb_s", "gflop_s"):
        best = max(line[key] for line in found.values() if key in line)
        for line in found.values():
            if key in line:
                line[f"share_{key}"] = line[key] / best
    for line in found.values():
        yield {"what": "shape", "n_threads": n_threads, **line}


def shaped(name: str, source: Path) -> str:
    """The datasheet's own efficiencies hold for the best shape; the output matrix computes like the best one.

    Raises OallamaError for times that were taken beside other work.
    """
    cpu = Datasheet.load(name).cpu
    lines = [line for line in read(source) if line.get("what") == "shape"]
    if doubtful := [line for line in lines if min(line["clean_1"], line.get("clean_512", 1.0)) < CLEAN]:
        raise OallamaError(f"{len(doubtful)} of {len(lines)} shapes were timed beside other work: measure them again")
    rows = [
        {
            "type": line["type"],
            "k": line["k"],
            "m": line["m"],
            "bandwidth_efficiency": round(cpu.bandwidth_efficiency * line["share_gb_s"], 3),
            "compute_efficiency": round(cpu.compute_efficiency * line.get("share_gflop_s", 1.0), 3),
        }
        for line in sorted(lines, key=lambda line: (line["type"], line["k"], line["m"]))
    ]
    content = json.loads(find(name, FOLDER, "datasheet").read_text())
    content["name"] += "-shapes"
    content["sources"].append(f"shapes of the CPU's weights: shares of the best one on another CPU, from {source}")
    content["cpu"]["shapes"] = rows
    return json.dumps(content, indent=1)


def main() -> None:
    parser = arguments(__doc__, "shapes")
    parser.add_argument("--models", type=words, default=[*MODELS])
    parser.add_argument("--type", default="F16")
    parser.add_argument("--threads", type=int, default=len(cpu_set()))
    parser.add_argument("--seconds", type=float, default=0.6, help="per measurement")
    parser.add_argument("--datasheet")
    parser.add_argument("--from", dest="source", type=Path)
    args = parser.parse_args()
    if args.datasheet:
        print(shaped(args.datasheet, args.source))
        return
    record(measured(args.models, args.type, args.threads, args.seconds), args.out, head={"machine": describe()})


if __name__ == "__main__":
    main()
