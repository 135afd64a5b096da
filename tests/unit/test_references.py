"""What the checkout says about tests: paths exist, and tests find their modules by pytest's settings alone."""

from __future__ import annotations

import re
import subprocess

from support.paths import ROOT

TEXT = ("*.md", "*.py", "*.sh", "*.cpp", "*.h", "*.cu", "*.cuh", "*.patch", "*.toml", "Makefile", "CMakeLists.txt")
# History is not rewritten; these make paths up.
OTHERS = ("CHANGELOG.md", "bench/results", "tests/patches/test_patches.py", "tests/patches/test_upstream_suite.py")


def texts(*patterns: str) -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name: (ROOT / name).read_text() for name in listed.stdout.splitlines() if (ROOT / name).is_file()}


def test_paths_of_tests_exist() -> None:
    found = {
        (name, path)
        for name, text in texts(*TEXT).items()
        if not name.startswith(OTHERS)
        for path in re.findall(r"(?<![\w/.-])tests/[\w/-]+\.(?:py|cpp|h|cu|txt)\b", text)
    }
    assert len(found) > 50
    assert not [(name, path) for name, path in found if not (ROOT / path).exists()]


def test_no_test_looks_for_modules_itself() -> None:
    word = "sys" + ".path"
    assert not [name for name, text in texts("tests/*.py").items() if word in text]
