"""Turns decisions (which targets, which layers on the device) into PlacementPlans and measures them by dry runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..plan import HOST, DeviceMemory, Mode, PlacementPlan, Prediction, TensorPlacement
from ..plan_export import home_layer
from .budget import Budget, format_bytes
from .cost import CostModel, Workload
from .predict import Predictor
from .stage import Mask

# memory(plan) -> {device: {"weights", "kv", "compute"}} in bytes, from the engine's allocator without loading a weight.
MemoryDryRun = Callable[[PlacementPlan | None], Mapping[str, Mapping[str, int]]]

PROMPTS = (32, 64, 128, 256, 512, 2048, 8192)
DEPTHS = (0, 512, 2048, 8192, 16384, 32768)
_NO_MEMORY = DeviceMemory(0, 0, 0)


@dataclass(frozen=True)
class Measured:
    """A draft plan with the bytes its dry run found."""

    plan: PlacementPlan
    memory: Mapping[str, DeviceMemory]
    device: str

    @property
    def on_device(self) -> DeviceMemory:
        return self.memory.get(self.device, _NO_MEMORY)


@dataclass(frozen=True)
class Drafts:
    """Builds, measures and finishes plans for one accelerator, budget and workload."""

    costs: CostModel
    predictor: Predictor
    memory: MemoryDryRun
    budget: Budget
    workload: Workload
    device: str

    # ---- limits ---------------------------------------------------------------------------------------------------

    def excess(self, used: DeviceMemory) -> int:
        """Bytes over the budget, or over the device's memory where that is known; negative is room left."""
        over = (used.total if self.budget.bytes_total is not None else used.weights) - self.budget.limit
        physical = self.costs.profile.device(self.device).memory_total
        return max(over, used.total - physical) if physical > 0 else over

    def describe_need(self, used: DeviceMemory) -> str:
        """The smallest budget that admits `used`, in the user's kind of unit, and what it is made of."""
        if self.budget.bytes_total is not None:
            mib = -(-used.total // 2**20)
            return (
                f"{mib}MiB (weights {format_bytes(used.weights)}, KV cache {format_bytes(used.kv)}, "
                f"compute buffers {format_bytes(used.compute)})"
            )
        percent = 100 * used.weights / self.costs.graph.weights_bytes
        return f"{np.ceil(percent * 10) / 10:g}% (weights {format_bytes(used.weights)})"

    # ---- building -------------------------------------------------------------------------------------------------

    def by_target(self, on_device: Mask, upload: Mask, affinity: Sequence[float] | None = None) -> PlacementPlan:
        """Targets as told; all KV caches, attention and small weights on the device, but for embeddings."""
        costs = self.costs
        target = {name: i for i, name in enumerate(costs.targets)}
        on_host = self._host_only()
        tensors = {}
        for t in costs.graph.tensors:
            i = target.get(t.name)
            stays = t.name in on_host if i is None else not on_device[i]
            mode: Mode = "resident" if not stays else "upload" if i is not None and upload[i] else "host"
            tensors[t.name] = TensorPlacement.whole(
                t.type, t.nbytes, HOST if stays else self.device, mode, self._affinity(affinity, i)
            )
        return self._plan(tensors, (self.device,) * (costs.graph.n_layer + 1))

    def by_layer(self, n_device: int) -> PlacementPlan:
        """Stock llama.cpp's `-ngl n_device`: the last layers with weights and KV cache, counting the output as one."""
        graph = self.costs.graph
        first = graph.n_layer + 1 - n_device
        layers = tuple(self.device if il >= first else HOST for il in range(graph.n_layer + 1))
        host_mode: Mode = "upload" if self.costs.op_offload else "host"
        tensors = {}
        for t in graph.tensors:
            layer = home_layer(t.name, graph.n_layer)
            device = HOST if layer is None else layers[layer]
            mode: Mode = "resident" if device != HOST else "host" if layer is None else host_mode
            tensors[t.name] = TensorPlacement.whole(t.type, t.nbytes, device, mode)
        return self._plan(tensors, layers)

    def on_host(self) -> PlacementPlan:
        """Everything on the CPU, nothing uploaded."""
        graph = self.costs.graph
        tensors = {t.name: TensorPlacement.whole(t.type, t.nbytes, HOST, "host") for t in graph.tensors}
        return self._plan(tensors, (HOST,) * (graph.n_layer + 1))

    def measure(self, plan: PlacementPlan) -> Measured:
        """The plan with the bytes of its dry run."""
        found = self.memory(plan)
        memory = {name: DeviceMemory(int(m["weights"]), int(m["kv"]), int(m["compute"])) for name, m in found.items()}
        return Measured(plan, memory, self.device)

    def finish(self, measured: Measured, name: str, params: Mapping[str, Any]) -> PlacementPlan:
        """The final plan: with budget, predicted bytes and times, and how it was made."""
        predictor, plan, costs = self.predictor, measured.plan, self.costs
        placement, n_ctx = costs.placement(plan), costs.context.n_ctx
        prompts = sorted({n for n in (*PROMPTS, self.workload.n_prompt) if 0 < n <= n_ctx})
        depths = [n for n in DEPTHS if n <= n_ctx]
        request_s = predictor.request(placement, self.workload)
        budgets = {self.device: self.budget_bytes(measured.on_device)} if self.device != HOST else {}
        return replace(
            plan,
            planner={"name": name, "params": {"budget": self.budget.text, **params}},
            budgets=budgets,
            predicted=Prediction(
                devices=dict(measured.memory),
                ttft_s={n: predictor.ttft(placement, n) for n in prompts},
                tpot_s={n: predictor.tpot(placement, n) for n in depths},
                workload=(self.workload.n_prompt, self.workload.n_generate),
                request_s=request_s,
                notes=predictor.notes(),
            ),
        )

    def budget_bytes(self, used: DeviceMemory) -> int:
        """The budget as total bytes: a share of the weights has this plan's KV cache and compute buffers on top."""
        return self.budget.limit + (0 if self.budget.bytes_total is not None else used.kv + used.compute)

    def _plan(self, tensors: Mapping[str, TensorPlacement], layers: tuple[str, ...]) -> PlacementPlan:
        graph = self.costs.graph
        return PlacementPlan(
            model=dict(graph.model),
            planner={"name": "draft", "params": {}},
            budgets={},
            context=self.costs.context,
            devices=(self.device, HOST) if self.device != HOST else (HOST,),
            layers=layers,
            tensors=tensors,
            predicted=Prediction({}, {}, {}, (self.workload.n_prompt, self.workload.n_generate), 0.0),
            tied_output=graph.tied_output,
        )

    def _host_only(self) -> set[str]:
        """Small weights that stay on the CPU: those read row by row, and matrices no operator reads."""
        ops = self.costs.graph.operators(self.costs.decode_tier)
        rows = {op.weight for op in ops if op.op == "GET_ROWS" and op.weight}
        read = {op.weight for op in ops}
        tensor = self.costs.graph.tensor
        unread = {n for n in self.costs.small if n not in read and sum(d > 1 for d in tensor[n].ne) > 1}
        return rows | unread

    @staticmethod
    def _affinity(affinity: Sequence[float] | None, i: int | None) -> float | None:
        return None if affinity is None or i is None else float(affinity[i])
