"""What one attention operator reads and computes, counted by valgrind: instructions, and bytes from beyond a cache.

python bench/attention_counts.py [--heads 40/8/128] [--types f16,q8_0] [--tokens 1,4,32] [--depths 16384]
    [--cache-bytes 2097152] [--out FILE.jsonl]
python bench/attention_counts.py --tables FILE.jsonl        # prints what was recorded

Builds bench/native for AVX2, because valgrind does not know AVX-512, and runs one operator by one thread under
cachegrind: once made ready, once computed, too. The difference is the operator's. The last level that is simulated has
--cache-bytes in 16 ways: the L2 of one core of the Xeon by default. Counts do not depend on what else the machine does.
One JSON line per cell and form; oallama.bench.cachegrind says what is in it. Needs valgrind.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from oallama.bench import cachegrind
from oallama.bench.attention_cells import FORMS, Cell
from oallama.bench.machine import REPOSITORY, describe
from oallama.bench.script import arguments, note, numbers, read, record, words
from oallama.errors import OallamaError

BUILD = REPOSITORY / "build" / "counts"
FIRST_LEVEL = "49152,12,64"  # of the Xeon's data


def main() -> None:
    parser = arguments(__doc__, "attention-counts")
    parser.add_argument("--heads", default="40/8/128")
    parser.add_argument("--types", type=words, default=["f16", "q8_0"])
    parser.add_argument("--tokens", type=numbers, default=[1, 4, 32])
    parser.add_argument("--depths", type=numbers, default=[16384])
    parser.add_argument("--cache-bytes", type=int, default=2 << 20)
    parser.add_argument("--tables", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.tables:
        print("\n".join(cachegrind.table(read(options.tables))))
        return
    machine = describe()
    program = built()
    last_level = f"{options.cache_bytes},16,64"
    cells = [Cell.of(options.heads, *each) for each in product(options.types, options.tokens, options.depths)]
    # ggml transposes no quantised V for its unfused form.
    lines = (
        counted(program, cell, form, last_level)
        for cell in cells
        for form in FORMS
        if form != "unfused" or cell.cache == "f16"
    )
    record(lines, options.out, each={"valgrind": version(), "machine": machine})


def built() -> Path:
    """Raises OallamaError without valgrind."""
    if not shutil.which("valgrind"):
        raise OallamaError("valgrind is not here (apt-get install valgrind)")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(*command: object) -> None:
        subprocess.run(list(map(str, command)), cwd=REPOSITORY, env=environment, check=True, stdout=sys.stderr)

    run(sys.executable, "third_party/llama.cpp/upstream.py", "prepare")
    launchers = [f"-DCMAKE_{of}_COMPILER_LAUNCHER=ccache" for of in ("C", "CXX") if shutil.which("ccache")]
    run("cmake", "-S", "bench/native", "-B", BUILD, "-G", "Ninja", *launchers)
    run("cmake", "--build", BUILD, "--target", "attention_operator")
    return BUILD / "attention_operator"


def version() -> str:
    return subprocess.run(["valgrind", "--version"], check=True, capture_output=True, text=True).stdout.strip()


def counted(program: Path, cell: Cell, form: str, last_level: str) -> dict[str, Any]:
    note(f"{cell.cache} {form}, {cell.n_tokens} tokens behind {cell.depth}")
    _, without = totals(program, 0, cell, form, last_level)
    kernel, computed = totals(program, 1, cell, form, last_level)
    return {
        "heads": f"{cell.n_head}/{cell.n_head_kv}/{cell.width}",
        "cache": cell.cache,
        "n_tokens": cell.n_tokens,
        "depth": cell.depth,
        "form": form,
        "kernel": kernel,
        "first_level": FIRST_LEVEL,
        "last_level": last_level,
        **cachegrind.of_operator(cell, without, computed),
    }


def totals(program: Path, times: int, cell: Cell, form: str, last_level: str) -> tuple[str, dict[str, int]]:
    """(the kernel's name, the counts of the whole program) with the operator computed that many times."""
    shape = (cell.cache, cell.n_head, cell.n_head_kv, cell.width, cell.n_tokens, cell.depth)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        tool = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", f"--cachegrind-out-file={out}"]
        tool += [f"--D1={FIRST_LEVEL}", f"--LL={last_level}"]
        done = subprocess.run([*tool, program, *map(str, (times, form, *shape))], capture_output=True, text=True)
        if done.returncode:
            raise OallamaError(f"{program.name} failed: {re.sub(r'(?m)^==.*$', '', done.stderr).strip()}")
        return done.stdout.strip(), cachegrind.totals(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
