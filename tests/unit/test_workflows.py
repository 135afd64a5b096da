"""The workflows of .github agree with the checkout. What they do is known only where they run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.paths import ROOT

FLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WHEELS = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text())["jobs"]
BUILD: dict[str, str] = WHEELS["wheels"]["env"]  # cibuildwheel's settings
PROJECT = (ROOT / "pyproject.toml").read_text()
SCRIPT = r"(?<![\w/.-])(?:scripts/[\w/]+\.(?:py|sh)|\.ci/run)\b"


@pytest.mark.parametrize("path", FLOWS, ids=lambda path: path.name)
def test_scripts_are_there_and_know_their_options(path: Path) -> None:
    steps = [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]
    commands = [line for step in steps for line in step.get("run", "").splitlines()]
    called = [(script, line) for line in commands for script in re.findall(SCRIPT, line)]
    assert called
    for script, line in called:
        needs = os.R_OK if f"python {script}" in line else os.X_OK
        assert os.access(ROOT / script, needs), script
        text = (ROOT / script).read_text()
        for option in re.findall(r" (--[a-z-]+)", line.partition(script)[2]):
            assert f'"{option}"' in text, f"{script} has no {option}"


def test_wheels_are_built_for_every_python_from_the_oldest_on() -> None:
    minors = [int(minor) for minor in re.findall(r"cp3(\d+)-manylinux_\*", BUILD["CIBW_BUILD"])]
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', PROJECT)
    assert oldest is not None and minors == list(range(int(oldest[1]), minors[-1] + 1))
    assert len(minors) == len(BUILD["CIBW_BUILD"].split())


def test_cmake_knows_what_is_defined() -> None:
    files = [*ROOT.glob("cmake/*.cmake"), *ROOT.glob("csrc/*/CMakeLists.txt")]
    text = "\n".join(path.read_text() for path in files)
    known = set(re.findall(r"set\((OALLAMA_\w+) [^\n]*CACHE", text))
    known |= {f"OALLAMA_{backend}" for backend in re.findall(r"^oallama_backend\((\w+)", text, re.MULTILINE)}
    defined = dict(re.findall(r"cmake\.define\.(\w+)=(\S+)", BUILD["CIBW_CONFIG_SETTINGS"]))
    assert defined["OALLAMA_CPU"] == "ALL" and defined.keys() <= known


def test_licences_that_go_into_the_wheel_are_fetched() -> None:
    made = BUILD["CIBW_BEFORE_ALL_LINUX"] + BUILD["CIBW_BEFORE_BUILD"]
    notices = re.findall(r"/notices/([\w-]+)/([\w.]+)", BUILD["CIBW_CONFIG_SETTINGS"])
    assert len(notices) == 4
    for package, file in notices:
        assert re.search(rf"\b{re.escape(file)}\b[^\n]* /notices/{package}\b", made), f"nothing copies {package}/{file}"


def test_without_isolation_the_build_requirements_are_installed() -> None:
    assert "--no-build-isolation" in BUILD["CIBW_BUILD_FRONTEND"]
    requires = re.search(r"^requires = \[(.*)\]", PROJECT, re.MULTILINE)
    assert requires is not None
    for requirement in re.findall(r'"([^"]+)"', requires[1]):
        assert f'"{requirement}"' in BUILD["CIBW_BEFORE_BUILD"]


@pytest.mark.parametrize("path", FLOWS, ids=lambda path: path.name)
def test_who_may_publish_runs_nothing_of_the_checkout(path: Path) -> None:
    flow: dict[str, Any] = yaml.safe_load(path.read_text())
    for name, job in flow["jobs"].items():
        granted = job.get("permissions", flow["permissions"])
        if "write" in granted.values():
            assert not [step for step in job["steps"] if "run" in step or "checkout" in step["uses"]], name
            assert job["environment"] and job["if"] == "github.event_name == 'push'"
