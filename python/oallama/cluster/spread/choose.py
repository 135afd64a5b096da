"""Every way to run a model on a cluster for a request, and the plan with the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..allocation.allocation import Allocation, DoesNotFit
from ..allocation.baselines import baselines
from ..allocation.candidates import Candidate, choose
from ..allocation.cluster_plan import ClusterPlan
from ..allocation.overlap import Layers, overlapping
from ..allocation.passes import micro_batches, prompt_passes, request_seconds
from ..allocation.predict import ExpectedLatency
from ..allocation.problem import Problem

PIPELINE, OVERLAP = "pipeline", "two parts at once"


def pipeline_candidates(problem: Problem, pipeline: Allocation | DoesNotFit, plan: ClusterPlan) -> list[Candidate]:
    """The solver's pipeline, what one would do without a solver, and two parts that compute prompts at once.

    Each has the micro-batches with which it is fastest. Equal allocations are one candidate.
    """
    found: dict[Layers, Candidate] = {}
    missing, first = [], problem.settings.first_layer
    best, solved = (pipeline.layers, pipeline.solved) if isinstance(pipeline, Allocation) else (None, None)
    ways: dict[str, Layers | None] = {PIPELINE: best, **baselines(problem)}
    if len(prompt_passes(plan.request, min(micro_batches(plan.request, plan.context.n_ubatch)), 0)) > 1:
        ways[OVERLAP] = overlapping(problem, lambda layers: _fastest(plan, layers)[0])
    for name, layers in ways.items():
        if layers is None:
            why = str(pipeline) if name == PIPELINE else "the layers do not fit"
            missing.append(Candidate(name, "pipeline", why_not=why))
        elif first not in (None, layers[0]):
            missing.append(Candidate(name, "pipeline", why_not=f"the first layer must be on {first} (first_layer)"))
        elif layers in found:
            same = found[layers]
            found[layers] = replace(same, name=f"{same.name}, {name}")
        else:
            _, n_ubatch, times = _fastest(plan, layers)
            n_hosts = len({problem.client.name, *layers})
            made = Candidate(name, "pipeline", n_hosts, times.ttft_s, times.tpot_s, layers=layers, n_ubatch=n_ubatch)
            found[layers] = replace(made, solved=solved if name == PIPELINE else None)
    return [*found.values(), *missing]


def _fastest(plan: ClusterPlan, layers: Layers) -> tuple[float, int, ExpectedLatency]:
    """Seconds of the plan's request with these layers, the tokens of a micro-batch, and the times."""
    found = []
    for n_ubatch in micro_batches(plan.request, plan.context.n_ubatch):
        times = plan.with_micro_batches(n_ubatch).allocated(plan.problem, layers, 0.0).predict(plan.request)
        found.append((request_seconds(plan.request, times.ttft_s, times.tpot_s), n_ubatch, times))
    return min(found, key=lambda each: (each[0], -each[1]))


def plan_of(plan: ClusterPlan, candidate: Candidate) -> ClusterPlan:
    """The plan that runs this candidate."""
    plan = plan.with_micro_batches(candidate.n_ubatch or plan.context.n_ubatch)
    return replace(plan, chosen=candidate, layers=candidate.layers or plan.layers)


def decided(plan: ClusterPlan, candidates: Sequence[Candidate]) -> ClusterPlan:
    """The plan with the fastest of the candidates. Raises OallamaError when none can be run."""
    return replace(plan_of(plan, choose(candidates, plan.request)), candidates=tuple(candidates))
