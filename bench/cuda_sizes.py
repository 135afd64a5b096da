"""What each GPU architecture adds to the package of CUDA: bytes and seconds of a sample of ggml-cuda's sources.

python bench/cuda_sizes.py [--archs 75-real,90-virtual] [--every 8] [--jobs 2] [--out FILE.jsonl]

A package of all architectures takes hours on two cores. So every eighth source, in the order of their names, is
compiled for each architecture as scripts/release.sh would. Sources of one kind are neighbours by name, so each kind
has its part in the sample. One JSON line per architecture: bytes of GPU code as it lies in the library, compressed;
core_s, what its compilations took, two beside each other; and both as shares of the first architecture's.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from oallama.bench.machine import REPOSITORY, describe
from oallama.bench.script import arguments, note, record, words
from oallama.errors import OallamaError

FOLDER = REPOSITORY / "build" / "cuda-sizes"
PACKAGE = REPOSITORY / "packages" / "cuda13" / "pyproject.toml"
ARCHS = "90-real,90-virtual,75-real,75-virtual,80-real,80-virtual,86-real,89-real,100-real,120a-real"
_TARGET = re.compile(r"--generate-code=arch=compute_90,code=\[sm_90\]")


def commands() -> list[dict[str, str]]:
    """CMake's commands for the package's sources in CUDA, for 9.0, by the names of the sources."""
    options = {
        "CMAKE_CUDA_ARCHITECTURES": "90-real",
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "CMAKE_MAKE_PROGRAM": f"{sysconfig.get_path('scripts')}/ninja",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": _output([sys.executable, "-m", "pybind11", "--cmakedir"]).strip(),
        **dict(re.findall(r'^(\w+) = "(ON|OFF|ALL)"$', PACKAGE.read_text(), re.MULTILINE)),
    }
    defines = [f"-D{name}={value}" for name, value in options.items()]
    _output(["cmake", "-G", "Ninja", "-S", str(REPOSITORY), "-B", str(FOLDER), *defines])
    found = json.loads((FOLDER / "compile_commands.json").read_text())
    return sorted((c for c in found if c["file"].endswith(".cu")), key=lambda c: Path(c["file"]).name)


def _output(command: list[str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    if done.returncode:
        raise OallamaError(f"{command[0]} fails: {done.stderr.strip()[-500:]}")
    return done.stdout


def compiled(command: dict[str, str], arch: str) -> tuple[int, float]:
    """Bytes of GPU code of one source, and the seconds it took."""
    number, kind = arch.split("-")
    code = f"compute_{number}" if kind == "virtual" else f"sm_{number}"
    target = f"--generate-code=arch=compute_{number},code=[{code}]"
    asked, n = _TARGET.subn(target, command["command"])
    if n != 1:
        raise OallamaError(f"no architecture in CMake's command for {command['file']}")
    parts = shlex.split(asked)
    result = FOLDER / f"{Path(command['file']).stem}-{arch}.o"
    parts[parts.index("-o") + 1] = str(result)
    since = time.monotonic()
    _output(parts, cwd=Path(command["directory"]))
    seconds = time.monotonic() - since
    section = re.search(r"^\.nv_fatbin\s+(\d+)", _output(["size", "-A", str(result)]), re.MULTILINE)
    result.unlink()
    return int(section[1]) if section else 0, seconds


def lines(archs: list[str], every: int, jobs: int) -> Iterator[dict[str, Any]]:
    sources = commands()
    sample = sources[every // 2 :: every]
    first: dict[str, Any] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for arch in archs:
            note(f"{arch}: {len(sample)} sources")
            each = list(pool.map(partial(compiled, arch=arch), sample))
            line = {"arch": arch, "code_bytes": sum(n for n, _ in each), "core_s": sum(s for _, s in each)}
            first = first or line
            yield {
                "what": "architecture",
                **line,
                "share_of_bytes": line["code_bytes"] / first["code_bytes"],
                "share_of_seconds": line["core_s"] / first["core_s"],
                "of": first["arch"],
                "sources": len(sources),
                "sample": {Path(c["file"]).name: n for c, (n, _) in zip(sample, each, strict=True)},
            }


def main() -> None:
    parser = arguments(__doc__, "cuda-sizes")
    parser.add_argument("--archs", type=words, default=words(ARCHS))
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    record(lines(args.archs, args.every, args.jobs), args.out, each={"machine": describe()})


if __name__ == "__main__":
    main()
