"""Seconds that README's commands take in a fresh clone whose compiler cache is empty.

python bench/fresh_clone.py [--out FILE.jsonl] [--folder DIR] [TARGET..]

Clones this repository's last commit and runs `make TARGET` for each: by default demo, demo again, check and test. Their
output goes to DIR/TARGET-N.log. One JSON line for each: seconds and exit status. Other tests and programs that run
beside it make it slower. pip's downloads are cached, as on a machine that has them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from oallama.bench.machine import REPOSITORY, describe
from oallama.bench.script import arguments, note, record

TARGETS = ("demo", "demo", "check", "test")


def main() -> None:
    parser = arguments(__doc__, "fresh-clone")
    parser.add_argument("targets", nargs="*", default=TARGETS, metavar="TARGET")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "build/fresh-clone", help="is made anew")
    options = parser.parse_args()
    machine = describe()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    clone = options.folder / "oallama"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
    # Nothing of this checkout's: neither its environment nor what it compiled.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OALLAMA_", "VIRTUAL_ENV"))
    }
    environment["CCACHE_DIR"] = str(options.folder / "ccache")
    lines = []
    for number, target in enumerate(options.targets):
        note(f"make {target}")
        again = ", again" if target in options.targets[:number] else ""
        with open(options.folder / f"{target}-{number}.log", "w") as log:
            start = time.monotonic()
            status = subprocess.run(["make", target], cwd=clone, env=environment, stdout=log, stderr=log).returncode
        lines.append({"what": f"make {target}{again}", "seconds": time.monotonic() - start, "status": status})
    record(lines, options.out, each={"machine": machine})


if __name__ == "__main__":
    main()
