"""Runs the tests of what must hold and records what they measured as JSON lines.

python bench/promises.py [--out FILE.jsonl]: NMSE of random placements, predicted and measured bytes of the memory grid.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from oallama.bench.machine import describe

TESTS = ("tests/test_off_equals_upstream.py", "tests/test_placement.py", "tests/test_memory.py", "tests/test_oato.py",
         "tests/test_upstream_suite.py")  # fmt: skip


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
    with options.out.open("w") as file:
        for case in cases:
            measured: dict[str, list[float]] = {}
            for item in case.iter("property"):
                measured.setdefault(item.attrib["name"], []).append(float(item.attrib["value"]))
            outcome = "failed" if case.find("failure") is not None or case.find("error") is not None else (
                "skipped" if case.find("skipped") is not None else "passed"
            )  # fmt: skip
            line = {"test": f"{case.attrib['classname']}::{case.attrib['name']}", "outcome": outcome, **measured}
            file.write(json.dumps(line) + "\n")
        file.write(json.dumps({"machine": machine}) + "\n")


if __name__ == "__main__":
    main()
