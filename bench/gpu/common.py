"""What the programs of scripts/gpu_suite.sh share: facts of the machine, lines of JSON, rounds. Needs no package."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GPU = (
    "name,driver_version,compute_cap,memory.total,memory.used,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
)


def output(*command: str) -> str:
    """What a program prints; nothing if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def gpus() -> list[dict[str, str]]:
    """What nvidia-smi says now, clocks included; nothing without a GPU."""
    rows = output("nvidia-smi", f"--query-gpu={GPU}", "--format=csv,noheader,nounits").splitlines()
    return [dict(zip(GPU.split(","), map(str.strip, row.split(",")), strict=False)) for row in rows]


def nvcc() -> str | None:
    return shutil.which("nvcc", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")


@cache
def facts() -> dict[str, Any]:
    """GPU, driver, PCIe, clocks, CUDA, host and commit: what every line carries, read once a process."""
    # By its path: the packages around it need modules that a bare machine lacks. It imports oallama.base, which
    # needs none: that of an installed package, else of this checkout.
    sys.path.append(str(ROOT / "python"))
    spec = importlib.util.spec_from_file_location("machine", ROOT / "python/oallama/bench/machine.py")
    assert spec is not None and spec.loader is not None
    machine = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(machine)
    hardware = machine.hardware()
    release = re.search(r"release ([\d.]+)", output(nvcc() or "nvcc", "--version"))
    return {
        "gpus": gpus(),
        "cuda": release[1] if release else None,
        "cpu": hardware["cpu"],
        "cpus": hardware["cpus_allowed"],
        "ram_bytes": hardware["ram_bytes"],
        "system": hardware["system"],
        **machine.repository(),
    }


# ---- lines ---------------------------------------------------------------------------------------------------------


class Cut(Exception):
    """The stage's time is over."""


class Log:
    """Appends lines of JSON as they come; the last one, {"what": "end"}, says whether all was measured.

    $STAGE_END, in seconds of the epoch, is when that has to be.
    """

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._end = float(os.environ.get("STAGE_END", "inf"))
        self._unfinished: list[str] = []

    def __enter__(self) -> Log:
        signal.signal(signal.SIGTERM, _cut)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if isinstance(error, Cut):
            self._unfinished.append(str(error))
        elif error is not None:
            self._unfinished.append(f"{type(error).__name__}: {error}")
        self.add("end", complete=not self._unfinished, unfinished=self._unfinished)
        return isinstance(error, Cut)

    def left(self) -> float:
        """Seconds until the stage ends."""
        return self._end - time.time()

    def unfinished(self, what: str) -> None:
        """Note a set that is not complete."""
        self._unfinished.append(what)
        print(f"unfinished: {what}", flush=True)

    def add(self, what: str, **values: Any) -> None:
        line = {"what": what, **values}
        print(json.dumps({k: v for k, v in line.items() if not isinstance(v, (list, dict)) or len(v) < 8}), flush=True)
        if self._out is not None:
            with self._out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "time": time.time(), "argv": sys.argv[1:], "machine": facts()}) + "\n")

    def rounds(
        self,
        what: str,
        jobs: Mapping[str, Callable[[], dict[str, Any]]],
        repeats: int,
        kept: bool = False,
        **same: Any,
    ) -> None:
        """Run every job once a round, in turned order; a line each. Ends before a round that would not fit.

        kept: the first round loads engines that stay, so it does not tell how long the others take. What a job returns
        may replace `name` and `same`. One that raises OallamaError gets a line with the error and is left out from
        then on.
        """
        from oallama.bench.sweep import order
        from oallama.errors import OallamaError

        names, longest = list(jobs), 0.0
        failed: set[str] = set()
        for round_ in range(repeats):
            if self.left() < 1.2 * longest:
                self.unfinished(f"{what} {same}: {round_} of {repeats} rounds")
                return
            start = time.monotonic()
            for name in (names[i] for i in order(len(names), round_)):
                if name in failed:
                    continue
                try:
                    values = jobs[name]()
                except OallamaError as error:
                    failed.add(name)
                    values = {"error": str(error)}
                self.add(what, **{"name": name, "round": round_, **same, **({"kept": True} if kept else {}), **values})
            if round_ > 0 or not kept:
                longest = max(longest, time.monotonic() - start)


def _cut(signal_: int, frame: FrameType | None) -> None:
    raise Cut("stopped at the limit of the stage")


def arguments(description: str | None, model: bool = True) -> argparse.ArgumentParser:
    """--device, --out, --repeats, --threads, and --model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model:
        parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="CUDA0", help='ggml\'s name, or "RPC" (default: %(default)s)')
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the host")
    return parser
