"""Takes tiny models of any architecture through planning and loading, one per line of stdin, and answers in JSON.

`python -m support.archs_worker ENDPOINT`: the stand-in device is the RPC server there. A job is {"model", "folder"}; an
answer {"model", "arch", "plans": {kind: {"planner", "nmse", "weights"}}, "left_out": {planner: reason}, "timed": [kinds
of operators that are timed by shape], "errors": {kind: text}}. A model may end the process: archs.py starts another.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oallama.data.plan import PlacementPlan
from oallama.data.workload import Workload
from oallama.engine import device_list, runtime, skeleton
from oallama.engine.load_settings import FLASH_ATTN, Settings
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from support.archs import TOKENS
from support.logits import nmse
from support.placements import random_table

SETTINGS = Settings(n_ctx=128, n_batch=32, n_ubatch=32, n_threads=1)
N_DECODE = 3
TABLE_SEEDS = (0, 1)
SLOW_HOST = 8.0  # times as slow as it is


class Model:
    """One model, and what is found out about it."""

    def __init__(self, path: Path, device: str, folder: Path) -> None:
        self.path, self.device, self.folder = path, device, folder
        self.answer: dict[str, Any] = {"model": path.stem, "plans": {}, "left_out": {}, "timed": [], "errors": {}}

    def run(self) -> dict[str, Any]:
        self._try("load", self._load)
        if not self.answer["errors"]:
            self._try("auto", self._auto)
            self._try("minimal", self._minimal)
            for seed in TABLE_SEEDS:
                table = random_table(self.path, [self.device], seed)
                self._try(f"table {seed}", lambda table=table, seed=seed: self._check(f"table {seed}", table))
        return self.answer

    def _try(self, kind: str, step: Callable[[], None]) -> None:
        try:
            step()
        except (Exception, SystemExit) as error:
            self.answer["errors"][kind] = f"{type(error).__name__}: {error}"

    def _load(self) -> None:
        self.graph = autoplan.read_graph(self.path, SETTINGS)
        shapes = {op.shape.op for tier in self.graph.tiers for op in self.graph.operators(tier) if op.shape}
        self.answer |= {"arch": self.graph.arch, "timed": sorted(shapes)}
        self.expected = self._logits(self._job("", (), "auto"))
        assert np.isfinite(self.expected).all(), "the CPU's own logits are not finite"

    def _auto(self) -> None:
        choices = Choices(device=self.device, workload=Workload(32, 16, 32), fixed_ubatch=True, all_logits=True)
        # Both devices are the same processor. With a slower host the budget matters and plans are mixed.
        times = autoplan.profile_for(self.graph, choices, SETTINGS).scaled({"CPU": SLOW_HOST})
        choices = replace(choices, profile=times)
        found = autoplan.candidates(self.path, self.graph, self._budget(), SETTINGS, choices)
        self.answer["left_out"] = {name: str(error) for name, error in found.failed.items()}
        for kind, plan in {
            "auto": found.best,
            "exact": found.plans.get("exact"),
            "layers": found.plans["layers"],
        }.items():
            if plan is not None:
                self._try(kind, lambda kind=kind, plan=plan: self._check_plan(kind, plan))

    def _budget(self) -> int:
        """Half of what everything on the device takes: weights and caches; and all of its compute buffers."""
        used = skeleton.dry_run(self.path, replace(SETTINGS, devices=(self.device,)))[self.device]
        return used["compute"] * 2 + (used["weights"] + used["kv"]) // 2

    def _minimal(self) -> None:
        plan = autoplan.candidates(
            self.path, self.graph, "minimal", SETTINGS, Choices(device=self.device, all_logits=True)
        ).best
        self._check_plan("minimal", plan)

    def _check_plan(self, kind: str, plan: PlacementPlan) -> None:
        devices = tuple(name for name in plan.devices if name != "CPU")
        self._check(kind, plan.to_backend_map(), devices, plan.context.flash_attn)
        on_device = sum(memory.weights for name, memory in plan.predicted.devices.items() if name != "CPU")
        self.answer["plans"][kind] |= {"planner": plan.planner["name"], "weights": on_device}

    def _check(self, kind: str, table: str, devices: tuple[str, ...] | None = None, flash: str = "auto") -> None:
        file = self.folder / f"{self.path.stem}-{kind.replace(' ', '-')}.map"
        file.write_text(table)
        found = self._logits(self._job(str(file), (self.device,) if devices is None else devices, flash))
        assert np.isfinite(found).all(), "logits are not finite"
        self.answer["plans"][kind] = {"nmse": nmse(found, self.expected)}

    def _logits(self, job: dict[str, Any]) -> np.ndarray:
        from support.logits_worker import logits  # it reads a variable that main sets

        try:
            return logits(job)
        finally:
            os.environ.pop("OALLAMA_BACKEND_MAP", None)

    def _job(self, table: str, devices: tuple[str, ...], flash: str) -> dict[str, Any]:
        return {
            "model": str(self.path),
            "table": table,
            "devices": devices,
            "n_gpu_layers": -1 if devices else 0,
            "tokens": TOKENS,
            "n_decode": N_DECODE,
            "n_ctx": SETTINGS.n_ctx,
            "n_ubatch": SETTINGS.n_ubatch,
            "n_threads": SETTINGS.n_threads,
            "flash_attn": FLASH_ATTN[flash],
        }


def main(endpoint: str) -> None:
    os.environ["LLAMA_CPP_LIB_PATH"] = str(runtime.lib_dir())
    runtime.llama_cpp()
    runtime.quiet()
    (device,) = device_list.add_rpc_server(endpoint)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(Model(Path(job["model"]), device, Path(job["folder"])).run()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
