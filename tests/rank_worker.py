"""One rank of a tensor-parallel group for tests: rank 0 does the jobs of logits_worker.py, the others follow.

The jobs are in a file: mpirun hands on a terminal or a pipe as standard input, not a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from oallama import engine, runtime

RANKS = runtime.lib_dir() / "liboallama-ranks.so"


def main() -> None:
    core = engine.core()
    if not core.load_backend(str(RANKS)):
        raise SystemExit("this process cannot be a rank")
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) > 0:
        raise SystemExit(core.follow() or 0)
    import logits_worker

    logits_worker.main(Path(sys.argv[1]).read_text().splitlines())


if __name__ == "__main__":
    main()
