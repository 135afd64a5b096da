"""`oallama cluster plan` and `probe`: how a model runs on a cluster, decided by measurements."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

from oallama.base.printing import print_json, say
from oallama.cluster.allocation.allocation import Solver
from oallama.cluster.allocation.cluster_plan import ClusterPlan
from oallama.cluster.allocation.devices import ClientEntry, ClusterFile, load_devices
from oallama.cluster.allocation.explain import explain
from oallama.cluster.join.known import entries_of
from oallama.cluster.pipeline.agent import FREE_SHARE
from oallama.cluster.pipeline.measure import measure_network
from oallama.cluster.pipeline.members import members
from oallama.cluster.spread.decide import Question, decide
from oallama.data.workload import Workload
from oallama.engine import native
from oallama.engine.load_settings import Settings
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.views.cluster import render_candidates, render_explanation, render_network

from .groups import grouped
from .options import Json, Kernels, Model, Sizes, Threads, TypeK, TypeV, settings
from .terminal import out, progress_bar, warn_if_busy

Devices = Annotated[Path | None, typer.Option("--devices", help="devices.toml: the hosts of the cluster.")]
Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts", help="Hosts that joined (`cluster hosts`), or addresses of RPC servers: a,b,10.0.0.4:50052."
    ),
]
SshAgent = Annotated[Path | None, typer.Option(help="Starts programs on hosts in place of ssh.")]
PROBE_BYTES = 16384  # of 4096 values in f32 (docs/sources.md, 5)


@dataclass(frozen=True)
class Loaded:
    """How the model is loaded."""

    ctx: Annotated[int, typer.Option(min=1, help="Tokens of context.")] = 4096
    ubatch: Annotated[int, typer.Option(min=1, help="Most tokens of one graph (micro-batch).")] = 512
    type_k: TypeK = "f16"
    type_v: TypeV = "f16"
    threads: Threads = 0

    def settings(self, parallel: int) -> Settings:
        kernels = Kernels(self.type_k, self.type_v, threads=self.threads)
        return settings(Sizes(self.ctx, ubatch=self.ubatch), kernels, parallel)


@dataclass(frozen=True)
class Request:
    """What to make fast."""

    n_prompt: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens of the request; default: 512, at most half the context.")
    ] = None
    n_generate: Annotated[int, typer.Option(min=1, help="Generated tokens of the request.")] = 128
    parallel: Annotated[int, typer.Option(min=1, help="Requests at once; their prompts come one after another.")] = 1

    def workload(self, n_ctx: int) -> Workload:
        """Raises OallamaError when it does not fit a context of n_ctx tokens."""
        n_prompt = self.n_prompt or autoplan.default_workload(n_ctx, self.parallel).n_prompt
        if (need := self.parallel * (n_prompt + self.n_generate)) > n_ctx:
            raise OallamaError(f"the request takes {need} tokens, the context has {n_ctx}; raise --ctx")
        return Workload(n_prompt, self.n_generate, 0, self.parallel)


@dataclass(frozen=True)
class Ways:
    """Which ways are compared, and how."""

    network: Annotated[str | None, typer.Option(help="Network that ranks would talk over, as 10.0.0.0/24.")] = None
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the fastest ways, and take the one that is fastest then.")
    ] = False
    solver: Annotated[str, typer.Option(help=f"Of the pipeline: {', '.join(get_args(Solver))}.")] = "grouped"


@grouped
def plan(
    model: Model,
    *,
    devices: Devices = None,
    hosts: Hosts = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the plan.")] = None,
    request: Request,
    loaded: Loaded,
    ways: Ways,
    ssh_agent: SshAgent = None,
    json: Json = False,
) -> None:
    """Measure hosts and links; decide whether the model stays on one host, and else how it is spread."""
    if ways.solver not in get_args(Solver):
        raise OallamaError(f"unknown --solver {ways.solver!r}; expected one of {', '.join(get_args(Solver))}")
    if ways.verify and request.parallel > 1:
        raise OallamaError("--verify measures one request at a time; leave it out with --parallel")
    quiet()
    cluster = cluster_of(devices, hosts)
    if cluster.links == "direct":
        raise OallamaError(f'{devices}: links = "direct" cannot be run: ggml\'s RPC sends all data via the client')
    asked = request.workload(loaded.ctx)
    warn_if_busy()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    question = Question(
        *(model, cluster, loaded.settings(request.parallel), asked),
        solver=ways.solver,  # type: ignore[arg-type]
        network=ways.network,
        verify=ways.verify,
    )
    made, pipeline = decide(question, _agent(ssh_agent), progress_bar)
    if output:
        made.save(output)
    if json:
        print(made.to_json(), end="")
        return
    out.print(render_network(made.problem.network, cluster.client.name))
    if pipeline:
        out.print(render_explanation(explain(pipeline)))
    out.print(render_candidates(made))
    if output:
        say(f"written to {output}; run it with `oallama cluster run {model} PROMPT --plan {output}`")


def plan_for_hosts(model: Path, hosts: str, loaded: Loaded, n_generate: int, agent: str | None) -> ClusterPlan:
    """The plan for one request on hosts that joined and this one."""
    quiet()
    warn_if_busy()
    asked = Request(n_generate=n_generate).workload(loaded.ctx)
    question = Question(model, cluster_of(None, hosts), loaded.settings(asked.n_parallel), asked)
    made, _ = decide(question, agent, progress_bar)
    return made


def cluster_of(devices: Path | None, hosts: str | None) -> ClusterFile:
    """The cluster of a devices.toml, or of hosts that joined and this one. Raises OallamaError unless one is given."""
    if (devices is None) == (hosts is None):
        raise OallamaError("name the hosts: --devices devices.toml, or --hosts a,b for hosts that joined")
    if devices:
        return load_devices(devices)
    assert hosts is not None
    entries = entries_of([name.strip() for name in hosts.split(",")])
    return ClusterFile(ClientEntry(memory_bytes=int(FREE_SHARE * native.core().host_memory())), tuple(entries))


def probe(devices: Devices = None, hosts: Hosts = None, ssh_agent: SshAgent = None, json: Json = False) -> None:
    """Measure the links between all hosts: latency, bandwidth, jitter, loss."""
    quiet()
    cluster = cluster_of(devices, hosts)
    with members(cluster.devices, _agent(ssh_agent)) as found, progress_bar("measuring") as report:
        none = {member.name: 0.0 for member in found}
        network = measure_network(cluster.client.name, found, PROBE_BYTES, none, report)
    if json:
        print_json(network.to_dict())
    else:
        out.print(render_network(network, cluster.client.name))


def _agent(path: Path | None) -> str | None:
    return str(path) if path else None
