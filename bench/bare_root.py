"""From a wheel to the first token on a machine without compiler.

python bench/bare_root.py [--out FILE.jsonl] [--rounds 5]

Each round installs the wheel in dist/ into a new environment of a bare Debian 12 (scripts/release.sh try, as root) and
uses it. One JSON line: the seconds of every step in every round, bytes that are installed, bytes of the wheel.
"""

from __future__ import annotations

import json
import subprocess
import sys
from statistics import median
from typing import Any

from oallama.bench.machine import REPOSITORY, describe
from oallama.bench.script import arguments, note, record


def main() -> None:
    parser = arguments(__doc__, "bare-root")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rounds = [_round(i) for i in range(options.rounds)]
    (wheel,) = (REPOSITORY / "dist").glob("oallama-*.whl")
    steps = rounds[0]["seconds"]
    line = {
        "wheel": wheel.name,
        "wheel_bytes": wheel.stat().st_size,
        "installed_bytes": rounds[0]["installed_bytes"],
        "build_tools": rounds[0]["build_tools"],
        "median_s": {step: median(one["seconds"][step] for one in rounds) for step in steps},
        "seconds": {step: [one["seconds"][step] for one in rounds] for step in steps},
    }
    record([line], options.out, each={"machine": describe()})


def _round(number: int) -> dict[str, Any]:
    note(f"round {number + 1}")
    done = subprocess.run([REPOSITORY / "scripts/release.sh", "try"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"bare_root: error: the trial failed:\n{done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
