"""`oallama cluster`: one model on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import say
from oallama.cluster.pipeline.pipeline import Options
from oallama.cluster.ranks import hosts as hosts_file
from oallama.cluster.ranks import launch
from oallama.cluster.ranks.comm import ALGORITHMS, WIRES
from oallama.cluster.ranks.mpi import Host
from oallama.cluster.ranks.rank import RankJob
from oallama.errors import OallamaError

from . import cluster_plan
from .options import Json, Model

app = typer.Typer(
    help="One model on several hosts: ranks over MPI, or a pipeline of layers over RPC devices.", no_args_is_help=True
)
app.command("plan")(cluster_plan.plan)
app.command("probe")(cluster_plan.probe)


@app.command("run", context_settings={"allow_extra_args": True})
def run(
    context: typer.Context,
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The prompt; leave it out with --serve.")] = "",
    ranks: Annotated[int | None, typer.Option("-n", "--ranks", min=1, help="Ranks; default: all slots.")] = None,
    hosts: Annotated[
        Path | None, typer.Option(help="Hosts file, `name slots=N` a line; default: this machine alone.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the OpenAI API on rank 0.")] = False,
    host: Annotated[str, typer.Option(help="With --serve: address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --serve: port to listen on.")] = 8080,
    ctx: Annotated[int, typer.Option(min=1, help="Tokens of context.")] = 4096,
    ubatch: Annotated[int, typer.Option(min=1, help="Most tokens of one graph (micro-batch).")] = 512,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of each rank.")] = 1,
    device: Annotated[str, typer.Option(help="What each rank computes on.")] = "CPU",
    split: Annotated[str | None, typer.Option(help="Shares of the model by rank, 3,1,1; default: measured.")] = None,
    network: Annotated[str | None, typer.Option(help="Network between the hosts, as 10.0.0.0/24.")] = None,
    ssh_agent: Annotated[Path | None, typer.Option(help="Starts programs on hosts in place of ssh.")] = None,
    allreduce: Annotated[str, typer.Option(help=f"{', '.join(ALGORITHMS)}; auto: by measured links.")] = "auto",
    wire: Annotated[
        str, typer.Option(help="Between hosts: native or q8 (a quarter of the bytes, not exact).")
    ] = "native",
    memory: Annotated[
        str, typer.Option(help="resident, or minimal: ranks keep the weights they compute with, the others in a file.")
    ] = "resident",
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds until a rank that others wait for is given up.")
    ] = 60.0,
    n_generate: Annotated[int, typer.Option("--n-generate", min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.8,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Run layers over RPC devices by this plan of `cluster plan`, in place of ranks.")
    ] = None,
    cache: Annotated[bool, typer.Option(help="With --plan: devices keep weights for the next time.")] = True,
    threshold: Annotated[
        float, typer.Option(min=1.01, help="With --plan: a link this many times slower makes a new plan.")
    ] = 1.5,
    json: Json = False,
) -> None:
    """Run a model over ranks, or by a plan; arguments after -- go to llama-server (--serve) unchanged."""
    if bool(prompt) == serve:
        raise OallamaError("give a prompt to complete, or --serve to serve the OpenAI API")
    if plan:
        _refuse_beside_plan(context)
        server = ("--host", host, "--port", str(port), *context.args) if serve else None
        options = Options(threshold, cache, n_threads=threads if _is_given(context, "threads") else 0)
        code = cluster_plan.run_plan(
            model,
            plan,
            prompt,
            server=server,
            options=options,
            n_generate=n_generate,
            temperature=temperature,
            seed=seed,
            ssh_agent=ssh_agent,
            json=json,
        )
        raise typer.Exit(code)
    for what, name, choices in (
        ("--allreduce", allreduce, ALGORITHMS),
        ("--wire", wire, WIRES),
        ("--memory", memory, ("resident", "minimal")),
    ):
        if name not in choices:
            raise OallamaError(f"unknown {what} {name!r}; expected one of {', '.join(choices)}")
    listed = hosts_file.load_hosts(hosts) if hosts else [Host(hosts_file.LOCAL, ranks or 1)]
    placed = tuple(hosts_file.place(listed, ranks))
    group = launch.Group(
        placed,
        n_threads=threads,
        device=device,
        network=network,
        ssh_agent=str(ssh_agent) if ssh_agent else None,
        algorithm=allreduce,
        wire=wire,
        memory=memory,
        timeout_s=timeout,
    )
    if group.n_ranks < 2:
        raise OallamaError("tensor parallelism needs two ranks or more (-n); for one use `oallama run` or `serve`")
    job = RankJob(
        model=str(model.resolve()),
        shares=_shares(split, group.n_ranks),
        server=("--host", host, "--port", str(port), *context.args) if serve else None,
        prompt=prompt,
        n_generate=n_generate,
        temperature=temperature,
        seed=seed,
        n_ctx=ctx,
        n_ubatch=ubatch,
        json=json,
    )
    job = launch.prepare(group, job)
    where = ", ".join(f"{h.name} ({h.slots})" for h in placed)
    say(f"{model.name} over {group.n_ranks} ranks on {where}: {', '.join(f'{s:.1%}' for s in job.shares)} of it")
    if serve:
        say(f"serving on http://{host}:{port} (OpenAI API under /v1)")
        raise typer.Exit(launch.serve(group, job, say))
    raise typer.Exit(launch.run(group, job))


def _is_given(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _refuse_beside_plan(context: typer.Context) -> None:
    """A plan brings the devices and the context; what is about ranks says nothing to it."""
    about_ranks = ("ranks", "hosts", "split", "network", "allreduce", "wire", "memory", "device", "timeout")
    for name in (*about_ranks, "ctx", "ubatch"):
        if _is_given(context, name):
            raise OallamaError(f"--{name} says nothing to a plan, which brings devices and context; leave it out")


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
