"""What all planners of one request share: the model's graphs, the machine's times, budgets, and the contexts to try."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from ..data.budget import Budget
from ..data.entries import padded_rows
from ..data.operators import OperatorGraph
from ..data.plan import HOST, STREAM_SLOTS, ContextSettings, PlacementPlan
from ..data.profile import Profile
from ..data.tuning import Crossover
from ..data.workload import Workload
from ..errors import OallamaError
from .cost import CostModel
from .expert_use import ExpertUse
from .kv_cache import cache_nbytes
from .plan_builder import DryRunPlan, MemoryDryRun, PlanBuilder
from .realisation import TILED, Realisations, realise
from .stage import Mask
from .stock import StockFlags

SMALLEST_UBATCH, LARGEST_UBATCH = 32, 4096


class BudgetTooSmall(OallamaError):
    """The budget cannot hold what a plan needs at least; the message gives the minimum."""


@dataclass
class Space:
    """The request of a plan.

    Attributes:
        graphs: the model's operators by flash_attn setting: the requested one, and "off" where it may be chosen.
        accelerators: in order; empty plans for the CPU alone.
        budgets: one per accelerator.
        memory: dry run of the engine, called with draft plans.
        context: as llama.cpp would take it.
        n_outputs_max: rows with logits our own plans ask for; 0 when all may be wanted.
        free_ubatch: whether the micro-batch may be another than requested.
        free_batch: whether a micro-batch above the batch raises it.
        streams: whether weights may be streamed.
        offline_arenas: whether our own plans have their compute buffers laid out offline.
        repack: whether weights on the host may be repacked or tiled.
        host_memory: bytes that the host has free for this model; 0: unknown, so that no weight lies there twice.
        own_attention: whether our kernels may compute fused attention on CPUs.
        crossovers: of the host, by weight type, where `oallama tune` recorded them.
        all_candidates: whether "auto" makes also those that cannot come near the fastest.
        fit: llama.cpp's own `--fit` with these bytes per device; None where it cannot be asked.
        noise: other work on the machine, as `uncertainty.ranked` takes it. least_noise: what ranges take at least.
        paper, fraction: of OATO, see make_plans.
        gap, time_limit_s: of the exact planner.
        expert_use: of a mixture; None for dense models.
    """

    graphs: Mapping[str, OperatorGraph]
    profile: Profile
    accelerators: tuple[str, ...]
    budgets: Mapping[str, Budget]
    memory: MemoryDryRun
    context: ContextSettings
    workload: Workload
    n_outputs_max: int = 0
    free_ubatch: bool = False
    free_batch: bool = False
    streams: bool = True
    offline_arenas: bool = False
    repack: bool = True
    host_memory: int = 0
    own_attention: bool = True
    crossovers: Mapping[str, Crossover] = field(default_factory=dict)
    all_candidates: bool = False
    fit: Callable[[Mapping[str, int]], StockFlags] | None = None
    noise: float = 0.0
    least_noise: float = 0.0
    paper: bool = False
    fraction: float | None = None
    gap: float = 1e-3
    time_limit_s: float = 2.0
    expert_use: ExpertUse | None = None
    _builders: dict[tuple[ContextSettings, bool], PlanBuilder] = field(default_factory=dict)
    _whole: dict[tuple[ContextSettings, int, bool, bytes], DryRunPlan] = field(default_factory=dict)

    @property
    def doubted_noise(self) -> float:
        """What predicted ranges take the noise to be."""
        return max(self.noise, self.least_noise)

    @property
    def graph(self) -> OperatorGraph:
        return self.graphs[self.context.flash_attn]

    @property
    def ours(self) -> ContextSettings:
        """The requested context without the memory of logits nobody reads."""
        return replace(self.context, n_outputs_max=self.n_outputs_max)

    def stock_forms(self) -> list[ContextSettings]:
        """The context with each of llama.cpp's forms of attention whose times are known, the requested one first."""
        forms = [flash for flash in self.graphs if flash == self.context.flash_attn or self._has_times(flash)]
        return [replace(self.context, flash_attn=flash) for flash in forms]

    def forms(self) -> list[ContextSettings]:
        """`ours` with each form of attention to choose from: llama.cpp's, then fused by our kernels."""
        forms = [replace(form, n_outputs_max=self.n_outputs_max) for form in self.stock_forms()]
        return [*forms, replace(self.ours, attention="oallama")] if self.attends else forms

    @property
    def attends(self) -> bool:
        """Whether attention on the host may be computed by our kernels: it is allowed, and their times are known."""
        if not self.own_attention or self.context.flash_attn == "off" or self.paper:
            return False
        types = self.context.type_k, self.context.type_v
        return any(shape and self.profile.attends(HOST, shape, *types) for shape in {*self.graph.attention})

    @property
    def own_kernels(self) -> bool:
        """Whether the CPU alone may have our kernels: of attention, or of products."""
        tiled = any(entry.realisation == TILED and entry.device == HOST for entry in self.profile.operators)
        return self.attends or (self.repack and not self.paper and tiled)

    def sizes(self) -> list[int]:
        """Micro-batches to choose from, the requested one first."""
        sizes = [self.context.n_ubatch]
        while self.free_ubatch and sizes[-1] // 2 >= SMALLEST_UBATCH:
            sizes.append(sizes[-1] // 2)
        return sizes

    def larger_sizes(self) -> list[int]:
        """Micro-batches above the requested one that the prompt can fill, smallest first."""
        most = min(LARGEST_UBATCH, self.context.n_ctx if self.free_batch else self.context.n_batch)
        sizes = []
        n = self.context.n_ubatch
        while self.free_ubatch and n * 2 <= most and n < self.workload.n_prompt:
            n *= 2
            sizes.append(n)
        return sizes

    def with_ubatch(self, context: ContextSettings, size: int) -> ContextSettings:
        """The context with another micro-batch, and a batch that holds it."""
        return replace(context, n_ubatch=size, n_batch=max(context.n_batch, size))

    def _has_times(self, flash: str) -> bool:
        """Whether attention of this form was measured on every device."""
        known = {entry.device for entry in self.profile.attention if entry.flash == (flash != "off")}
        return known >= {"CPU", *self.accelerators}

    def builder(self, context: ContextSettings, host_only: bool = False) -> PlanBuilder:
        """PlanBuilder in one context; host_only: for plans that do not know the accelerators."""
        key = (context, host_only)
        if key not in self._builders:
            names = () if host_only else self.accelerators
            graph = self._graph_of(context, names)
            costs = CostModel(
                graph,
                self.profile,
                names,
                context,
                realisations=self.workload_realisations(graph, context),
                expert_use=self.expert_use,
            )
            self._builders[key] = PlanBuilder(costs, self.memory, self.budgets, self.workload, self.offline_arenas)
        return self._builders[key]

    def builder_of(self, plan: PlacementPlan) -> PlanBuilder:
        """PlanBuilder in the context of one of this space's plans."""
        form = plan.context.flash_attn
        # "minimal" asks for the form of attention that the graph has; its times are the graph's.
        context = replace(plan.context, flash_attn=form if form in self.graphs else self.context.flash_attn)
        return self.builder(context, host_only=plan.devices == (HOST,))

    def _graph_of(self, context: ContextSettings, names: Sequence[str]) -> OperatorGraph:
        """llama.cpp's "auto" takes the unfused form where a device has no fused one."""
        graph = self.graphs[context.flash_attn]
        types = context.type_k, context.type_v
        lacks = any(
            shape is not None and not self.profile.fuses(name, shape, *types)
            for shape, name in product(set(graph.attention), names)
        )
        return self.graphs.get("off", graph) if context.flash_attn == "auto" and lacks else graph

    def workload_realisations(self, graph: OperatorGraph, context: ContextSettings) -> Realisations:
        """How weights on the host lie there, chosen for the stages of the workload."""
        work = self.workload
        prefill = Counter(n for n, _ in work.chunks(context.n_ubatch))
        decode = [(work.n_parallel, float(max(1, work.n_generate - 1)))]
        return realise(
            graph,
            self.profile,
            decode,
            sorted(prefill.items()),
            accelerators=self.accelerators,
            repack=self.repack,
            crossovers=self.crossovers,
            spare=self._spare(graph, context),
        )

    def _spare(self, graph: OperatorGraph, context: ContextSettings) -> int:
        """Bytes of the host's memory beside all weights, all KV caches, and what a load leaves to others
        (`csrc/map/host_weights.cpp`)."""
        rows, types = padded_rows(context.n_ctx), (context.type_k, context.type_v)
        caches = sum(sum(cache_nbytes(shape, rows, *types)) for shape in graph.attention if shape)
        others = max(self.host_memory // 8, min(self.host_memory // 2, 512 * 2**20))
        return max(0, self.host_memory - others - graph.weights_bytes - int(caches))

    def whole(self, builder: PlanBuilder, device: int, moved: Mask, streams: bool = False) -> DryRunPlan:
        """Everything on one accelerator, dry-run once; weights that may be moved there need room for those in flight.

        moved: targets that are uploaded, or streamed, when they live on the host.
        """
        key = (builder.costs.context, device, streams, moved.tobytes())
        if key not in self._whole:
            homes = builder.uniform(device, upload=moved & (not streams))
            if moved.any():
                # Weights in flight take room only when some weights are on the host: the largest ones are.
                n = STREAM_SLOTS if streams else 1
                largest = np.argsort(-np.where(moved, builder.costs.nbytes, 0), kind="stable")[: min(n, moved.sum())]
                home = homes.targets.copy()
                home[largest] = 0
                stream = np.where(moved & (home == 0), 1, 0).astype(np.intp) if streams else None
                homes = replace(homes, targets=home, stream=stream)
            self._whole[key] = builder.dry_run(builder.by_homes(homes))
        return self._whole[key]


def too_small(builder: PlanBuilder, smallest: DryRunPlan) -> BudgetTooSmall:
    return BudgetTooSmall(
        f"the budget {builder.describe_budget()} is too small for the KV cache, compute buffers and "
        f"norms: the minimum is {builder.describe_need(smallest)}; raise the budget, lower n_ctx or n_ubatch, "
        "or quantise the KV cache"
    )
