"""Every way to run a model on a cluster for a request, and the plan with the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..allocation.allocation import Allocation, DoesNotFit
from ..allocation.baselines import baselines
from ..allocation.candidates import Candidate, choose
from ..allocation.cluster_plan import ClusterPlan
from ..allocation.problem import Problem

PIPELINE = "pipeline"


def pipeline_candidates(problem: Problem, pipeline: Allocation | DoesNotFit, plan: ClusterPlan) -> list[Candidate]:
    """The solver's pipeline, and what one would do without a solver; equal allocations are one candidate."""
    found: dict[tuple[str, ...], Candidate] = {}
    missing, first = [], problem.settings.first_layer
    best, solved = (pipeline.layers, pipeline.solved) if isinstance(pipeline, Allocation) else (None, None)
    for name, layers in {PIPELINE: best, **baselines(problem)}.items():
        if layers is None:
            why = str(pipeline) if name == PIPELINE else "the layers do not fit"
            missing.append(Candidate(name, "pipeline", why_not=why))
        elif first not in (None, layers[0]):
            missing.append(Candidate(name, "pipeline", why_not=f"the first layer must be on {first} (first_layer)"))
        elif layers in found:
            same = found[layers]
            found[layers] = replace(same, name=f"{same.name}, {name}")
        else:
            times = plan.allocated(problem, layers, 0.0).predict(plan.request)
            n_hosts = len({problem.client.name, *layers})
            how = solved if name == PIPELINE else None
            found[layers] = Candidate(name, "pipeline", n_hosts, times.ttft_s, times.tpot_s, layers=layers, solved=how)
    return [*found.values(), *missing]


def plan_of(plan: ClusterPlan, candidate: Candidate) -> ClusterPlan:
    """The plan that runs this candidate."""
    return replace(plan, chosen=candidate, layers=candidate.layers or plan.layers)


def decided(plan: ClusterPlan, candidates: Sequence[Candidate]) -> ClusterPlan:
    """The plan with the fastest of the candidates. Raises OallamaError when none can be run."""
    return replace(plan_of(plan, choose(candidates, plan.request)), candidates=tuple(candidates))
