"""Makes the contexts in which MTP heads guess, and ends: well, or as llama.cpp lets it.

`python -m oallama.engine.heads_trial MODEL STATES`: STATES earlier recurrent states are kept. What llama.cpp cannot run
may end the process by an assertion, so `mtp_heads.py` lets this one try first.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from oallama.engine import runtime, skeleton
from oallama.engine.load_settings import Settings


def main(path: str, n_states: int) -> None:
    runtime.quiet()
    settings = Settings(n_ctx=256)
    skeleton.read_graphs(path, replace(settings, heads="fed", n_rs_seq=n_states), [1])
    skeleton.read_graphs(path, replace(settings, heads="run"), [1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
