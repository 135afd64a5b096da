"""`oallama cluster`: one model on several hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import say
from oallama.cluster.pipeline.pipeline import Options
from oallama.cluster.ranks import hosts as hosts_file
from oallama.cluster.ranks import launch
from oallama.cluster.ranks.comm import ALGORITHMS, WIRES
from oallama.cluster.ranks.mpi import Host
from oallama.cluster.ranks.rank import RANK_KERNELS, RANK_MEMORIES, RankJob
from oallama.errors import OallamaError
from oallama.serving.door import Address

from . import cluster_join, cluster_plan, cluster_run
from .groups import grouped
from .options import Json, Model

app = typer.Typer(
    help="One model on several hosts: ranks over MPI, or a pipeline of layers over RPC devices.", no_args_is_help=True
)
app.command("plan")(cluster_plan.plan)
app.command("probe")(cluster_plan.probe)
app.command("join")(cluster_join.join)
app.command("add")(cluster_join.add)
app.command("hosts")(cluster_join.hosts)


@dataclass(frozen=True)
class Ranks:
    """Ranks, where they are, how they work together."""

    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=1, help="Ranks; default: all slots.")] = None
    hosts: Annotated[
        str | None,
        typer.Option(
            help="Hosts file of ranks, `name slots=N` a line; default: this machine alone. Or hosts that joined, a,b."
        ),
    ] = None
    device: Annotated[str, typer.Option(help="What each rank computes on.")] = "CPU"
    split: Annotated[str | None, typer.Option(help="Shares of the model by rank, 3,1,1; default: measured.")] = None
    network: Annotated[str | None, typer.Option(help="Network between the hosts, as 10.0.0.0/24.")] = None
    allreduce: Annotated[str, typer.Option(help=f"{', '.join(ALGORITHMS)}; auto: by measured links.")] = "auto"
    wire: Annotated[str, typer.Option(help="Between hosts: native or q8 (a quarter of the bytes, not exact).")] = (
        "native"
    )
    memory: Annotated[
        str, typer.Option(help="resident, or minimal: ranks keep the weights they compute with, the others in a file.")
    ] = "resident"
    kernels: Annotated[
        str, typer.Option(help=f"Of ranks on CPUs: {', '.join(RANK_KERNELS)}; auto: the faster ones, by measurement.")
    ] = "auto"
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds until a rank that others wait for is given up.")] = (
        60.0
    )


@dataclass(frozen=True)
class Server:
    """An API in place of one answer."""

    serve: Annotated[bool, typer.Option("--serve", help="Serve the OpenAI API on rank 0.")] = False
    host: Annotated[str, typer.Option(help="With --serve: address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --serve: port to listen on.")] = 8080

    def arguments(self, more: list[str]) -> tuple[str, ...] | None:
        """For llama-server; None without --serve."""
        return ("--host", self.host, "--port", str(self.port), *more) if self.serve else None


@dataclass(frozen=True)
class Answer:
    """How an answer is drawn, and its length."""

    n_generate: Annotated[int, typer.Option("--n-generate", min=1, help="Most tokens to generate.")] = 128
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.8
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler.")] = None


@dataclass(frozen=True)
class Layers:
    """Layers over RPC devices, in place of ranks."""

    plan: Annotated[
        Path | None, typer.Option(help="Run layers over RPC devices by this plan of `cluster plan`, in place of ranks.")
    ] = None
    cache: Annotated[bool, typer.Option(help="With --plan: devices keep weights for the next time.")] = True
    threshold: Annotated[
        float, typer.Option(min=1.01, help="With --plan: a link this many times slower makes a new plan.")
    ] = 1.5


@dataclass(frozen=True)
class Loaded:
    """How each process loads the model, and what starts it."""

    ctx: Annotated[int, typer.Option(min=1, help="Tokens of context.")] = 4096
    ubatch: Annotated[int, typer.Option(min=1, help="Most tokens of one graph (micro-batch).")] = 512
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each rank.")] = 1
    ssh_agent: Annotated[Path | None, typer.Option(help="Starts programs on hosts in place of ssh.")] = None


@app.command("run", context_settings={"allow_extra_args": True})
@grouped
def run(
    context: typer.Context,
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; leave it out with --serve.")] = "",
    *,
    group: Ranks,
    server: Server,
    loaded: Loaded,
    answer: Answer,
    layers: Layers,
    json: Json = False,
) -> None:
    """Run a model over ranks, or by a plan; arguments after -- go to llama-server (--serve) unchanged."""
    if bool(prompt) == server.serve:
        raise OallamaError("give a prompt to complete, or --serve to serve the OpenAI API")
    joined = None if group.hosts is None or Path(group.hosts).is_file() else group.hosts
    if layers.plan or joined:
        beside, more = ("--plan", ("hosts", "ctx", "ubatch")) if layers.plan else ("hosts that joined", ())
        _refuse_ranks(context, beside, more)
        wanted = cluster_run.Wanted(
            model,
            prompt,
            address=Address(server.host, server.port).changed_by(context.args) if server.serve else None,
            arguments=tuple(context.args),
            n_generate=answer.n_generate,
            temperature=answer.temperature,
            seed=answer.seed,
            json=json,
            n_threads=loaded.threads if _is_given(context, "threads") else 0,
        )
        agent = str(loaded.ssh_agent) if loaded.ssh_agent else None
        options = Options(layers.threshold, layers.cache)
        if joined and not layers.plan:
            how = cluster_plan.Loaded(loaded.ctx, loaded.ubatch, threads=wanted.n_threads)
            made = cluster_plan.plan_for_hosts(model, joined, how, answer.n_generate, agent)
            raise typer.Exit(cluster_run.run_made(made, wanted, options, agent))
        assert layers.plan
        raise typer.Exit(cluster_run.run_plan(layers.plan, wanted, options, agent))
    for what, name, choices in (
        ("--allreduce", group.allreduce, ALGORITHMS),
        ("--wire", group.wire, WIRES),
        ("--memory", group.memory, RANK_MEMORIES),
        ("--kernels", group.kernels, ("auto", *RANK_KERNELS)),
    ):
        if name not in choices:
            raise OallamaError(f"unknown {what} {name!r}; expected one of {', '.join(choices)}")
    listed = hosts_file.load_hosts(Path(group.hosts)) if group.hosts else [Host(hosts_file.LOCAL, group.ranks or 1)]
    placed = launch.RankGroup(
        tuple(replace(host, n_threads=loaded.threads) for host in hosts_file.place(listed, group.ranks)),
        device=group.device,
        network=group.network,
        ssh_agent=str(loaded.ssh_agent) if loaded.ssh_agent else None,
        algorithm=group.allreduce,
        wire=group.wire,
        memory=group.memory,
        kernels=group.kernels,
        timeout_s=group.timeout,
    )
    if placed.n_ranks < 2:
        raise OallamaError("tensor parallelism needs two ranks or more (-n); for one use `oallama run` or `serve`")
    job = RankJob(
        model=str(model.resolve()),
        shares=_shares(group.split, placed.n_ranks),
        server=server.arguments(context.args),
        prompt=prompt,
        n_generate=answer.n_generate,
        temperature=answer.temperature,
        seed=answer.seed,
        n_ctx=loaded.ctx,
        n_ubatch=loaded.ubatch,
        json=json,
    )
    placed, job = launch.prepare(placed, job, say)
    where = ", ".join(f"{h.name} ({h.slots})" for h in placed.hosts)
    say(f"{model.name} over {placed.n_ranks} ranks on {where}: {', '.join(f'{s:.1%}' for s in job.shares)} of it")
    if server.serve:
        say(f"serving on http://{server.host}:{server.port} (OpenAI API under /v1)")
        address = Address(server.host, server.port).changed_by(context.args)
        raise typer.Exit(launch.serve(placed, job, address, say))
    raise typer.Exit(launch.run(placed, job).code)


def _is_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_ranks(context: typer.Context, beside: str, more: tuple[str, ...]) -> None:
    """Refuse options that are about ranks, and `more`."""
    about_ranks = ("ranks", "split", "network", "allreduce", "wire", "memory", "kernels", "device", "timeout")
    for name in (*about_ranks, *more):
        if _is_given(context, name):
            raise OallamaError(f"--{name} says nothing to {beside}; leave it out")


def _shares(text: str | None, n_ranks: int) -> tuple[float, ...]:
    """Shares of --split, adding up to 1; () without it."""
    if text is None:
        return ()
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) != n_ranks or any(p < 0 for p in parts) or not sum(parts) > 0:
        raise OallamaError(f"--split is {text!r}; expected {n_ranks} shares, as 3,1,1")
    return tuple(part / sum(parts) for part in parts)
