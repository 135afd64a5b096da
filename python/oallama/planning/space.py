"""What all planners of one request share: the model's graphs, the machine's times, budgets, and the contexts to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import OallamaError
from ..plan import ContextSettings
from ..profiling.profile import Profile
from .budget import Budget
from .cost import CostModel, Workload
from .drafts import Drafts, Measured, MemoryDryRun
from .operators import OperatorGraph
from .stage import Mask
from .stock import StockFlags

SMALLEST_UBATCH = 32


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
        free_ubatch: whether the micro-batch may be smaller than requested.
        fit: llama.cpp's own `--fit` under the budgets; None where it cannot be asked.
        paper, fraction: of OATO, see make_plans.
        gap, time_limit_s: of the exact planner.
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
    fit: Callable[[], StockFlags] | None = None
    paper: bool = False
    fraction: float | None = None
    gap: float = 1e-3
    time_limit_s: float = 2.0
    _drafts: dict[tuple[ContextSettings, bool], Drafts] = field(default_factory=dict)
    _whole: dict[tuple[ContextSettings, int, bytes], Measured] = field(default_factory=dict)

    @property
    def graph(self) -> OperatorGraph:
        return self.graphs[self.context.flash_attn]

    @property
    def ours(self) -> ContextSettings:
        """The requested context without the memory of logits nobody reads."""
        return replace(self.context, n_outputs_max=self.n_outputs_max)

    def forms(self) -> list[str]:
        """Settings of flash_attn to choose from, the requested one first: those whose times are known."""
        return [flash for flash in self.graphs if flash == self.context.flash_attn or self._has_times(flash)]

    def sizes(self) -> list[int]:
        """Micro-batches to choose from, the requested one first."""
        sizes = [self.context.n_ubatch]
        while self.free_ubatch and sizes[-1] // 2 >= SMALLEST_UBATCH:
            sizes.append(sizes[-1] // 2)
        return sizes

    def _has_times(self, flash: str) -> bool:
        """Whether attention of this form was measured on every device."""
        known = {entry.device for entry in self.profile.attention if entry.flash == (flash != "off")}
        return known >= {"CPU", *self.accelerators}

    def drafts(self, context: ContextSettings, host_only: bool = False) -> Drafts:
        """Drafts in one context; host_only: for plans that do not know the accelerators."""
        key = (context, host_only)
        if key not in self._drafts:
            names = () if host_only else self.accelerators
            costs = CostModel(self.graphs[context.flash_attn], self.profile, names, context)
            self._drafts[key] = Drafts(costs, self.memory, self.budgets, self.workload)
        return self._drafts[key]

    def whole(self, drafts: Drafts, device: int, upload: Mask) -> Measured:
        """Everything on one accelerator, dry-run once; weights that may be uploaded need room for those in flight."""
        key = (drafts.costs.context, device, upload.tobytes())
        if key not in self._whole:
            placement = drafts.uniform(device, upload=upload)
            if upload.any():
                # A weight in flight takes room only when some weight is on the host: the largest one is.
                home = placement.targets.copy()
                home[int(np.argmax(np.where(upload, drafts.costs.nbytes, 0)))] = 0
                placement = replace(placement, targets=home)
            self._whole[key] = drafts.measure(drafts.by_placement(placement))
        return self._whole[key]


def too_small(drafts: Drafts, smallest: Measured) -> BudgetTooSmall:
    return BudgetTooSmall(
        f"the budget {drafts.describe_budget()} is too small for the KV cache, compute buffers and "
        f"norms: the minimum is {drafts.describe_need(smallest)}; raise the budget, lower n_ctx or n_ubatch, "
        "or quantise the KV cache"
    )
