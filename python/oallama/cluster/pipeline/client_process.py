"""The client's process of `oallama cluster run --plan`, started by pipeline.py.

The first line of standard input is the job. Events are lines of JSON on standard output: "loaded", then every "token",
at last "done"; or an "error", or "lost" when a server is. A second line, {"save": PATH}, is obeyed between two tokens:
the KV cache is written and the process ends.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

from oallama.cluster.pipeline.client import ClientJob, Generation, ServerLost
from oallama.engine.rpc import share_processor
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError


def main() -> None:
    share_processor()
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    quiet()

    def say(**content: Any) -> None:
        events.write(json.dumps(content) + "\n")

    job = ClientJob.loads(sys.stdin.readline())
    started = time.perf_counter()
    try:
        generation = Generation(job)
        if job.dry:
            say(loaded=0.0, tokens=[], memory=generation.memory)
            return
        say(loaded=time.perf_counter() - started, tokens=generation.tokens, memory=generation.memory)
        started = time.perf_counter()
        for token, piece in generation:
            say(token=token, piece=piece.hex(), at=time.perf_counter() - started)
            if path := _asked_to_save():
                say(saved=path if generation.save(path) else None)
                return
        say(done=True)
    except ServerLost as error:
        say(lost=" ".join(str(error).split()))
    except (OallamaError, RuntimeError, ValueError) as error:
        say(error=" ".join(str(error).split()))
        raise SystemExit(1) from None


def _asked_to_save() -> str | None:
    if not select.select([sys.stdin], [], [], 0)[0]:
        return None
    line = sys.stdin.readline()
    return str(json.loads(line)["save"]) if line else None


if __name__ == "__main__":
    main()
