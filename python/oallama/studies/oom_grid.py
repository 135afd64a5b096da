"""Loads plans for real over a grid of cells and compares the bytes they take with the prediction and the budget.

python -m oallama.studies.oom_grid [--out FILE.jsonl] [--every N]

Tiny models of all architectures on a loopback RPC server; every cell plans, loads, decodes a prompt of a full
micro-batch and a few tokens in every sequence, and frees. Draft cells hold two planned models under one budget and
generate speculatively. The server has no option to bound its memory, so the bound is the buffer ledger: the peak of the
bytes that were really allocated on the device between the cell's start and its end is never above the budget. Two
contexts of one process may use one server in turns, as a model and its draft do. The times planned with are those of a
datasheet with a fast device (whichever plan they give, its bytes must be right).

Writes the machine, then one JSON line per cell; exits with 1 when a cell is over its budget or fails.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oallama import Llama, OallamaError
from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.data.operators import OperatorGraph
from oallama.data.plan import PlacementPlan
from oallama.data.profile import Profile
from oallama.engine import device_list, load_settings, native, runtime, skeleton
from oallama.engine.backend_map import backend_map
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.loading import autoplan
from oallama.modelmaker import make_model
from oallama.planning import PlannerName, Workload
from oallama.profiling import datasheet

ARCHITECTURES = ("llama", "minicpm3", "qwen2", "qwen3moe")
PLANNERS: tuple[PlannerName, ...] = ("auto", "exact", "oato", "layers", "fit")
# Of everything on the device: shares of the KV cache and of the weights that the budget has room for. "share" is the
# other form of budget, half of the weights and whatever KV cache and buffers come on top.
BUDGETS = {"share": None, "half": (1.0, 0.5), "tight": (1.0, 0.05), "part of the KV": (0.6, 0.0)}
SIZES = ((512, 128), (1024, 512), (2048, 256), (4096, 512))  # n_ctx, n_ubatch
N_GENERATE = 4
N_DRAFT = 4


@dataclass(frozen=True)
class Cell:
    """One combination; `draft` adds a second, smaller model of the same architecture on the device."""

    arch: str
    budget: str
    kv: str
    n_seq_max: int
    n_ctx: int
    n_ubatch: int
    planner: PlannerName
    draft: bool = False

    @property
    def settings(self) -> Settings:
        flash = "auto" if self.kv == "f16" else "on"  # a quantised V needs flash attention
        return Settings(
            n_ctx=self.n_ctx, n_batch=self.n_ubatch, n_ubatch=self.n_ubatch, n_seq_max=self.n_seq_max,
            type_k=self.kv, type_v=self.kv, flash_attn=flash, n_threads=2,
        )  # fmt: skip

    def __str__(self) -> str:
        draft = "-draft" if self.draft else ""
        return f"{self.arch}-{self.budget}-{self.kv}-x{self.n_seq_max}-{self.n_ctx}-{self.planner}{draft}"


def grid() -> list[Cell]:
    """Every architecture x budget x KV type with one sequence, four, and a draft; planners and sizes take turns."""
    kinds = itertools.product(ARCHITECTURES, BUDGETS, ("f16", "q8_0", "q4_0"), ((1, False), (4, False), (1, True)))
    cells = []
    for i, (arch, budget, kv, (n_seq_max, draft)) in enumerate(kinds):
        # 5 planners have no factor in common with the rest of the grid: all meet all. Sizes move on after each round.
        n_ctx, n_ubatch = SIZES[(i // len(PLANNERS)) % len(SIZES)]
        planner = PLANNERS[i % len(PLANNERS)]
        if (planner, budget) == ("fit", "share"):
            planner = "cpu"  # --fit thinks in bytes of the whole device; nothing at all on it is a cell, too
        cells.append(Cell(arch, budget, kv, n_seq_max, n_ctx, n_ubatch, planner, draft))
    return cells


class Grid:
    """Runs cells on one device. folder: where the tiny models are made."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device

    def run(self, cell: Cell) -> dict[str, Any]:
        """The cell with budget, predicted and measured bytes, and "outcome": "ok", "over budget" or the error."""
        facts: dict[str, Any] = {"cell": str(cell), **asdict(cell)}
        core = native.core()
        before = self._allocated("current")
        core.ledger_reset_peak()
        try:
            plans, limit = self.plan(cell)
            on_device = [plan.predicted.devices.get(self._device) for plan in plans.values()]
            predicted = sum(memory.total for memory in on_device if memory)
            facts |= {"chosen": plans["main"].planner["name"], "n_ubatch_planned": plans["main"].context.n_ubatch}
            facts |= {"limit": limit, "predicted": predicted}
            live = self._draft(cell, plans) if cell.draft else {"main": self._decode(cell, plans["main"])}
            facts["models"] = {name: _both(plan, live[name]) for name, plan in plans.items()}
            peak = self._allocated("peak") - before
            left = self._allocated("current") - before
            facts |= {"measured": peak, "difference": peak - predicted, "left": left}
            facts["outcome"] = "over budget" if peak > limit else "memory left behind" if left else "ok"
        except OallamaError as error:
            facts["outcome"] = f"refused: {error}"
        except (RuntimeError, ValueError) as error:
            facts["outcome"] = f"failed: {error}"
        return facts

    def plan(self, cell: Cell) -> tuple[dict[str, PlacementPlan], int]:
        """The plans of "main" and, in a draft cell, of "draft"; the bytes they may take of the device together."""
        settings = replace(cell.settings, devices=(self._device,))
        plans: dict[str, PlacementPlan] = {}
        reserve: Mapping[str, int] = {}
        whole = 0
        for name, path in self._models(cell).items():
            vram = _budget(cell.budget, skeleton.dry_run(path, settings)[self._device])
            if isinstance(vram, int):  # one budget for both; a share of the weights is of each model's own
                whole += vram
                vram = whole
            planner: PlannerName = cell.planner if name == "main" else "auto"
            plans[name] = self._plan(path, replace(cell, planner=planner), vram, reserve, cell.draft and name == "main")
            reserve = {device: memory.total for device, memory in plans[name].predicted.devices.items()}
        return plans, whole or sum(plan.budgets.get(self._device, 0) for plan in plans.values())

    def _plan(
        self, path: Path, cell: Cell, vram: str | int, reserve: Mapping[str, int], all_logits: bool
    ) -> PlacementPlan:
        graph = autoplan.read_graph(path, cell.settings)
        choices = autoplan.Choices(
            device=self._device,
            profile=self._profile(graph, cell),
            planner=cell.planner,
            workload=Workload(cell.n_ubatch // 2, 32, n_parallel=cell.n_seq_max),
            elsewhere=True,  # the times are not this machine's; the memory is
            all_logits=all_logits,
            reserve=reserve,
        )
        return autoplan.plan_graph(path, graph, vram, cell.settings, choices)

    def _profile(self, graph: OperatorGraph, cell: Cell) -> Profile:
        link = datasheet.Link(pcie_gb_s=16)
        device = datasheet.Accelerator(self._device, "a fast device", 0, 400, 20, link, backend="RPC")
        host = datasheet.Cpu("a slow host", cores=2, dram_gb_s=20, ghz=2)
        made = datasheet.make_profile(graph, datasheet.Datasheet("oom grid", host, (device,)), cell.kv, cell.kv)
        offload = {d.name: d.op_offload for d in device_list.devices()}
        return replace(made, devices=tuple(replace(d, op_offload=offload[d.name]) for d in made.devices))

    def _decode(self, cell: Cell, plan: PlacementPlan) -> dict[str, Any]:
        """Load, decode a full micro-batch over all sequences, then a few tokens of each; bytes of the live context."""
        llama_cpp = runtime.llama_cpp()
        settings = replace(cell.settings, **asdict(plan.context), devices=tuple(plan.devices[:-1]))
        with _loaded(self._model(cell.arch), settings, plan.to_backend_map()) as context:
            length = cell.n_ubatch // cell.n_seq_max
            for first, n in [(0, length), *((length + i, 1) for i in range(N_GENERATE))]:
                batch = llama_cpp.llama_batch_init(n * cell.n_seq_max, 0, 1)
                batch.n_tokens = n * cell.n_seq_max
                for i, (sequence, position) in enumerate(itertools.product(range(cell.n_seq_max), range(n))):
                    batch.token[i], batch.pos[i] = 300 + 7 * i, first + position
                    batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                    batch.logits[i] = position == n - 1
                status = llama_cpp.llama_decode(context, batch)
                llama_cpp.llama_batch_free(batch)
                if status:
                    raise RuntimeError(f"llama_decode returned {status}")
            return _live(context)

    def _draft(self, cell: Cell, plans: Mapping[str, PlacementPlan]) -> dict[str, Any]:
        """Both models live on the device, in turns: speculative generation as llama-cpp-python has it."""
        with ExitStack() as stack:
            models: dict[str, Llama] = {}
            arguments: dict[str, Any] = {"n_threads": 2, "verbose": False}
            for name, path in self._models(cell).items():
                models[name] = stack.enter_context(closing(Llama(str(path), plan=plans[name], **arguments)))
                arguments |= {"draft_model": Draft(models[name]), "logits_all": True}  # of the one loaded next
            main = models["main"]
            prompt = [300 + 7 * i for i in range(cell.n_ubatch)]
            for _ in itertools.islice(main.generate(prompt, temp=0.0), 2 * N_GENERATE):
                pass
            if not main.draft_model.calls:
                raise RuntimeError("the draft model was never asked")
            return {name: _live(llm.ctx) for name, llm in models.items()}

    def _models(self, cell: Cell) -> dict[str, Path]:
        """The models of a cell in the order they are planned and loaded."""
        main = {"main": self._model(cell.arch)}
        return {"draft": self._model(cell.arch, n_layer=1), **main} if cell.draft else main

    def _model(self, arch: str, n_layer: int | None = None) -> Path:
        path = self._folder / f"{arch}-{n_layer or 'all'}.gguf"
        if not path.exists():
            overrides = {"n_layer": n_layer} if n_layer else None
            make_model(path, arch=arch, file_type="Q8_0", overrides=overrides)
        return path

    def _allocated(self, when: str) -> int:
        ledger = native.core().ledger()
        return sum(entry[when] for name, entry in ledger.items() if name.split("[")[0] == self._device)


class Draft:
    """A second model as llama-cpp-python's draft_model: the next N_DRAFT tokens it would take itself."""

    def __init__(self, llm: Llama) -> None:
        self.llm, self.calls = llm, 0

    def __call__(self, input_ids: Any, **_: Any) -> Any:
        self.calls += 1
        tokens = self.llm.generate(input_ids.tolist(), temp=0.0)
        return np.fromiter(itertools.islice(tokens, N_DRAFT), dtype=np.intc)


@contextmanager
def _loaded(path: Path, settings: Settings, table: str) -> Iterator[Any]:
    """A live llama_context under a backend map."""
    llama_cpp, params = runtime.llama_cpp(), load_settings.make_params(settings)
    with backend_map(table):
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params.model)
        if not model:
            raise RuntimeError("the model does not load")
    context = llama_cpp.llama_init_from_model(model, params.context)
    try:
        if not context:
            raise RuntimeError("the context cannot be made")
        yield context
    finally:
        if context:
            llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def _budget(kind: str, everything: Mapping[str, int]) -> str | int:
    shares = BUDGETS[kind]
    if shares is None:
        return "50%"
    return int(everything["compute"] + shares[0] * everything["kv"] + shares[1] * everything["weights"])


