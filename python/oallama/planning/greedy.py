"""OATO as a planner: Algorithm 1 under the budget, with the repairs that `oato.schedule` names."""

from __future__ import annotations

import numpy as np

from ..data.workload import Workload
from .fitting import Fitted, Proposal, fit
from .oato import schedule
from .plan_builder import PlanBuilder
from .space import Space, too_small
from .stage import Mask


def oato(space: Space) -> tuple[PlanBuilder, Fitted]:
    """OATO's plan for one accelerator, with or without uploads, whichever is predicted to be faster.

    Raises BudgetTooSmall when KV cache, compute buffers and norms alone exceed the budget.
    """
    builder = space.builder(space.context if space.paper else space.ours)
    workload = Workload(0, space.workload.n_generate) if space.paper else space.workload
    nothing = np.zeros(len(builder.costs.targets), dtype=bool)
    variants = [nothing]
    if not space.paper and (upload := builder.costs.upload_pays(workload)).any():
        # Uploads speed prefill up but need device memory for the weights in flight: both ways are planned and compared.
        variants.insert(0, upload)
    fitted = [_Greedy(space, builder, workload, upload).fit() for upload in variants]
    found = [f for f in fitted if f is not None]
    if not found:
        raise too_small(builder, builder.dry_run(builder.by_homes(builder.uniform(1, builder.uniform(0).targets))))
    return builder, min(found, key=lambda f: f.dry_run.seconds)


class _Greedy:
    """OATO for one choice of uploads."""

    def __init__(self, space: Space, builder: PlanBuilder, workload: Workload, upload: Mask) -> None:
        self.space, self.builder, self.workload, self.upload = space, builder, workload, upload
        self.start = builder.uniform(1, builder.uniform(0).targets, upload)
        self.inputs = builder.costs.oato_inputs(workload, self.start)
        budget = builder.budgets[builder.accelerators[0]]
        careful = space.paper and budget.bytes_total is not None
        self.fraction = space.fraction if space.fraction is not None else 0.90 if careful else 1.0

    def fit(self) -> Fitted | None:
        builder, nbytes = self.builder, self.builder.costs.nbytes
        whole = self.space.whole(builder, 1, self.upload)
        on_device = int(nbytes.sum()) - (int(np.where(self.upload, nbytes, 0).max()) if self.upload.any() else 0)
        found = fit(builder, self._choose, [builder.used(whole)[0] - on_device], int(nbytes.min()))
        if found is None:
            empty = self._choose([0])
            dry_run = builder.dry_run(builder.by_homes(empty.homes, empty.affinity))
            found = Fitted(empty, dry_run) if builder.fits(dry_run) else None
        return found

    def _choose(self, capacity: list[int]) -> Proposal:
        costs = self.builder.costs
        t_host, t_device, edges, anchors = self.inputs
        paper = self.space.paper
        result = schedule(
            t_host,
            t_device,
            costs.nbytes,
            max(0, capacity[0]),
            edges=edges,
            anchors=anchors,
            fraction=self.fraction,
            fill="prefix" if paper else "skip",
            skip_negative=not paper,
            transfer="current" if paper else "marginal",
            predict=self._seconds,
        )
        homes = self.builder.uniform(1, result.on_device.astype(np.int8), self.upload & ~result.on_device)
        params = {
            "paper": paper,
            "fraction": self.fraction,
            "uploads": bool(homes.upload.any()),
            "iterations": result.iterations,
            "stopped": result.reason,
        }
        return Proposal(homes, [int(costs.nbytes[result.on_device].sum())], params, result.affinity.tolist())

    def _seconds(self, on_device: Mask) -> float:
        homes = self.builder.uniform(1, on_device.astype(np.int8), self.upload)
        return self.builder.predictor.request(homes, self.workload)
