"""Ranks over hosts of a cluster: which of them, their shares, and how long they would take. Sums are measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oallama.data.operators import OUTPUT
from oallama.data.plan import HOST
from oallama.errors import OallamaError

from ..allocation.candidates import Candidate, RankHost, RankPlan
from ..allocation.passes import request_passes
from ..allocation.problem import Problem
from ..pipeline.dialogue import Progress
from ..pipeline.kernels import kind_of
from ..pipeline.measure import Model
from ..pipeline.member import Member
from ..ranks import launch
from ..ranks.hosts import LOCAL
from ..ranks.mpi import Host
from ..ranks.parts import layer_parts
from ..ranks.rank import OURS, RANK_KERNELS, library
from ..ranks.shards import check_reports, shares
from .rank_times import RankTimes, predict_ranks


def rank_group(plan: RankPlan, agent: str | None) -> launch.RankGroup:
    """The plan's ranks, one a host."""
    hosts = tuple(Host(host.host, 1, host.n_threads) for host in plan.hosts)
    return launch.RankGroup(hosts, network=plan.network, ssh_agent=agent, kernels=plan.kernels)


@dataclass(frozen=True)
class Ranks:
    """Hosts that ranks may run on: this one, and those of some devices of a cluster.

    Attributes:
        path: of the model, the same on all hosts.
        model, problem: as measured.
        members: agents of the devices.
        tiled: by device, the kinds of weights that our kernels multiply faster.
        client_memory: bytes that a rank of this host may take, 0: what is free.
        network: CIDR that the hosts share, None: MPI finds it.
        agent: starts programs on hosts in place of ssh.
    """

    path: Path
    model: Model
    problem: Problem
    members: Sequence[Member]
    tiled: Mapping[str, Sequence[str]]
    client_memory: int
    network: str | None
    agent: str | None

    def candidates(self, progress: Progress) -> list[Candidate]:
        """Ranks on this host and the nearest one, the two nearest ones, and so on. MPI is started on each group."""
        client = self.problem.client.name
        reasons = {member.name: _why_not(member) for member in self.members}
        found = [Candidate(f"ranks with {name}", "ranks", why_not=why) for name, why in reasons.items() if why]
        nbytes = self.model.settings.n_ubatch * self.problem.embedding.output_bytes

        def message_s(member: Member) -> float:
            return self.problem.network.link(client, member.name).mean_s(nbytes)

        near = sorted((member for member in self.members if not reasons[member.name]), key=message_s)
        for n in range(1, len(near) + 1):
            name = f"ranks on {client}, {', '.join(member.name for member in near[:n])}"
            progress(n - 1, len(near), name)
            try:
                found.append(self._candidate(name, near[:n]))
            except OallamaError as error:
                found.append(Candidate(name, "ranks", n + 1, why_not=str(error)))
        return found

    def _candidate(self, name: str, members: Sequence[Member]) -> Candidate:
        library()
        model, request, row = self.model, self.model.request, self.problem.embedding.output_bytes
        hosts = [RankHost(self.problem.client.name, LOCAL, model.settings.n_threads, 0.0)]
        hosts += [RankHost(m.name, m.entry.host, m.entry.threads or m.hello["threads"], 0.0) for m in members]
        group = rank_group(RankPlan(tuple(hosts), network=self.network), self.agent)
        launch.check_hosts(group)
        tokens = {1, *(each.n_tokens for each in request_passes(request, model.settings.n_ubatch, 0))}
        reports = launch.look(group, self.path, sorted(n * row for n in tokens))
        check_reports(reports)
        for report, most in zip(reports, [self.client_memory, *(m.entry.memory_bytes for m in members)], strict=True):
            report["memory"] = min(report["memory"], most or report["memory"])
        kernels = self._kernels([host.name for host in hosts])
        slower = _slower(hosts, reports, kernels)
        seconds = [slower[host.name] * self._layers_s(host.name) for host in hosts]
        parts = shares(reports, seconds)
        hosts = [replace(host, share=part) for host, part in zip(hosts, parts, strict=True)]
        times = RankTimes(
            shares={host.name: host.share for host in hosts},
            sums=tuple((int(n), float(s)) for n, s in reports[0]["sums"]),
            slower=slower,
            n_vocab=model.graph.tensor[OUTPUT].ne[1],
            parts=layer_parts(model.graph, parts),
        )
        ttft, tpot = predict_ranks(self.problem, times, request, model.settings.n_ubatch)
        plan = RankPlan(tuple(hosts), kernels=kernels, network=self.network)
        return Candidate(name, "ranks", len(hosts), ttft, tpot, ranks=plan)

    def _layers_s(self, name: str) -> float:
        """Seconds of all layers on a device, for the request."""
        device = self.problem.device(name)
        return sum(self.problem.seconds_on(device, layer) for layer in self.problem.layers)

    def _kernels(self, names: Sequence[str]) -> str:
        """Whose kernels: ours where every host multiplies most of the layers' bytes faster by them."""
        weights = [t for t in self.model.graph.tensors if t.layer is not None]
        most = sum(weight.nbytes for weight in weights) / 2
        kinds = (self.tiled.get(name, ()) for name in names)
        faster = (sum(weight.nbytes for weight in weights if kind_of(weight) in known) for known in kinds)
        return OURS if all(nbytes > most for nbytes in faster) else RANK_KERNELS[0]


def _why_not(member: Member) -> str:
    """Why a device's host can run no rank; "" if it can."""
    entry = member.entry
    if not entry.has_agent:
        return f"nothing can be started where {member.name} is: it is an RPC server alone"
    if member.hello["device"] != HOST:
        return f"ranks of a plan compute on CPUs, {member.name} is {member.hello['device']}"
    if entry.is_local:
        return f"{member.name} is on this host, which has a rank already"
    if entry.ssh_options or (entry.python or sys.executable) != sys.executable:
        return (
            f"MPI starts the same program by plain ssh on every host; {member.name} has its own python or ssh_options"
        )
    return ""


def _slower(hosts: Sequence[RankHost], reports: Sequence[Mapping[str, Any]], kernels: str) -> dict[str, float]:
    """Ranks that share cores or memory slow each other down."""
    measured = (report["slower"][kernels] or 1.0 for report in reports)
    return {host.name: max(1.0, slower) for host, slower in zip(hosts, measured, strict=True)}
