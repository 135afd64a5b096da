"""Where a generated token's time goes on the CPU: by kind of operator, between operators, and outside of the graph.

python bench/decode_operators.py [--models llama3-8b:Q4_0:8,arch:lfm2,...] [--depths 0,4096] [--engines plan,plain]
    [--threads N] [--rounds 5] [--tokens 16] [--out FILE.jsonl]

models: SHAPE:TYPE:LAYERS by our modelmaker, with 32000 words (a fourth part sets their number), or arch:NAME, one of
WIDE: a model by upstream's program that writes all architectures, in Q8_0. plain is llama.cpp's own kernels with -fa on
(the patched engine without a plan), plan is that of `auto`. A round decodes `tokens` tokens without the operator timer,
then as many with it. One JSON line per model, depth and engine; medians over the rounds:

* token_s: of llama_decode without the timer; timed_s: with it; operators_s: the sum of the timer's records. An
  operator's time ends behind its barrier. timed_s - operators_s is what the timer and everything outside of operators
  take; token_s - operators_s is near zero where the timer disturbs nothing.
* kinds: by kind of operator (weights by type and matrix) its number, seconds, share of the token, bytes that it must
  read and write at least, GB/s, and the share of the machine's read rate that this is.
* outside of llama_decode: sample_s (llama-cpp-python's default chain), greedy_s, python_s (Llama.eval's own share).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from attention import read_rate
from wide_models import TREE

from oallama import Llama
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, numbers, record, words
from oallama.data.plan import HOST
from oallama.engine import native, runtime
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_model
from oallama.planning import Workload

MODELS = ["llama3-8b:Q4_0:8", "llama3-8b:Q4_K_M:8", "minicpm3-4b:Q4_K_M:24", "qwen3-30b-a3b:Q4_K_M:4"]
MODELS += ["arch:lfm2", "arch:qwen3next", "arch:gemma3"]
# Upstream's program's own numbers -> those of a model that people run; gemma3 is the shape of its 270M.
SIZES = {
    "lfm2": {"n_vocab": 65536, "n_embd": 2048, "n_head": 32, "n_ff": 8192, "n_layer": 16},
    "qwen3next": {"n_vocab": 151936, "n_embd": 2048, "n_head": 16, "n_ff": 5120, "n_layer": 8},
    "gemma3": {"n_vocab": 262144, "n_embd": 640, "n_head": 4, "n_ff": 2048, "n_layer": 18},
}


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        print(json.dumps(measured(**json.loads(sys.argv[2]))))
        return
    parser = arguments(__doc__, "decode-operators")
    parser.add_argument("--models", type=words, default=MODELS)
    parser.add_argument("--depths", type=numbers, default=[0, 4096])
    parser.add_argument("--engines", type=words, default=["plain", "plan"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    record(lines(options), options.out, each={"machine": describe()})


def lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            note(f"{name}: making the model")
            model = made(name, Path(folder))
            for depth in options.depths:
                for engine in options.engines:
                    note(f"{name} behind {depth}: {engine}")
                    work = {"model": str(model), "engine": engine, "depth": depth}
                    work |= {key: getattr(options, key) for key in ("threads", "rounds", "tokens")}
                    done = subprocess.run([sys.executable, __file__, "--one", json.dumps(work)], capture_output=True)
                    if done.returncode:
                        note(f"{name}: {done.stderr.decode().strip().splitlines()[-1:]}")
                        continue
                    yield {"model": name, **json.loads(done.stdout.splitlines()[-1])}


def made(name: str, folder: Path) -> Path:
    path = folder / f"{name.replace(':', '-')}.gguf"
    if name.startswith("arch:"):
        return by_upstream(name.removeprefix("arch:"), path)
    shape, file_type, n_layer, *n_vocab = name.split(":")
    overrides = {"n_layer": int(n_layer), "n_vocab": int(n_vocab[0]) if n_vocab else 32000}
    make_model(path, shape=shape, file_type=file_type, overrides=overrides)
    return path


def by_upstream(arch: str, path: Path) -> Path:
    """A model by upstream's program, compiled with other sizes, and quantised."""
    text = (TREE / "tests" / "test-llama-archs.cpp").read_text()
    for key, value in SIZES[arch].items():
        text, n = re.subn(rf"(uint32_t {key} +)= \d+;", rf"\1= {value};", text, count=1)
        assert n == 1, key
    text = text.replace("const uint32_t n_ctx = 256;", "const uint32_t n_ctx = 8192;").replace('"../src/', '"')
    source, program = path.with_suffix(".cpp"), path.with_suffix(".program")
    source.write_text(text)
    includes = [f"-I{TREE / name}" for name in ("include", "ggml/include", "src", "common", "vendor")]
    lib = runtime.lib_dir()
    libraries = [f"-L{lib}", "-lllama-common", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{lib}"]
    subprocess.run(["c++", "-std=c++17", "-O1", *includes, source, *libraries, "-o", program], check=True)
    command = [program, "-a", f"^{arch}$", "-o", path.parent, "-s", "1", "-d", "0.02"]
    subprocess.run(command, check=True, capture_output=True)
    (whole,) = path.parent.glob("*.gguf")
    command = [runtime.program("llama-quantize"), whole, path, "Q8_0"]
    subprocess.run(command, check=True, capture_output=True)
    whole.unlink()
    return path


def measured(model: str, engine: str, depth: int, threads: int, rounds: int, tokens: int) -> dict[str, Any]:
    needed = depth + 2 * tokens * rounds + 16
    n_ctx = -(-needed // 256) * 256
    llm = loaded(Path(model), engine, depth, n_ctx, threads)
    rate = read_rate(threads)
    drawn = np.random.default_rng(1).integers(0, llm.n_vocab(), needed).tolist()
    llm.eval(drawn[: depth + 8])
    ids = iter(drawn[depth + 8 :])
    passes: dict[str, list[float]] = defaultdict(list)
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(rounds):
        untimed = [clocked(lambda: decode(llm, next(ids))) for _ in range(tokens)]
        timed, records = timed_passes(llm, ids, tokens)
        passes["token_s"].append(median(untimed))
        passes["timed_s"].append(median(timed))
        passes["operators_s"].append(median(sum(each[4] for each in one) for one in records))
        for kind, found in by_kind(records).items():
            kinds[kind].append(found)
    found = {name: median(each) for name, each in passes.items()}
    return {
        "engine": engine,
        "depth": depth,
        "threads": threads,
        "n_vocab": llm.n_vocab(),
        "read_gb_s": round(rate, 2),
        **{name: round(each, 7) for name, each in found.items()},
        **outside(llm, tokens),
        "kinds": dict(sorted(shares(kinds, found["operators_s"], rate).items(), key=lambda item: -item[1]["share"])),
    }


def loaded(model: Path, engine: str, depth: int, n_ctx: int, threads: int) -> Llama:
    if engine == "plain":
        return Llama(
            str(model), n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
        )
    settings = Settings(n_ctx=n_ctx, n_threads=threads)
    graph = autoplan.read_graph(model, settings)
    choices = Choices(device=HOST, workload=Workload(128, 32, depth))
    plan = autoplan.plan_graph(model, graph, None, settings, choices)
    return Llama(str(model), plan=plan, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, verbose=False)


def decode(llm: Llama, token: int) -> None:
    llama_cpp = runtime.llama_cpp()
    if llama_cpp.llama_decode(llm.ctx, llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(token), 1)):
        raise RuntimeError("llama_decode fails")
    llm.n_tokens += 1


def clocked(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def timed_passes(llm: Llama, ids: Iterator[int], tokens: int) -> tuple[list[float], list[list[Any]]]:
    core = native.core()
    seconds, records = [], []
    core.op_timer_take()
    core.op_timer_enable(True)
    for _ in range(tokens):
        seconds.append(clocked(lambda: decode(llm, next(ids))))
        records.append(core.op_timer_take())
    core.op_timer_enable(False)
    return seconds, records


def by_kind(records: list[list[Any]]) -> dict[str, dict[str, Any]]:
    """Of the median pass by each kind's seconds: its number of operators, seconds and bytes."""
    sums: list[dict[str, list[float]]] = []
    for one in records:
        of_pass: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0])
        for _, _, op, operand, seconds, nbytes in one:
            entry = of_pass[kind_of(op, operand)]
            entry[0] += 1
            entry[1] += seconds
            entry[2] += nbytes
        sums.append(of_pass)
    found = {}
    for kind in sums[-1]:
        each = [of_pass[kind] for of_pass in sums]
        found[kind] = {"n": each[-1][0], "s": median(s for _, s, _ in each), "bytes": median(b for *_, b in each)}
    return found


