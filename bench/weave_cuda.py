"""The channel's kernels on a GPU: what a look for a task costs, and the receiver's attention against ggml's own.

PYTHONPATH=tests python bench/weave_cuda.py [-o FILE.jsonl] [--repeats 5]

One process on one GPU, both sides in it. One JSON line per measurement:
  look       seconds of a captured or launched graph of 100 kernels of 20 us with and without a look after each; the
             work behind a look is a conditional node, or a launch whose blocks leave at once (plain)
  attention  seconds of the receiver's launch for one row of every sequence; bytes of K and V per second; beside it
             ggml-cuda's flash attention of one row on as many tokens in all, where oallama was built with CUDA
  layer      seconds of a layer for the sender: rows there, results back, by the receiver's idle looks

--build compiles csrc/weave/cuda and tests/native, for this program and for tests/weave/test_weave_cuda.py.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from support.weave_cuda import AttendTask, OpenTask, Rows, build, load

SHAPES = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (16, 8, 256))  # heads, heads of K and V, width
CONTEXTS = ((1, 4096), (1, 32768), (8, 4096), (64, 4096))  # sequences, tokens of each


def checked(lib: Any, result: Any) -> Any:
    """What a function gave; ends the program if it failed."""
    if result is None or result < 0:
        sys.exit(f"weave_cuda: {lib.wc_error().decode()}")
    return result


class Pair:
    """A receiver and a sender in this process, for sequences of one shape."""

    def __init__(self, lib: Any, shape: OpenTask, quota_nbytes: int, plain: bool = False) -> None:
        self.lib = lib
        self.path = os.path.join(tempfile.gettempdir(), f"oallama-weave-bench-{os.getpid()}").encode()
        quota, slot = ctypes.c_uint64(quota_nbytes), 32 << 20
        self.receiver = ctypes.c_void_p(checked(lib, lib.wc_receiver_new(self.path, quota, slot, 2, 1, int(plain))))
        made = lib.wc_sender_new(self.path, ctypes.byref(shape), ctypes.c_double(2.0), 0xFFFFFFF0)
        self.sender = ctypes.c_void_p(checked(lib, made))
        self.shape = shape

    def rows(self, n_sequences: int, n_tokens: int) -> Any:
        """The last token of new sequences of so many."""
        given = (Rows * n_sequences)()
        for row in given:
            assert self.lib.wc_sender_open(self.sender, ctypes.byref(self.shape), ctypes.byref(row.handle)) == 0
            assert self.lib.wc_sender_reserve(self.sender, row.handle, n_tokens) == 0, "no room"
            row.position, row.n_rows = n_tokens - 1, 1
        return given

    def close(self) -> None:
        self.lib.wc_sender_delete(self.sender)
        self.lib.wc_receiver_delete(self.receiver)


def looks(lib: Any, repeats: int) -> Iterator[dict[str, Any]]:
    n_graphs, n_nodes, node_ns = 20, 100, ctypes.c_uint64(20_000)
    for captured, plain in ((1, False), (1, True), (0, True)):
        pair = Pair(lib, OpenTask(1, 128, 1, 1, 1024, 1024), 64 << 20, plain)
        times: dict[int, list[float]] = {0: [], 1: []}
        for _, wanted in product(range(repeats), (0, 1)):
            seconds = lib.wc_cold_graphs(pair.receiver, n_graphs, n_nodes, node_ns, wanted, captured)
            times[wanted].append(checked(lib, seconds) / n_graphs)
        pair.close()
        without, with_looks = (statistics.median(times[i]) for i in (0, 1))
        cost = (with_looks - without) / n_nodes * 1e6
        form = "plain" if plain else "conditional, where graphs have that"
        print(f"look, {'captured' if captured else 'launched'}, {form}: {cost:.2f} us each")
        yield {
            "what": "look", "captured": bool(captured), "plain": plain, "nodes": n_nodes, "without_s": times[0],
            "with_s": times[1],
        }  # fmt: skip


def ggml_attention(n_head: int, n_head_kv: int, width: int, depth: int) -> float | None:
    with suppress(ImportError, RuntimeError):
        from oallama.engine import device_list, native

        if any(d.backend == "CUDA" for d in device_list.devices()):
            bench = native.core().OpBench("CUDA0", 1, False, 256 << 20)
            shape = {"head_dim_k": width, "head_dim_v": width, "n_head": n_head, "n_head_kv": n_head_kv}
            found = bench.attention("f16", "f16", **shape, n_tokens=1, depth=depth, flash=True, max_s=1.0)
            return float(found["median_s"])
    return None


def attention(lib: Any, repeats: int) -> Iterator[dict[str, Any]]:
    print("heads kv width sequences tokens   receiver us   GB/s   ggml us   ggml/receiver")
    for (n_head, n_head_kv, width), (n_sequences, n_tokens) in product(SHAPES, CONTEXTS):
        kv_nbytes = n_sequences * n_tokens * n_head_kv * width * 2 * 2
        pair = Pair(lib, OpenTask(1, n_tokens, 1, 1, n_head_kv * width, n_head_kv * width), kv_nbytes + (64 << 20))
        rows = pair.rows(n_sequences, n_tokens)
        task = AttendTask(0, n_sequences, n_sequences, n_head, n_head_kv, width, width, width**-0.5, 0, 0, 0, 0, 1)
        times = [
            checked(lib, lib.wc_task_seconds(pair.receiver, pair.sender, ctypes.byref(task), rows, 20))
            for _ in range(repeats)
        ]
        seconds = statistics.median(times)
        theirs = ggml_attention(n_head, n_head_kv, width, n_sequences * n_tokens)
        ratio = f"{theirs * 1e6:9.1f} {theirs / seconds:8.2f}" if theirs else ""
        sizes = f"{n_head:5} {n_head_kv:2} {width:5} {n_sequences:9} {n_tokens:6}"
        print(f"{sizes} {seconds * 1e6:12.1f} {kv_nbytes / seconds / 1e9:7.0f} {ratio}")
        yield {
            "what": "attention", "n_head": n_head, "n_head_kv": n_head_kv, "width": width, "sequences": n_sequences,
            "tokens": n_tokens, "kv_nbytes": kv_nbytes, "receiver_s": times, "ggml_s": theirs,
        }  # fmt: skip
        pair.close()


def layers(lib: Any, repeats: int) -> Iterator[dict[str, Any]]:
    pair = Pair(lib, OpenTask(8, 4096, 1, 1, 1024, 1024), 2 << 30)
    way = lib.wc_sender_way(pair.sender).decode()
    for n_sequences in (1, 8, 32):
        rows = pair.rows(n_sequences, 1024)
        task = AttendTask(0, n_sequences, n_sequences, 32, 8, 128, 128, 0.09, 0, 0, 0, 0, 1)
        q, kv, out = (np.zeros((n_sequences, heads, 128), np.float32) for heads in (32, 8, 32))
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (q, kv, kv, out)]
        given = (pair.sender, ctypes.byref(task), rows, None, *pointers, 8)
        times = {c: [checked(lib, lib.wc_sender_attend(*given, c)) / 8 for _ in range(repeats)] for c in (0, 1)}
        text = ", ".join(
            f"{statistics.median(times[c]) * 1e6:.1f} us {w}" for c, w in ((1, "captured"), (0, "launched"))
        )
        print(f"layer of {n_sequences} guests of 1024 tokens through {way}: {text}")
        yield {"what": "layer", "sequences": n_sequences, "way": way, "captured_s": times[1], "launched_s": times[0]}
    pair.close()


def main() -> None:
    parser = arguments(__doc__, "weave-cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--library", type=Path, help="built before by --build")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile into this folder, and end")
    parser.add_argument("--arch", default="native", help="to compile for, as sm_90 (default: the GPU's)")
    options = parser.parse_args()
    if options.build:
        options.build.mkdir(parents=True, exist_ok=True)
        print(build(options.build, arch=options.arch))
        return
    with tempfile.TemporaryDirectory() as folder:
        lib = load(options.library or build(Path(folder)))
        lines = (line for part in (looks, attention, layers) for line in part(lib, options.repeats))
        record(lines, options.out, each={"machine": describe()}, quiet=True)


if __name__ == "__main__":
    main()
