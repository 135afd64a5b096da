"""Ranks over hosts of a cluster: which of them, their shares, and how long they would take. Sums are measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oallama.data.plan import HOST
from oallama.data.workload import Workload
from oallama.errors import OallamaError

from ..allocation.candidates import Candidate, RankHost, RankPlan
from ..allocation.problem import Problem
from ..pipeline.kernels import kind_of
from ..pipeline.measure import Model
from ..pipeline.members import Member, Progress
from ..ranks import launch
from ..ranks.hosts import LOCAL
from ..ranks.mpi import Host
from ..ranks.rank import OURS, RANK_KERNELS, library
from ..ranks.shards import check_reports, shares
from .rank_times import RankTimes, predict_ranks


def rank_group(plan: RankPlan, agent: str | None) -> launch.RankGroup:
    """The plan's ranks, one a host."""
    hosts = tuple(Host(host.host, 1, host.n_threads) for host in plan.hosts)
    return launch.RankGroup(hosts, device=plan.device, network=plan.network, ssh_agent=agent, kernels=plan.kernels)


def rank_candidates(
    path: Path,
    model: Model,
    problem: Problem,
    members: Sequence[Member],
    request: Workload,
    tiled: Mapping[str, Sequence[str]],
    network: str | None,
    agent: str | None,
    progress: Progress,
) -> list[Candidate]:
    """Ranks on this host and the nearest one, the two nearest ones, and so on.

    tiled: by device, the kinds of weights that our kernels multiply faster. network: CIDR that the hosts share, None:
    MPI finds it.
    """
    client = problem.client.name
    usable: list[Member] = []
    found: list[Candidate] = []
    for member in members:
        if why := _why_not(member):
            found.append(Candidate(f"ranks with {member.name}", "ranks", why_not=why))
        else:
            usable.append(member)
    nbytes = model.settings.n_ubatch * problem.embedding.output_bytes
    usable.sort(key=lambda member: problem.network.link(client, member.name).mean_s(nbytes))
    for n in range(1, len(usable) + 1):
        near = usable[:n]
        name = f"ranks on {client}, {', '.join(member.name for member in near)}"
        progress(n - 1, len(usable), name)
        try:
            kernels = _kernels(model, [tiled.get(who, ()) for who in (client, *(m.name for m in near))])
            found.append(_candidate(name, path, model, problem, near, request, kernels, network, agent))
        except OallamaError as error:
            found.append(Candidate(name, "ranks", n + 1, why_not=str(error)))
    return found


def _why_not(member: Member) -> str:
    """Why a device's host can run no rank; "" if it can."""
    entry = member.entry
    if member.hello["device"] != HOST:
        return f"ranks of a plan compute on CPUs, {member.name} is {member.hello['device']}"
    if entry.is_local:
        return f"{member.name} is on this host, which has a rank already"
    if entry.ssh_options or (entry.python or sys.executable) != sys.executable:
        return (
            f"MPI starts the same program by plain ssh on every host; {member.name} has its own python or ssh_options"
        )
    return ""


def _candidate(
    name: str,
    path: Path,
    model: Model,
    problem: Problem,
    members: Sequence[Member],
    request: Workload,
    kernels: str,
    network: str | None,
    agent: str | None,
) -> Candidate:
    library()
    client = problem.client.name
    hosts = [RankHost(client, LOCAL, model.settings.n_threads, 0.0)]
    hosts += [RankHost(m.name, m.entry.host, m.entry.threads or m.hello["threads"], 0.0) for m in members]
    group = rank_group(RankPlan(tuple(hosts), network=network), agent)
    launch.check_hosts(group)
    reports = launch.look(
        group, path, sorted({n * problem.embedding.output_bytes for n in _row_counts(model, request)})
    )
    check_reports(reports)
    parts = shares(reports, kernels=kernels)
    plan = RankPlan(
        tuple(RankHost(h.name, h.host, h.n_threads, part) for h, part in zip(hosts, parts, strict=True)),
        kernels=kernels,
        network=network,
    )
    times = RankTimes(
        shares={host.name: host.share for host in plan.hosts},
        sums=tuple((int(n), float(s)) for n, s in reports[0]["sums"]),
        slower=_slower(hosts, reports, kernels),
        n_vocab=model.graph.tensor["output.weight"].ne[1],
    )
    ttft, tpot = predict_ranks(problem, times, request, model.settings.n_ubatch)
    return Candidate(name, "ranks", len(hosts), ttft, tpot, ranks=plan)


def _kernels(model: Model, tiled: Sequence[Sequence[str]]) -> str:
    """Whose kernels: ours where every host multiplies most of the layers' bytes faster by them."""
    weights = [t for t in model.graph.tensors if t.layer is not None]
    most = sum(weight.nbytes for weight in weights) / 2
    faster = (sum(weight.nbytes for weight in weights if kind_of(weight) in kinds) for kinds in tiled)
    return OURS if all(nbytes > most for nbytes in faster) else RANK_KERNELS[0]


def _row_counts(model: Model, request: Workload) -> set[int]:
    """Tokens of the passes that ranks sum, and one row."""
    return {1, request.n_parallel, *(n for n, _ in request.chunks(model.settings.n_ubatch))}


def _slower(hosts: Sequence[RankHost], reports: Sequence[Mapping[str, Any]], kernels: str) -> dict[str, float]:
    """Ranks that share cores slow each other down: the largest matrix, measured by all at once and by each alone."""
    found = {}
    for host, report in zip(hosts, reports, strict=True):
        together, alone = report["kernels"][kernels], report["alone"][kernels]
        found[host.name] = max(1.0, together / alone) if together and alone else 1.0
    return found
