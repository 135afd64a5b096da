"""Makes PlacementPlans from homes (which device for which weight), and dry-runs and predicts them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..data.budget import Budget, format_bytes
from ..data.entries import REALISATIONS, TILED_FROM
from ..data.plan import HOST, DeviceMemory, Mode, PlacementPlan, Prediction, TensorPlacement, is_divided_by_columns
from ..data.workload import Workload, context_of_each
from .cost import CostModel
from .expected_experts import expected_experts
from .pool import pool_bytes
from .predict import Predictor
from .realisation import PLAIN, REPACKED, TILED, TWICE
from .stage import STREAMER, Homes, Ids, Mask
from .stock import StockFlags, stock_homes

# memory(plan) -> {device: {"weights", "kv", "compute"}} in bytes, from the engine's allocator without loading a weight.
MemoryDryRun = Callable[[PlacementPlan], Mapping[str, Mapping[str, int]]]

PROMPTS = (32, 64, 128, 256, 512, 2048, 8192)
DEPTHS = (0, 512, 2048, 8192, 16384, 32768)
# Below this overlap copies do not hide.
HIDES = 0.05
_OF_EXPERTS = re.compile(r"(blk\.(\d+)\.ffn_(?:up|gate|down|gate_up)_exps)\.(?:weight|bias)$")
_NO_MEMORY = DeviceMemory(0, 0, 0)
_CAUSES = ("targets", "attention", "transfers", "switches", "other", "copies")


@dataclass(frozen=True)
class DryRunPlan:
    """A plan with the bytes that its dry run found, and its predicted request time."""

    plan: PlacementPlan
    memory: Mapping[str, DeviceMemory]
    seconds: float

    def on(self, device: str) -> DeviceMemory:
        return self.memory.get(device, _NO_MEMORY)


@dataclass(frozen=True)
class PlanBuilder:
    """Makes, dry-runs and finishes plans for one context, one budget per accelerator and one workload."""

    costs: CostModel
    memory: MemoryDryRun
    budgets: Mapping[str, Budget]
    workload: Workload
    offline_arenas: bool = False  # of our own plans

    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(self.costs)

    @property
    def accelerators(self) -> tuple[str, ...]:
        return self.costs.names[1:]

    # ---- limits ---------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> list[int]:
        """Bytes of each accelerator's budget."""
        return [self.budgets[name].limit for name in self.accelerators]

    def used(self, dry_run: DryRunPlan) -> list[int]:
        """Bytes that count against each accelerator's budget: everything, or the weights alone for a share of them."""
        return [
            memory.total if self.budgets[name].bytes_total is not None else memory.weights
            for name in self.accelerators
            for memory in (dry_run.on(name),)
        ]

    def excess(self, dry_run: DryRunPlan) -> list[int]:
        """Bytes over each budget, or over the device's memory where that is known; negative is room left."""
        result = []
        for name, used, limit in zip(self.accelerators, self.used(dry_run), self.limits, strict=True):
            physical = self.costs.profile.device(name).memory_total
            over = used - limit
            result.append(max(over, dry_run.on(name).total - physical) if physical > 0 else over)
        return result

    def fits(self, dry_run: DryRunPlan) -> bool:
        return all(over <= 0 for over in self.excess(dry_run))

    def describe_need(self, dry_run: DryRunPlan) -> str:
        """The smallest budgets that admit a plan, in the user's kind of unit, and what they are made of."""
        return "; ".join(self._need(name, dry_run.on(name)) for name in self.accelerators)

    def _need(self, name: str, used: DeviceMemory) -> str:
        prefix = f"{name} " if len(self.accelerators) > 1 else ""
        if self.budgets[name].bytes_total is not None:
            mib = -(-used.total // 2**20)
            pool = f", the backend's pool {format_bytes(used.pool)}" if used.pool else ""
            return (
                f"{prefix}{mib}MiB (weights {format_bytes(used.weights)}, KV cache {format_bytes(used.kv)}, "
                f"compute buffers {format_bytes(used.compute)}{pool})"
            )
        percent = 100 * used.weights / self.costs.graph.weights_bytes
        return f"{prefix}{np.ceil(percent * 10) / 10:g}% (weights {format_bytes(used.weights)})"

    def describe_budget(self) -> str:
        return ", ".join(f"{self.budgets[name].text} of {name}" for name in self.accelerators)

    # ---- building -------------------------------------------------------------------------------------------------

    def by_homes(self, homes: Homes, affinity: Sequence[float] | None = None) -> PlacementPlan:
        """A plan from homes as device ids."""
        costs, tensors = self.costs, {}
        realised = costs.realised(homes)
        small = {name: i for i, name in enumerate(costs.small)}
        for t in costs.graph.tensors:
            i = self._target.get(t.name)
            home = homes.small[small[t.name]] if i is None else homes.targets[i]
            upload = i is not None and bool(homes.upload[i])
            start = 0 if i is None or home or homes.stream is None else int(homes.stream[i])
            mode: Mode = "resident" if home else "stream" if start else "upload" if upload else "host"
            weight = None if affinity is None or i is None else float(affinity[i])
            realisation = "" if i is None or home else REALISATIONS[realised[i]]
            placed = TensorPlacement.whole(t.type, t.nbytes, costs.names[home], mode, weight, start, realisation)
            if experts := self._experts_there(t.name, homes):
                if i is None:
                    placed = TensorPlacement.whole(t.type, t.nbytes, HOST, "host")
                placed = self._by_experts(placed, homes, experts)
            elif i is not None and homes.split is not None and (count := int(homes.split[i])):
                width = t.ne[0] if is_divided_by_columns(t.name) else t.ne[1]
                placed = TensorPlacement.divided(placed, costs.names[STREAMER], count, width)
            tensors[t.name] = placed
        plan = self._plan(tensors, tuple(costs.names[home] for home in homes.layers))
        return replace(plan, stream_caches=homes.stream_caches, offline_arenas=self.offline_arenas)

    def _by_experts(self, host: TensorPlacement, homes: Homes, experts: tuple[int, ...]) -> TensorPlacement:
        use, device = self.costs.expert_use, self.costs.names[STREAMER]
        assert use is not None
        if homes.division == "slots":
            return TensorPlacement.by_slots(host, device, len(experts), use.n_experts, experts)
        return TensorPlacement.by_experts(host, device, experts, use.n_experts)

    def _experts_there(self, name: str, homes: Homes) -> tuple[int, ...]:
        """Experts of a weight, or of the biases beside it, that also live on the first accelerator."""
        found = _OF_EXPERTS.match(name)
        if homes.division == "values" or homes.split is None or not found:
            return ()
        use, target = self.costs.expert_use, self._target.get(f"{found[1]}.weight")
        count = 0 if target is None else int(homes.split[target])
        return use.most_used(int(found[2]), count) if use and count else ()

    @cached_property
    def _target(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.costs.targets)}

    def uniform(self, device: int, targets: Ids | None = None, upload: Mask | None = None) -> Homes:
        """All KV caches, attention and small weights on one device, but for embeddings; targets there or as given."""
        costs = self.costs
        small = np.array([0 if name in self.host_only else device for name in costs.small], dtype=np.int8)
        return Homes(
            targets=np.full(len(costs.targets), device, dtype=np.int8) if targets is None else targets,
            upload=np.zeros(len(costs.targets), dtype=bool) if upload is None else upload,
            small=small,
            small_upload=np.zeros(len(small), dtype=bool),
            layers=np.full(costs.graph.n_layer_all + 1, device, dtype=np.int8),
        )

    def by_stock(self, flags: StockFlags) -> PlacementPlan:
        """What unpatched llama.cpp does with these flags."""
        costs = self.costs
        places, layers = stock_homes(costs.graph, flags, self.accelerators)
        host_mode: Mode = "upload" if costs.uploader else "host"
        tensors = {}
        for t in costs.graph.tensors:
            device = places[t.name]
            stays: Mode = "host" if t.name in self.host_only else host_mode
            tensors[t.name] = TensorPlacement.whole(t.type, t.nbytes, device, "resident" if device != HOST else stays)
        return self._plan(tensors, layers)

    def stock(self, flags: StockFlags) -> Homes:
        """The homes of `by_stock`, for predictions."""
        costs = self.costs
        places, layers = stock_homes(costs.graph, flags, self.accelerators)
        targets, small = (
            np.array([costs.ids[places[name]] for name in names], dtype=np.int8)
            for names in (costs.targets, costs.small)
        )
        stays = np.array([name in self.host_only for name in costs.small], dtype=bool)
        uploads = bool(costs.uploader)
        return Homes(
            targets=targets,
            upload=(targets == 0) & uploads,
            small=small,
            small_upload=(small == 0) & ~stays & uploads,
            layers=np.array([costs.ids[device] for device in layers], dtype=np.int8),
            realisation=np.zeros(len(targets), dtype=np.int8),
        )

    def weights(self, homes: Homes) -> list[int]:
        """Bytes of the weights that live on each accelerator as a whole; a dry run finds no less."""
        costs = self.costs
        sizes = np.array([costs.graph.tensor[name].nbytes for name in costs.small], dtype=np.int64)
        ids = range(1, len(costs.names))
        return [int(costs.nbytes[homes.targets == d].sum() + sizes[homes.small == d].sum()) for d in ids]

    def dry_run(self, plan: PlacementPlan) -> DryRunPlan:
        """The plan with the bytes of its dry run."""
        found = self.memory(plan)
        memory = {
            name: DeviceMemory(int(m["weights"]), int(m["kv"]), int(m["compute"]), pool_bytes(self.costs, plan, name))
            for name, m in found.items()
        }
        return DryRunPlan(plan, memory, self.predict(plan))

    def predict(self, plan: PlacementPlan) -> float:
        """Predicted seconds of the workload's request."""
        return self.predictor.request(self.costs.homes(plan), self.workload)

    def finish(self, dry_run: DryRunPlan, name: str, params: Mapping[str, Any]) -> PlacementPlan:
        """The final plan: with budget, predicted bytes and times, and how it was made."""
        predictor, plan, costs, work = self.predictor, dry_run.plan, self.costs, self.workload
        homes, n_ctx = costs.homes(plan), context_of_each(costs.context.n_ctx, costs.context.n_seq_max)
        prompts = sorted({n for n in (*PROMPTS, work.n_prompt) if 0 < n <= n_ctx})
        depths = sorted({n for n in (*DEPTHS, work.depth, work.middle) if n <= n_ctx})
        text = ", ".join(self.budgets[name].text for name in self.accelerators)
        more = {"depth": work.depth, "n_parallel": work.n_parallel}
        return replace(
            plan,
            planner={"name": name, "params": {**({"budget": text} if text else {}), **params, **more}},
            budgets=self._budget_bytes(dry_run),
            margins={name: margin for name in self.accelerators if (margin := self.budgets[name].margin)},
            predicted=Prediction(
                devices=dict(dry_run.memory),
                ttft_s={n: predictor.ttft(homes, n) for n in prompts},
                tpot_s={n: predictor.tpot(homes, n, work.n_parallel) for n in depths},
                workload=(work.n_prompt, work.n_generate),
                request_s=dry_run.seconds,
                notes=(
                    *predictor.notes(),
                    *self._stream_notes(plan),
                    *self._realisation_notes(dry_run),
                    *self._lazy_notes(),
                    *self._expert_notes(homes),
                ),
                parts=self._parts(homes),
                experts=expected_experts(plan, costs.expert_use),
            ),
        )

    def _stream_notes(self, plan: PlacementPlan) -> list[str]:
        if self.costs.overlap >= HIDES or not any(t.mode == "stream" for t in plan.tensors.values()):
            return []
        return [
            f"copies to {self.accelerators[0]} do not overlap with computing there: streams work one after the other"
        ]

    def _realisation_notes(self, dry_run: DryRunPlan) -> list[str]:
        """What repacking takes, and what it and our kernels gain: the request predicted with all weights plain."""
        weights = dry_run.plan.tensors.values()
        on_host = [t for t in weights if t.realisation == REPACKED]
        tiled, twice = (sum(t.realisation == r for t in weights) for r in (TILED, TWICE))
        again = sum(t.nbytes for t in weights if t.realisation == TWICE)
        if not on_host and not tiled and not twice:
            return []
        homes = self.costs.homes(dry_run.plan)
        assert homes.realisation is not None
        plain = replace(homes, realisation=np.minimum(homes.realisation, REALISATIONS.index(PLAIN)))
        gain = self.predictor.request(plain, self.workload) / dry_run.seconds - 1
        longer = f"with all weights on the host plain the request takes {gain:.1%} longer"
        notes = [f"{tiled} weights on the host take oallama's kernels"] if tiled else []
        if twice:
            notes.append(
                f"{twice} weights on the host are in memory twice: repacked ({format_bytes(again)}), and as in the "
                f"file for oallama's kernels from {TILED_FROM} tokens on"
            )
        if on_host:
            nbytes = format_bytes(dry_run.plan.repacked_nbytes - again)
            notes.append(
                f"{len(on_host)} weights on the host are repacked: {nbytes} of its memory that the mapped file does "
                "not serve"
            )
        if streamed := sum(t.nbytes for t in on_host if t.mode == "stream"):
            notes[-1] += f"; {format_bytes(streamed)} of them are read from the file as well, when they are streamed"
        return [*notes[:-1], f"{notes[-1]}; {longer}"]

    def _lazy_notes(self) -> list[str]:
        return [
            f"{t.name} ({format_bytes(t.nbytes)}) stays in the file: its rows are read when they are wanted"
            for t in self.costs.graph.tensors
            if t.lazy
        ]

    def _expert_notes(self, homes: Homes) -> list[str]:
        """What the experts on the accelerator are expected to compute."""
        use = self.costs.expert_use
        if use is None or homes.split is None or homes.division == "values":
            return []
        there: dict[int, list[int]] = {}  # layers by the number of their experts there
        for name, target in self._target.items():
            if (found := _OF_EXPERTS.match(name)) and (count := int(homes.split[target])):
                there.setdefault(count, []).append(int(found[2]))
        slots = homes.division == "slots"
        held, what = use.held(slots), f"slots for {use.n_experts}" if slots else f"of {use.n_experts}"

        def share(k: int, stage: str) -> float:
            return float(np.mean([held.share(layer, k, stage) for layer in there[k]]))

        hits = "; ".join(
            f"{k} {what} experts compute {share(k, 'decode'):.0%} of a generated token's uses, "
            f"{share(k, 'prefill'):.0%} of a prompt's"
            + (f", and {held.uploads[k]:.2g} experts are uploaded per token and layer" if slots else "")
            for k in sorted(there)[:3]
        )
        return [f"expected on {self.costs.names[STREAMER]}: {hits}"] if there else []

    def _parts(self, homes: Homes) -> dict[str, dict[str, float]]:
        """Seconds of the request by stage and cause."""
        work, predictor = self.workload, self.predictor
        chunks = work.chunks(self.costs.context.n_ubatch)
        prefill = [predictor.stage(homes, n, d, i == len(chunks) - 1) for i, (n, d) in enumerate(chunks)]
        step = predictor.stage(homes, work.n_parallel, work.middle, decode=True)
        steps = max(0, work.n_generate - 1)
        return {
            "prefill": {cause: float(sum(getattr(s, cause)[0] for s in prefill)) for cause in _CAUSES},
            "decode": {cause: float(getattr(step, cause)[0]) * steps for cause in _CAUSES},
        }

    def _budget_bytes(self, dry_run: DryRunPlan) -> dict[str, int]:
        """Budgets as total bytes: a share of the weights has this plan's KV cache and compute buffers on top."""
        result = {}
        for name in self.accelerators:
            budget, used = self.budgets[name], dry_run.on(name)
            result[name] = budget.limit + (0 if budget.bytes_total is not None else used.kv + used.working)
        return result

    def _plan(self, tensors: Mapping[str, TensorPlacement], layers: tuple[str, ...]) -> PlacementPlan:
        graph, work = self.costs.graph, self.workload
        return PlacementPlan(
            model=dict(graph.model),
            planner={"name": "draft", "params": {}},
            budgets={},
            context=self.costs.context,
            devices=(*self.accelerators, HOST),
            layers=layers,
            tensors=tensors,
            predicted=Prediction({}, {}, {}, (work.n_prompt, work.n_generate), 0.0),
            tied_output=graph.tied_output,
        )

    @cached_property
    def host_only(self) -> frozenset[str]:
        """Small weights that stay on the CPU: those read row by row, and matrices no operator reads."""
        ops = self.costs.graph.operators(self.costs.decode_tier)
        rows = {op.weight for op in ops if op.op == "GET_ROWS" and op.weight}
        read = {op.weight for op in ops}
        tensor = self.costs.graph.tensor
        unread = {n for n in self.costs.small if n not in read and sum(d > 1 for d in tensor[n].ne) > 1}
        return frozenset(name for name in {*rows, *unread} if name in set(self.costs.small))
