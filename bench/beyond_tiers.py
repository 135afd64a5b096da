"""Times of micro-batches above the largest that profiles measure (512 tokens), against ways to extrapolate them.

python bench/beyond_tiers.py [--out FILE.jsonl] [--device CPU] [--threads 2] [--repeats 3]

"log-log": the last segment goes on, as between tiers. "share": in proportion to the tokens (`data/curves.py`; plans are
made with it, and how far it is off is their doubt, `planning/uncertainty.py`). Attention is "pieces" of 512 tokens
(`planning/cost.py`, fused) or "log-log" (unfused). One JSON line per operator and token count, with each way's error.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.data.curves import log_log, per_token
from oallama.engine import device_list, native
from oallama.profiling.profiler import cold_bytes

TIERS, BEYOND = (1, 32, 512), (1024, 2048)
# type, k, m, experts, used
DENSE = (("q4_K", 2048, 5632), ("q8_0", 2048, 2048), ("f16", 1024, 4096))
MATRICES = (*((*weight, 0, 0) for weight in DENSE), ("q4_K", 1024, 768, 32, 4))
HEADS = {"type_k": "f16", "type_v": "f16", "head_dim_k": 128, "head_dim_v": 128, "n_head": 8, "n_head_kv": 2}
PIECE, MAX_S = 512, 1.0


def main() -> None:
    parser = arguments(__doc__, "beyond-tiers")
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    record(measured(options), options.out, each={"machine": describe()})


def measured(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    bench = native.core().OpBench(options.device, options.threads, True, cold_bytes(device_list.device(options.device)))
    common = {"device": options.device, "threads": options.threads}

    def seconds(call: Any, **arguments: Any) -> float:
        # The fastest repeat: what other work adds is no part of the question.
        return min(call(max_s=MAX_S, **arguments)["best_s"] for _ in range(options.repeats))

    for type, k, m, n_expert, n_used in MATRICES:
        weight = {"type": type, "k": k, "m": m, "n_expert": n_expert, "n_used": n_used}
        times = {n: seconds(bench.mul_mat, n_tokens=n, **weight) for n in (*TIERS, *BEYOND)}
        known = [(n, times[n]) for n in TIERS]
        for n in BEYOND:
            ways = {"log-log": log_log(known, n), "share": per_token(known, n)}
            yield {**common, "what": "matrix", **weight, "n_tokens": n, **_errors(times[n], ways)}
    for flash, n in ((flash, n) for flash in (True, False) for n in BEYOND):
        depth = 2 * n
        known = [(t, seconds(bench.attention, n_tokens=t, depth=depth, flash=flash, **HEADS)) for t in (128, 512)]
        took = seconds(bench.attention, n_tokens=n, depth=depth, flash=flash, **HEADS)
        # The fused form of the CPU skips what the mask hides.
        depths = [depth - start if flash else depth for start in range(0, n, PIECE)]
        pieces = sum(seconds(bench.attention, n_tokens=PIECE, depth=d, flash=flash, **HEADS) for d in depths)
        ways = {"log-log": log_log(known, n), "pieces": pieces}
        yield {**common, "what": "attention", "flash": flash, "depth": depth, "n_tokens": n, **_errors(took, ways)}


def _errors(took: float, ways: dict[str, float]) -> dict[str, Any]:
    return {"seconds": took, "error": {name: s / took - 1 for name, s in ways.items()}}


if __name__ == "__main__":
    main()
