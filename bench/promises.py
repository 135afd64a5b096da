"""Runs the tests of what must hold and records what they measured as JSON lines.

python bench/promises.py [--out FILE.jsonl]: NMSE of random placements, predicted and measured bytes of the memory grid.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record

TESTS = (
    "tests/patches/test_off_equals_upstream.py",
    "tests/engine/test_placement.py",
    "tests/engine/test_memory.py",
    "tests/planning/test_oato.py",
    "tests/patches/test_upstream_suite.py",
)


def main() -> None:
    options = arguments(__doc__, "promises").parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, f"--junitxml={report}", "-o", "junit_family=xunit1"]
        subprocess.run(command, check=False)
        cases = list(ET.parse(report).iter("testcase"))
    record([*map(line, cases), {"machine": describe()}], options.out)


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