def kind_of(op: str, operand: str) -> str:
    match = re.fullmatch(r"(?:blk\.\d+\.)?(.+)\.weight", operand)
    return f"{op} {match[1]}" if match and op.startswith("MUL_MAT") else op


def shares(kinds: dict[str, list[dict[str, Any]]], total: float, rate: float) -> dict[str, dict[str, Any]]:
    found = {}
    for kind, rounds in kinds.items():
        seconds, nbytes = median(each["s"] for each in rounds), rounds[-1]["bytes"]
        found[kind] = {
            "n": rounds[-1]["n"],
            "us": round(1e6 * seconds, 2),
            "share": round(seconds / total, 4),
            "bytes": int(nbytes),
            "gb_s": round(nbytes / seconds / 1e9, 2),
            "of_read_rate": round(nbytes / seconds / 1e9 / rate, 3),
        }
    return found


def outside(llm: Llama, n: int) -> dict[str, float]:
    """Seconds of a token that llama_decode does not take."""
    sampled = median(clocked(llm.sample) for _ in range(n))
    greedy = median(clocked(lambda: llm.sample(temp=0.0)) for _ in range(n))
    whole, inner = [], []
    for _ in range(n):
        whole.append(clocked(lambda: llm.eval([1])))
        inner.append(clocked(lambda: decode(llm, 1)))
    python = max(median(whole) - median(inner), 0.0)
    return {"sample_s": round(sampled, 7), "greedy_s": round(greedy, 7), "python_s": round(python, 7)}


if __name__ == "__main__":
    main()
