"""csrc as a whole: which files the engine's identity covers, and in which order its folders know each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from os import environ
from pathlib import Path

import pytest

from support.paths import ROOT

CSRC = ROOT / "csrc"
CMAKE = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{environ['PATH']}")
LISTING = """
cmake_minimum_required(VERSION 3.21)
project(engine_files LANGUAGES NONE)
include({root}/cmake/engine_id.cmake)
oallama_engine_files(files)
file(WRITE ${{CMAKE_BINARY_DIR}}/files "${{files}}")
"""


@pytest.mark.skipif(CMAKE is None or not (ROOT / ".git").exists(), reason="no cmake, or not a checkout")
def test_engine_id_covers_every_file_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(LISTING.format(root=ROOT))
    subprocess.run([str(CMAKE), "-S", tmp_path, "-B", tmp_path / "build"], check=True, capture_output=True)
    covered = (tmp_path / "build" / "files").read_text().split(";")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--"]
    command += ["csrc", "cmake", "third_party/llama.cpp/patches", "third_party/llama.cpp/pin.json"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    expected = {path for path in listed if (ROOT / path).exists() and not path.startswith("csrc/netlab/")}
    assert set(covered) == expected and len(covered) == len(expected)


def test_no_include_points_up() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    order = re.search(r"^# Levels of csrc.*\n(?:#.*\n)*?#   (base .*)$", text, re.MULTILINE)
    assert order is not None
    levels = order[1].split()

    def level(path: Path) -> int:
        folder = path.relative_to(CSRC).parent
        return levels.index(folder.as_posix() if folder.as_posix() in levels else folder.parts[0])

    sources = [p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu") and "netlab" not in p.parts]
    assert {levels[level(path)] for path in sources} == set(levels)
    headers: dict[str, list[Path]] = defaultdict(list)
    for path in sources:
        headers[path.name].append(path)
    for path in sources:
        for name in re.findall(r'^#include "(?:\.\./)?([^"/]+)"', path.read_text(), re.MULTILINE):
            for header in headers[name]:
                assert level(header) <= level(path), f"{path} includes {header}"
