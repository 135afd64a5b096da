"""Seconds that README's commands take in a fresh clone whose compiler cache is empty.

python bench/fresh_clone.py [--out FILE.jsonl] [--folder DIR] [TARGET..]

Clones this repository's last commit and runs `make TARGET` for each: by default demo, demo again, check and test. Their
output goes to DIR/TARGET-N.log. One JSON line for each: seconds, exit status, and for the demo `answered_s`, when the
first 32 tokens were there. Other tests and programs that run beside it make it slower. pip's downloads are cached, as
on a machine that has them.
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
        ran = measured(["make", target], clone, environment, options.folder / f"{target}-{number}.log")
        lines.append({"what": f"make {target}{again}", **ran})
    record(lines, options.out, each={"machine": machine})


def measured(command: list[str], folder: Path, environment: dict[str, str], log: Path) -> dict[str, float]:
    """Run a command to its end, its output to `log`."""
    found: dict[str, float] = {}
    start = time.monotonic()
    with (
        open(log, "w") as file,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            if "prompt tokens, 32 generated" in line:
                found["answered_s"] = time.monotonic() - start
    return {"seconds": time.monotonic() - start, "status": process.returncode, **found}


if __name__ == "__main__":
    main()
