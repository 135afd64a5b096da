"""Runs weave_tsan as it is, then once for each access that is made weaker: one has no race, the others have.

python tests/support/weave_tsan.py PROGRAM ROUNDS [FILE.jsonl]; scripts/tsan_weave.sh builds the program before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTROLS = [(word, side) for word in ("tail", "done", "taken", "claim", "left") for side in ("release", "acquire")]
RACE = "WARNING: ThreadSanitizer: data race"


def run(program: Path, n_rounds: int, *weaker: str) -> dict[str, Any]:
    """What the program did and how many races there were; the run ends at the first.

    Raises:
        RuntimeError: it ended otherwise.
    """
    fixed = ["setarch", "--addr-no-randomize"]  # ThreadSanitizer wants addresses that many random bits do not leave
    fixed = fixed if subprocess.run([*fixed, "true"], capture_output=True).returncode == 0 else []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*fixed, program, f"{folder}/channel", str(n_rounds), *weaker],
            capture_output=True,
            text=True,
            timeout=900,
            env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
        )
    n_races = done.stderr.count(RACE)
    if done.returncode != (66 if n_races else 0):
        raise RuntimeError(f"weave_tsan ended with {done.returncode}: {done.stderr}")
    found = {"weaker": " ".join(weaker) or None, "races": n_races, "seconds": round(time.monotonic() - begin, 1)}
    if n_races:
        summary = next(text for text in done.stderr.splitlines() if text.startswith("SUMMARY"))
        return {**found, "in": summary.rpartition(" in ")[2]}
    return {**found, **json.loads(done.stdout)}


def main() -> None:
    from oallama.bench.machine import describe, save_lines

    program, n_rounds = Path(sys.argv[1]), int(sys.argv[2])
    lines: list[dict[str, Any]] = [describe(["scripts/tsan_weave.sh", *sys.argv[2:]])]
    for weaker in ((), *CONTROLS):
        lines.append(run(program, n_rounds if not weaker else 20, *weaker))
        print(json.dumps(lines[-1]), flush=True)
    if len(sys.argv) > 3:
        save_lines(lines, Path(sys.argv[3]))
    sys.exit(any((found["races"] > 0) != (found["weaker"] is not None) for found in lines[1:]))


if __name__ == "__main__":
    main()
