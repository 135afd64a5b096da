"""Sender, receiver and the threads of graphs on one region under ThreadSanitizer; scripts/tsan_weave.sh runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import ran
from support.sanitizers import skip_without
from support.weave_tsan import run

PROGRAM = ROOT / "build" / "tsan" / "weave_tsan"


@pytest.fixture(scope="session")
def program() -> Path:
    skip_without("thread")
    ran(ROOT / "scripts" / "tsan_weave.sh", "build")
    return PROGRAM


@pytest.mark.slow
def test_no_race(program: Path) -> None:
    found = run(program, 20)
    assert found["races"] == 0
    assert found["epochs"] == 20 and found["tasks"] > 1000 and found["refused"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("word", ["tail", "done", "taken", "claim", "left"])
def test_races_are_found(program: Path, word: str) -> None:
    assert run(program, 20, word, "release")["races"] > 0
