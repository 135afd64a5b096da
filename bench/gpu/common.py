"""What the programs of scripts/gpu_suite.sh share: facts of the machine, lines of JSON, rounds, devices, one load.

A device is a name of ggml's ("CUDA0"), or "RPC": a loopback RPC server, which stands for the GPU in a rehearsal.
"""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oallama.bench import Engine, LoadParams
    from oallama.data.plan import PlacementPlan

ROOT = Path(__file__).resolve().parents[2]
GPU = (
    "name,driver_version,compute_cap,memory.total,memory.used,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
)
HOST = "CPU"


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
    # By its path: the package needs modules that a bare machine lacks.
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

    def rounds(self, what: str, jobs: Mapping[str, Callable[[], dict[str, Any]]], repeats: int, **same: Any) -> None:
        """Run every job once a round, in turned order; a line each. Ends before a round that would not fit.

        What a job returns may replace `name` and `same`. One that raises OallamaError gets a line with the error and is
        left out from then on.
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
                self.add(what, **{"name": name, "round": round_, **same, **values})
            longest = max(longest, time.monotonic() - start)


def _cut(signal_: int, frame: FrameType | None) -> None:
    raise Cut("stopped at the limit of the stage")


# ---- devices and loads ---------------------------------------------------------------------------------------------


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


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@cache
def planning_device(device: str) -> str:
    """The device's name in this process, for planning; "RPC" is started once."""
    from oallama.engine.rpc import LocalRpcServer

    if device != "RPC":
        return device
    _server.append(LocalRpcServer())
    return _server[0].devices[0]


_server: list[Any] = []  # lives as long as the process


def on_device(device: str, params: LoadParams, stack: ExitStack) -> LoadParams:
    """For an engine in a process of its own: on the device alone, which for "RPC" is a new server."""
    from oallama.engine.rpc import LocalRpcServer

    if device != "RPC":
        return replace(params, devices=(device,))
    server = stack.enter_context(LocalRpcServer(register=False))
    return replace(params, devices=("RPC0",), rpc_servers=(server.endpoint,))


def engine_of(plan: PlacementPlan, device: str, params: LoadParams, stack: ExitStack) -> Engine:
    """The patched engine obeying a plan, or without a map in llama.cpp's own placement for a stock plan."""
    from oallama.bench import Engine
    from oallama.bench.planned import planned
    from oallama.engine import runtime

    name = plan.planner["name"]
    used = any(d != HOST for d in plan.devices)
    placed = on_device(device, params, stack) if used else replace(params, devices=())
    if name not in ("layers", "fewer-layers", "fit"):
        return planned(plan, runtime.lib_dir(), placed, name)
    chosen, context = plan.planner["params"], plan.context
    overrides = tuple((pattern, HOST) for pattern, _ in chosen.get("overrides", ()))
    flags = replace(
        placed, n_ctx=context.n_ctx, flash_attn=context.flash_attn, n_gpu_layers=int(chosen["n_gpu_layers"]),
        override_tensor=overrides,
    )  # fmt: skip
    return Engine(name, runtime.lib_dir(), flags)


def prompt_of(n: int) -> list[int]:
    """Token ids that every vocabulary has; no two neighbours alike."""
    return [300 + (i * 137 + i // 700) % 700 for i in range(n)]


def one_load(
    engine: Engine,
    model: Path,
    prompts: Sequence[int],
    n_generate: int,
    *,
    depth: int = 0,
    at: int | None = None,
    states: Path | None = None,
) -> dict[str, Any]:
    """Load an engine, run a first prompt, then every prompt once; TPOT is taken behind the prompt of `at` tokens.

    Returns load_s, first_ttft_s (of the first prompt after the load, `at` tokens), ttft_s by prompt, tpot_s, tokens
    (of that run), device_bytes, devices. Raises OallamaError.
    """
    from oallama.bench.engines import Worker

    at = at if at is not None else sorted(prompts)[len(prompts) // 2]
    n_ctx = -(-(depth + max(prompts) + n_generate) // 256) * 256
    with Worker(engine, 300, 300) as worker:
        loaded = worker.load(model, engine.params.resolved(n_ctx))
        before, folder = prompt_of(depth), None if states is None else str(states)
        first = worker.run(-1, before, prompt_of(at), 2, folder)
        ttft, tpot, tokens = {}, None, ()
        for n in prompts:
            sample = worker.run(0, before, prompt_of(n), n_generate if n == at else 2, folder)
            ttft[n] = sample.ttft_s
            if n == at:
                tpot, tokens = sample.tpot_s, sample.tokens
        worker.observe(loaded)
        loaded.memory = worker.unload()
    return {
        "load_s": loaded.load_s[0], "first_ttft_s": first.ttft_s, "ttft_s": ttft, "tpot_s": tpot, "prompt": at,
        "n_generate": n_generate, "depth": depth, "tokens": list(tokens), "device_bytes": loaded.device_bytes(),
        "gpu_process_bytes": loaded.gpu_process_bytes, "flash_attn": engine.params.flash_attn,
    }  # fmt: skip


def predicted(plan: PlacementPlan) -> dict[str, Any]:
    """What a plan promises, and its bytes."""
    return {
        "plan": plan.hash[:8], "planner": plan.planner["name"], "predicted_ttft_s": dict(plan.predicted.ttft_s),
        "predicted_tpot_s": dict(plan.predicted.tpot_s), "predicted_request_s": plan.predicted.request_s,
        "predicted_bytes": {name: memory.buffers for name, memory in plan.predicted.devices.items()},
        "predicted_pool_bytes": {name: memory.pool for name, memory in plan.predicted.devices.items()},
        "params": {k: v for k, v in plan.planner["params"].items() if isinstance(v, (int, float, str, bool))},
    }  # fmt: skip


def distinct(plans: Mapping[str, PlacementPlan], stock: Iterable[str] = ("layers", "fit")) -> dict[str, str]:
    """For every name the first one with the same table and engine: equal plans are measured once."""
    seen: dict[tuple[str, str, bool], str] = {}
    return {
        name: seen.setdefault((plan.to_backend_map(), str(plan.context), name in stock), name)
        for name, plan in plans.items()
    }
