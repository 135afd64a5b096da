"""`oallama demo` on a machine without a GPU: the CPU alone comes first, then the device that stands in for one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from support.cli import oallama


@pytest.mark.slow
def test_the_machine_as_it_is_comes_before_the_stand_in(
    tiny: Callable[..., Path], baseline_lib: Path, tmp_path: Path
) -> None:
    done = oallama("demo", "--model", tiny("llama"), "--out", tmp_path, "--ctx", "256")
    assert done.returncode == 0, done.stderr
    said = re.sub(r"\s+", " ", done.stdout)
    story = ["There is no GPU", "The CPU alone,", "Predicted:", "Verdict: measured", "With the stand-in:", "Kept:"]
    assert sorted(story, key=said.index) == story
    assert {file.name for file in tmp_path.iterdir()} == {"plan.json", "results.csv", "results.jsonl", "results.md"}
