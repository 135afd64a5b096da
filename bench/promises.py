"""Runs the tests of what must hold and records what they measured as JSON lines.

python bench/promises.py [--out FILE.jsonl]: NMSE of random placements, predicted and measured bytes of the memory grid.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe, save_lines

TESTS = (
    "tests/patches/test_off_equals_upstream.py",
    "tests/engine/test_placement.py",
    "tests/engine/test_memory.py",
    "tests/planning/test_oato.py",
    "tests/patches/test_upstream_suite.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/promises.jsonl"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, f"--junitxml={report}", "-o", "junit_family=xunit1"]
        subprocess.run(command, check=False)
        cases = list(ET.parse(report).iter("testcase"))
    machine = describe(sys.argv)
    save_lines([*map(line, cases), {"machine": machine}], options.out)


def line(case: ET.Element) -> dict[str, Any]:
    """What a test found out, from its entry in pytest's report."""
    measured: dict[str, list[float]] = {}
    for item in case.iter("property"):
        measured.setdefault(item.attrib["name"], []).append(float(item.attrib["value"]))
    failed = case.find("failure") is not None or case.find("error") is not None
    outcome = "failed" if failed else "skipped" if case.find("skipped") is not None else "passed"
    return {"test": f"{case.attrib['classname']}::{case.attrib['name']}", "outcome": outcome, **measured}


if __name__ == "__main__":
    main()
