"""Whether a model stays on this host, and how it is spread if not: hosts and links are measured, all ways compared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from oallama.data.workload import Workload
from oallama.engine.load_settings import Settings

from ..allocation.allocation import Allocation, DoesNotFit, Solver, allocate
from ..allocation.cluster_plan import ClusterPlan
from ..allocation.devices import ClusterFile
from ..allocation.problem import Problem
from ..pipeline.dialogue import Progress
from ..pipeline.measure import Measured, Model, measure_problem, read_model
from ..pipeline.members import members
from .choose import decided, pipeline_candidates
from .here import stay
from .ranks import Ranks
from .trial import measured

Bar = Callable[[str], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class Question:
    """What is decided.

    Attributes:
        model: the file, as the hosts of ranks have it.
        cluster: the hosts.
        settings: how the model is loaded.
        request: what to make fast.
        solver: of the pipeline.
        network: CIDR that ranks would talk over, None: MPI finds it.
        verify: whether the fastest ways are run, and the fastest then is taken.
    """

    model: Path
    cluster: ClusterFile
    settings: Settings
    request: Workload
    solver: Solver = "grouped"
    network: str | None = None
    verify: bool = False


def decide(question: Question, agent: str | None, bar: Bar) -> tuple[ClusterPlan, Allocation | None]:
    """Measure and decide: the plan, and its pipeline, None where none fits.

    agent: starts programs on hosts in place of ssh. bar: a progress bar of a title.

    Raises:
        OallamaError: for what cannot be measured, and when the model fits in no way.
    """
    settings, request = question.settings, question.request
    read = read_model(question.model, settings, request)
    with members(question.cluster.devices, agent) as hosts, bar("measuring") as report:
        # Hosts have said what they offer.
        cluster = replace(question.cluster, devices=tuple(member.entry for member in hosts))
        measurement = measure_problem(read, cluster, hosts, report)
        problem, memory = measurement.problem, cluster.client.memory_bytes
        pipeline = _pipeline(problem, question.solver)
        made = _first_plan(read, cluster, measurement, pipeline, settings.n_threads)
        ranks = Ranks(question.model, read, problem, hosts, measurement.tiled, memory, question.network, agent)
        found = [
            stay(question.model, settings, request, memory, report),
            *pipeline_candidates(problem, pipeline, made),
            *ranks.candidates(report),
        ]
    if question.verify:
        with bar("trying") as report:
            found = measured(question.model, made, found, agent, report)
    return decided(made, found), pipeline if isinstance(pipeline, Allocation) else None


def _pipeline(problem: Problem, solver: Solver) -> Allocation | DoesNotFit:
    try:
        return allocate(problem, solver=solver)
    except DoesNotFit as error:
        return error


def _first_plan(
    read: Model, cluster: ClusterFile, measurement: Measured, pipeline: Allocation | DoesNotFit, n_threads: int
) -> ClusterPlan:
    """The pipeline, before anything is compared; all layers on the client where none fits."""
    found, problem = pipeline if isinstance(pipeline, Allocation) else None, measurement.problem
    return ClusterPlan(
        model=read.graph.model,
        context=measurement.context,
        client=cluster.client,
        devices=cluster.devices,
        problem=problem,
        layers=found.layers if found else (problem.client.name,) * len(problem.layers),
        bound_s=found.bound_s if found else 0.0,
        tiled=measurement.tiled,
        n_threads=n_threads,
        request=read.request,
    )
