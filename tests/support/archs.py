"""Tiny models of all architectures that upstream has, and what becomes of each.

`PYTHONPATH=tests python -m support.archs` makes the table of docs/architectures.md; test_architectures.py
compares it.
"""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from oallama.engine.rpc import LocalRpcServer
from support.paths import ROOT

# Of logits against the CPU's: roundings of other kernels, in the worst architecture.
MAX_NMSE = 1e-5
KINDS = ("auto", "layers", "minimal", "table 0", "table 1")
# The vocabularies have 128.
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, 128, size=32)]
PATIENCE_S = 120.0  # for one model
PAGE = ROOT / "docs" / "architectures.md"
BEGIN, END = "<!-- table: PYTHONPATH=tests python -m support.archs -->", "<!-- end of table -->"
WRITER = ROOT / "build" / "engine" / "bin" / "test-llama-archs"
SOURCE = ROOT / "third_party" / "llama.cpp" / "patched"
Answer = dict[str, Any]


def write_models(folder: Path, pattern: str = "") -> list[Path]:
    """Upstream's tiny models of the architectures that match; with random weights, some megabytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(WRITER), "-o", str(folder), "-s", "1", *(("-a", pattern) if pattern else ())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return sorted(folder.glob("*.gguf"))


def take_through(models: Iterable[Path], folder: Path, n_workers: int = 1) -> list[Answer]:
    """Every model through plans, tables and loads; a model that ends its process has that as its error."""
    waiting: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for model in models:
        waiting.put(model)
    with ThreadPoolExecutor(n_workers) as pool:
        parts = [pool.submit(_take, waiting, folder) for _ in range(n_workers)]
        return sorted((answer for part in parts for answer in part.result()), key=lambda a: str(a["model"]))


def _take(waiting: queue.SimpleQueue[Path], folder: Path) -> list[Answer]:
    answers: list[Answer] = []
    while not waiting.empty():
        # A client that dies may leave its server in the middle of a message: both are new then.
        with LocalRpcServer(threads=1, register=False) as server, tempfile.TemporaryFile("w+") as log:
            answers += _worker(waiting, folder, server.endpoint, log)
    return answers


def _worker(waiting: queue.SimpleQueue[Path], folder: Path, endpoint: str, log: Any) -> Iterator[Answer]:
    command = [sys.executable, "-m", "support.archs_worker", endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdin and process.stdout
        while True:
            try:
                model = waiting.get_nowait()
            except queue.Empty:
                return
            process.stdin.write(json.dumps({"model": str(model), "folder": str(folder)}) + "\n")
            process.stdin.flush()
            watch = threading.Timer(PATIENCE_S, process.kill)
            watch.start()
            line = process.stdout.readline()
            watch.cancel()
            if line:
                yield json.loads(line)
                continue
            code = process.wait()
            log.seek(0)
            last = " | ".join(log.read().strip().splitlines()[-3:])
            yield {"model": model.stem, "plans": {}, "errors": {"process": f"it ended with {code}: {last[-400:]}"}}
            return


def problems(answers: Iterable[Answer]) -> list[str]:
    """Everything that is wrong, one line each."""
    found = []
    for answer in answers:
        found += [f"{answer['model']}: {kind}: {text}" for kind, text in answer["errors"].items()]
        for kind, plan in answer["plans"].items():
            if not plan["nmse"] <= MAX_NMSE:
                found.append(f"{answer['model']}: {kind} ({plan.get('planner', 'table')}): NMSE {plan['nmse']:.1e}")
        if not answer["errors"]:
            found += [f"{answer['model']}: no {kind}" for kind in KINDS if kind not in answer["plans"]]
    return found


def architectures() -> list[str]:
    """All that this llama.cpp knows by name."""
    text = (SOURCE / "src" / "llama-arch.cpp").read_text()
    table = re.search(r"LLM_ARCH_NAMES = \{(.*?)\n\};", text, re.DOTALL)
    assert table
    return [name for name in re.findall(r'\{ LLM_ARCH_\w+,\s*"([^"]+)"', table[1]) if name != "(unknown)"]


def page(answers: Iterable[Answer]) -> str:
    """The text of docs/architectures.md with its table made anew."""
    head, rest = PAGE.read_text().split(BEGIN)
    return f"{head}{BEGIN}\n\n{table(answers)}\n{END}{rest.split(END)[1]}"


def table(answers: Iterable[Answer]) -> str:
    by_arch: dict[str, list[Answer]] = {}
    for answer in answers:
        by_arch.setdefault(answer["model"].rsplit("-", 1)[0], []).append(answer)
    rows = ["| architecture | plans | exact planner | timed by kind and shape |", "|---|---|---|---|"]
    for name in architectures():
        found = by_arch.get(name, [])
        wrong = problems(found)
        plans = ("no: " + wrong[0] if wrong else "yes") if found else "not tried"
        exact = {answer["left_out"].get("exact", "yes") for answer in found}
        timed = sorted({kind for answer in found for kind in answer["timed"]})
        rows.append(f"| {name} | {plans} | {'; '.join(sorted(exact))} | {', '.join(timed)} |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """Exit code 1 where something is wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers = take_through(write_models(folder / "models"), folder, n_workers=2)
    PAGE.write_text(page(answers))
    wrong = problems(answers)
    print("\n".join(wrong) or f"{len(answers)} models are planned and loaded")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
