"""compute-sanitizer over llama-bench with a ready-made map: uploads, streams, divided weights and host operators run.

python bench/gpu/memcheck.py --model TINY.gguf [--tools memcheck,racecheck,synccheck] [--out FILE.jsonl]

One JSON line per tool. With --device RPC the same command runs without the sanitizer.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from common import Log, arguments
from maps import mixed

from oallama.bench.script import words
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.errors import OallamaError
from oallama.loading import autoplan

SANITIZER = ("compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9", "--tool")


def run(options: Any, tool: str, graph: Any) -> dict[str, Any]:
    command = [str(runtime.program("llama-bench")), "-m", str(options.model), "-ngl", "99", "-fa", "on"]
    command += ["-t", str(options.threads), "-p", "64", "-n", "8", "-r", "1", "--no-warmup", "-o", "jsonl"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        device = "RPC0" if options.device == "RPC" else options.device
        if options.device == "RPC":
            command += ["--rpc", stack.enter_context(LocalRpcServer(register=False)).endpoint, "-dev", device]
        else:
            command = [*SANITIZER, tool, *command]
        table = Path(folder, "mixed.map")
        table.write_text(mixed(graph, device))
        start = time.monotonic()
        done = subprocess.run(
            ["env", f"OALLAMA_BACKEND_MAP={table}", *command], capture_output=True, text=True, timeout=300
        )
    said = (done.stdout + done.stderr).splitlines()
    if done.returncode != 0:
        raise OallamaError(f"{tool} ended with {done.returncode}: " + " | ".join(said[-20:]))
    return {
        "rc": done.returncode,
        "seconds": time.monotonic() - start,
        "summary": [x for x in said if " SUMMARY: " in x],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tools", type=words, default=["memcheck", "synccheck", "racecheck"])
    options = parser.parse_args()
    with Log(options.out) as log:
        graph = autoplan.read_graph(options.model, Settings(n_ctx=256))
        jobs = {tool: partial(run, options, tool, graph) for tool in options.tools}
        log.rounds("memcheck", jobs, 1, model=options.model.stem)


if __name__ == "__main__":
    main()