def _live(context: Any) -> dict[str, dict[str, int]]:
    """Bytes by device and kind of a live context."""
    return skeleton.by_device(native.core().memory_of(ctypes.cast(context, ctypes.c_void_p).value))


def _both(plan: PlacementPlan, live: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Predicted and live bytes by device and kind; on the CPU a mapped file counts from first to last weight used."""
    predicted = {name: asdict(memory) for name, memory in plan.predicted.devices.items()}
    return {name: {"predicted": predicted.get(name), "live": live.get(name)} for name in {**predicted, **live}}


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """Cells by budget and by kind: how many loaded, were refused or went wrong, and the bytes by which they missed."""
    rows = [f"{'':22} {'cells':>5} {'ok':>5} {'refused':>7} {'over':>5} {'other':>5}  measured - predicted, bytes"]
    groups: list[tuple[str, object]] = [("budget", b) for b in BUDGETS]
    groups += [("planner", p) for p in (*PLANNERS, "cpu")]
    groups += [("kv", "f16"), ("kv", "q8_0"), ("kv", "q4_0"), ("n_seq_max", 4), ("draft", True), ("all", None)]
    for key, value in groups:
        own = [line for line in lines if value is None or line[key] == value]
        kinds = Counter(line["outcome"].split(":")[0] for line in own)
        missed = [line["difference"] for line in own if "difference" in line]
        known = kinds["ok"] + kinds["refused"] + kinds["over budget"]
        name = "all" if value is None else f"{key} {value}"
        rows.append(
            f"{name:22} {len(own):5} {kinds['ok']:5} {kinds['refused']:7} {kinds['over budget']:5} "
            f"{len(own) - known:5}  {min(missed, default=0)} to {max(missed, default=0)}"
        )
    return "\n".join(rows)


def main() -> int:
    parser = arguments(__doc__, "oom-grid")
    parser.add_argument("--every", type=int, default=1, help="run every Nth cell only")
    options = parser.parse_args()
    runtime.llama_cpp()._logger.set_verbose(False)
    with tempfile.TemporaryDirectory() as folder, LocalRpcServer() as server:
        runner = Grid(Path(folder), server.devices[0])
        found = map(runner.run, grid()[:: options.every])
        lines = record(found, options.out, head={"machine": describe()}, quiet=True)[1:]
    for line in lines:
        if line["outcome"] != "ok":
            print(line["cell"], line["outcome"])
    print(summary(lines))
    return int(any(line["outcome"] != "ok" and not line["outcome"].startswith("refused") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
