"""scripts/setup.sh: what it asks pip for, and when it asks for nothing; with a Python that only notes its arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.paths import ROOT

PYTHON = '#!/bin/sh\necho "$*" >> calls\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which setup.sh finds everything but an engine."""
    for name in ("scripts", ".venv/bin", "tools"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "scripts")
    for program in (".venv/bin/python", ".venv/bin/oallama", "tools/ccache", "tools/c++"):
        (tmp_path / program).write_text(PYTHON)
        (tmp_path / program).chmod(0o755)
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


def setup(checkout: Path, *parts: str, **more: str) -> str:
    """The arguments of what setup.sh calls in .venv."""
    (checkout / "calls").unlink(missing_ok=True)
    path = f"{checkout / 'tools'}:{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "OALLAMA_VULKAN": "OFF"} | more
    subprocess.run(["scripts/setup.sh", *parts], cwd=checkout, env=variables, check=True, capture_output=True)
    return (checkout / "calls").read_text() if (checkout / "calls").exists() else ""


def builds(calls: str) -> bool:
    return "-e .[" in calls


def test_the_demo_needs_no_tools_and_what_was_built_stays(checkout: Path) -> None:
    assert "OALLAMA_TOOLS=OFF" in setup(checkout, "demo")
    assert not builds(setup(checkout, "demo")), "nothing has changed"
    assert "OALLAMA_TOOLS=ON" in setup(checkout)
    assert not builds(setup(checkout, "demo")) and not builds(setup(checkout)), "all is more than the demo needs"
    (checkout / "pyproject.toml").write_text("# changed")
    assert "OALLAMA_TOOLS=ON" in setup(checkout, "demo"), "the tools are not taken away again"


def test_an_asked_for_backend_is_built_for_the_demo_too(checkout: Path) -> None:
    assert "OALLAMA_VULKAN=OFF" in setup(checkout, "demo")
    assert "OALLAMA_CUDA=ON" in setup(checkout, "demo", OALLAMA_CUDA="ON")


def test_an_unknown_part_is_refused(checkout: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        setup(checkout, "dmeo")
    assert b"unknown part dmeo" in refused.value.stderr
