#!/usr/bin/env python3
"""Lists what is in a wheel, and fails where something is missing that it must have, or is bound to this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

# Shortest names that show that a part of the build is there.
NEEDED = (
    "oallama/_comm",
    "oallama/_core",
    "oallama/bin/ggml-rpc-server",
    "oallama/bin/llama-server",
    "oallama/bindings/llama_cpp/llama.py",
    "oallama/lib/libggml-cpu-",
    "oallama/lib/libggml-rpc.so",
    "oallama/lib/libggml-vulkan.so",
    "oallama/lib/libllama.so",
    "oallama/licenses/libgomp",
    "oallama/licenses/llama.cpp-LICENSE",
    "oallama/storyteller/storyteller-F16.gguf",
)
SHOWN = 1 << 20  # bytes from which a file has a line of its own


def groups(wheel: zipfile.ZipFile) -> Counter[str]:
    """Compressed bytes by file, or by folder for small files."""
    sizes: Counter[str] = Counter()
    for info in wheel.infolist():
        own = info.filename if info.file_size >= SHOWN else str(Path(info.filename).parent) + "/*"
        sizes[own] += info.compress_size
    return sizes


def absolute_runpaths(wheel: zipfile.ZipFile) -> list[str]:
    """Libraries and programs that look for others in a folder of the machine they were built on."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for info in wheel.infolist():
            with wheel.open(info) as file:
                if file.read(4) != b"\x7fELF":
                    continue
            path = wheel.extract(info, folder)
            said = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
            paths = [line.split("[")[1].rstrip("]") for line in said.splitlines() if "PATH)" in line]
            found += [f"{info.filename}: {path}" for path in ":".join(paths).split(":") if path.startswith("/")]
    return found


def main(path: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        missing = [name for name in NEEDED if not any(entry.startswith(name) for entry in names)]
        bound = absolute_runpaths(wheel)
        for name, nbytes in groups(wheel).most_common(40):
            print(f"{nbytes / 1e6:8.2f} MB  {name}")
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {len(names)} files")
    problems = [f"has no {name}" for name in missing] + [f"looks in an absolute folder: {text}" for text in bound]
    if problems:
        sys.exit("\n".join(f"{path}: error: {problem}" for problem in problems))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
