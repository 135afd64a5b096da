"""`oallama cluster plan` and `probe`, and `run --plan`: layers over RPC devices."""

from __future__ import annotations

import codecs
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import typer

from oallama.base.printing import print_json, say, seconds, write_text
from oallama.cluster.allocation.allocation import Solver, allocate
from oallama.cluster.allocation.cluster_plan import ClusterPlan
from oallama.cluster.allocation.devices import load_devices
from oallama.cluster.allocation.explain import explain
from oallama.cluster.pipeline.measure import measure_network, measure_problem, read_model
from oallama.cluster.pipeline.members import members
from oallama.cluster.pipeline.pipeline import HORIZON_TOKENS, Options, Pipeline, Token
from oallama.cluster.pipeline.server import server_of
from oallama.cluster.pipeline.watch import Lost
from oallama.data.plan import check_model
from oallama.engine.load_settings import Settings
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.views.cluster import render_explanation, render_network, render_prediction

from .groups import grouped
from .options import Json, Kernels, Model, Sizes, Threads, TypeK, TypeV, settings
from .terminal import out, progress_bar, warn_if_busy

Devices = Annotated[Path, typer.Option("--devices", help="devices.toml: the hosts of the cluster.")]
SshAgent = Annotated[Path | None, typer.Option(help="Starts programs on hosts in place of ssh.")]
PROMPTS = (32, 128, 512)
PROBE_BYTES = 16384  # of 4096 values in f32 (docs/sources.md, 5)


@dataclass(frozen=True)
class Loaded:
    """How the model is loaded."""

    ctx: Annotated[int, typer.Option(min=1, help="Tokens of context.")] = 4096
    ubatch: Annotated[int, typer.Option(min=1, help="Most tokens of one graph (micro-batch).")] = 512
    type_k: TypeK = "f16"
    type_v: TypeV = "f16"
    threads: Threads = 0

    def settings(self) -> Settings:
        return settings(Sizes(self.ctx, ubatch=self.ubatch), Kernels(self.type_k, self.type_v, threads=self.threads))


@grouped
def plan(
    model: Model,
    devices: Devices,
    *,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the plan.")] = None,
    loaded: Loaded,
    solver: Annotated[str, typer.Option(help=", ".join(get_args(Solver)))] = "grouped",
    ssh_agent: SshAgent = None,
    json: Json = False,
) -> None:
    """Measure devices and links, decide by the MILP who computes which layers, and say why."""
    if solver not in get_args(Solver):
        raise OallamaError(f"unknown --solver {solver!r}; expected one of {', '.join(get_args(Solver))}")
    quiet()
    cluster = load_devices(devices)
    read = read_model(model, loaded.settings())
    warn_if_busy()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with members(cluster.devices, _agent(ssh_agent)) as hosts, progress_bar("measuring") as report:
        problem = measure_problem(read, cluster, hosts, report)
    chosen = allocate(problem, solver=solver)  # type: ignore[arg-type]
    made = ClusterPlan(
        model=read.graph.model,
        context=autoplan.context_of(read.settings),
        client=cluster.client,
        devices=cluster.devices,
        problem=problem,
        layers=chosen.layers,
        bound_s=chosen.bound_s,
    )
    if output:
        made.save(output)
    if json:
        print(made.to_json(), end="")
        return
    out.print(render_network(problem.network, cluster.client.name))
    out.print(render_explanation(explain(chosen)))
    out.print(render_prediction({n: made.predict(n) for n in PROMPTS if n <= made.context.n_ctx}))
    if output:
        say(f"written to {output}; run it with `oallama cluster run {model} PROMPT --plan {output}`")


def probe(devices: Devices, ssh_agent: SshAgent = None, json: Json = False) -> None:
    """Measure the links between all hosts: latency, bandwidth, jitter, loss."""
    quiet()
    cluster = load_devices(devices)
    with members(cluster.devices, _agent(ssh_agent)) as hosts, progress_bar("measuring") as report:
        none = {member.name: 0.0 for member in hosts}
        network = measure_network(cluster.client.name, hosts, PROBE_BYTES, none, report)
    if json:
        print_json(network.to_dict())
    else:
        out.print(render_network(network, cluster.client.name))


def run_plan(
    model: Path,
    path: Path,
    prompt: str,
    *,
    server: tuple[str, ...] | None,
    options: Options,
    n_generate: int,
    temperature: float,
    seed: int | None,
    ssh_agent: Path | None,
    json: bool,
) -> int:
    """`oallama cluster run --plan`: complete the prompt, or serve; returns the exit code."""
    quiet()
    made = ClusterPlan.load(path)
    graph = autoplan.read_graph(model, Settings(n_ctx=made.context.n_ctx))
    check_model(made.model, graph.model, "make a new one with `oallama cluster plan`")
    with _pipeline(model, made, ssh_agent, options) as pipeline:
        layers = Counter(pipeline.plan.layers)
        say(f"{model.name}: layers on {', '.join(f'{name} ({n})' for name, n in layers.items())}")
        if server is not None:
            return pipeline.serve(lambda job: server_of(job, server))
        tokens = list(_shown(pipeline.complete(prompt, n_generate, temperature, seed), quiet=json))
        n_prompt = pipeline.n_prompt
        times = [token.at for token in tokens]
        ttft = times[0] if times else None
        tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        predicted = pipeline.plan.predict(n_prompt)
        if json:
            text = b"".join(token.piece for token in tokens).decode("utf-8", "replace")
            result = {"text": text, "n_prompt": n_prompt, "n_generated": len(tokens), "ttft_s": ttft, "tpot_s": tpot}
            print_json(
                {
                    **result,
                    "tokens": [token.id for token in tokens],
                    "token_times_s": times,
                    "predicted": {"ttft_s": predicted.ttft_s, "tpot_s": predicted.tpot_s},
                    "layers": pipeline.plan.layers,
                    "changes": pipeline.changes_made,
                    "memory": pipeline.memory,
                }
            )
        else:
            say(
                f"{n_prompt} prompt tokens, {len(tokens)} generated: TTFT {seconds(ttft)} (predicted "
                f"{seconds(predicted.ttft_s)}), TPOT {seconds(tpot)} (predicted {seconds(predicted.tpot_s)})"
            )
    return 0


@contextmanager
def _pipeline(model: Path, made: ClusterPlan, ssh_agent: Path | None, options: Options) -> Iterator[Pipeline]:
    """Devices that cannot be used any more are planned without."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # everything that was started ends as with Ctrl-C
    gone: list[Lost] = []
    with members(made.devices, _agent(ssh_agent), lambda name, error: gone.append(Lost(name, str(error)))) as hosts:
        pipeline = Pipeline(model, made, hosts, options, say)
        for lost in gone:
            pipeline.lose(lost, HORIZON_TOKENS)
        pipeline.check_links()
        yield pipeline


def _agent(path: Path | None) -> str | None:
    return str(path) if path else None


def _shown(tokens: Iterator[Token], quiet: bool) -> Iterator[Token]:
    """Passes tokens on and writes their text; characters may be spread over tokens."""

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        if not quiet:
            write_text(decoder.decode(token.piece))
        yield token
    if not quiet:
        write_text(decoder.decode(b"", final=True) + "\n")
