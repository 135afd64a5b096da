"""What looking for guests costs a cold model: TPOT and TTFT without a receiver and with looks at several distances.

python bench/gpu/polls.py --model FILE.gguf [--distances 1,2,4,8,16,32,8-plain] [--out FILE.jsonl]

On a GPU the distance is in products with weights and attentions, "" leaves it to the engine; with "-plain" a look in
vain launches blocks that leave at once, in place of a conditional node. With --device RPC the receiver is the CPU's,
and the distances are its own (graphs, operators, parts). One JSON line per distance and round, loaded anew.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import Log, arguments
from loads import one_load

from oallama.bench import Engine, LoadParams
from oallama.bench.script import words
from oallama.data.plan import HOST
from oallama.engine import runtime

QUOTA = 64 << 20
ON_HOST = "graphs,operators,parts"
ON_GPU = ",1,2,4,8,16,32,1-plain,8-plain"


def load(options: Any, distance: str | None) -> dict[str, Any]:
    on_gpu = options.device != "RPC"
    params = LoadParams(
        n_gpu_layers=-1 if on_gpu else 0, flash_attn="on", n_threads=options.threads,
        devices=(options.device,) if on_gpu else (),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        products, _, form = (distance or "").partition("-")
        apart = f"{products}:{products}:16" if on_gpu and products else products
        given = ":".join(filter(None, (os.path.join(folder, "channel"), str(QUOTA), apart)))
        name = "OALLAMA_WEAVE_CUDA_RECEIVER" if on_gpu else "OALLAMA_WEAVE_RECEIVER"
        variables = {} if distance is None else {name: given}
        if form:
            variables["OALLAMA_WEAVE_CUDA_WORK"] = form
        engine = Engine(distance or "none", runtime.lib_dir(), params, env=variables)
        return {"distance": distance, **one_load(engine, options.model, (options.n_prompt,), options.n_generate)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--distances", type=words)
    parser.add_argument("--n-prompt", type=int, default=128)
    parser.add_argument("--n-generate", type=int, default=128)
    options = parser.parse_args()
    distances = options.distances or (ON_HOST if options.device == "RPC" else ON_GPU).split(",")
    with Log(options.out) as log:
        jobs = {"none": partial(load, options, None)}
        jobs |= {distance or "default": partial(load, options, distance) for distance in distances}
        side = HOST if options.device == "RPC" else options.device
        log.rounds("polls", jobs, options.repeats, model=Path(options.model).stem, side=side)


if __name__ == "__main__":
    main()
