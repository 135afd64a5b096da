"""The table of environment variables: it is complete, every reader is named rightly, and the page is made from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from oallama.base import environment
from oallama.base.environment import BUILD, OTHERS, OURS, Variable
from support.paths import ROOT

SOURCES = ("python", "csrc", "third_party/llama.cpp/patches")
TABLE = ROOT / "python" / "oallama" / "base" / "environment.py"


def named(path: Path) -> set[str]:
    return set(re.findall(r'"(OALLAMA_[A-Z_]*[A-Z])"', path.read_text(errors="replace")))


def test_no_variable_is_missing() -> None:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.*") if path.is_file() and path != TABLE]
    found = {
        name: path
        for path in files
        if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh", ".patch")
        for name in named(path)
    }
    assert found.keys() - {variable.name for variable in OURS} == set()
    assert all(path.suffix != ".py" for path in found.values()), "Python takes names from base/environment.py"


@pytest.mark.parametrize("variable", [*OURS, *BUILD, *OTHERS], ids=lambda v: v.name)
def test_the_reader_reads_it(variable: Variable) -> None:
    text = (ROOT / variable.reader).read_text()
    name = variable.name.split(",")[0]
    constant = next((key for key, value in vars(environment).items() if value is variable), None)
    assert name in text or re.search(rf"\b{constant}\.(get|name)\b", text)


def test_the_page_is_made_from_it() -> None:
    assert (ROOT / "docs" / "environment.md").read_text() == environment.page()


def test_empty_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OALLAMA_DEBUG", "")
    assert environment.DEBUG.get() is None
    monkeypatch.setenv("OALLAMA_DEBUG", "1")
    assert environment.DEBUG.get() == "1"
