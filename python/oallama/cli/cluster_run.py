"""`oallama cluster run --plan`: on this host, as a pipeline or over ranks, as the plan says."""

from __future__ import annotations

import codecs
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from oallama.base.children import OALLAMA, die_with_parent, forwarded_signals
from oallama.base.printing import print_json, say, seconds, write_text
from oallama.cluster.allocation.candidates import RankPlan
from oallama.cluster.allocation.cluster_plan import ClusterPlan
from oallama.cluster.pipeline.members import members
from oallama.cluster.pipeline.pipeline import HORIZON_TOKENS, Options, Pipeline, Token
from oallama.cluster.pipeline.server import server_of
from oallama.cluster.pipeline.watch import Lost
from oallama.cluster.ranks import launch
from oallama.cluster.ranks.rank import RankJob
from oallama.cluster.spread.here import plan_here
from oallama.cluster.spread.ranks import rank_group
from oallama.data.plan import PlacementPlan, check_model
from oallama.engine.load_settings import Settings
from oallama.engine.runtime import quiet
from oallama.loading import autoplan
from oallama.loading.completion import complete, warm_up
from oallama.serving.door import Address

from .terminal import progress_bar


@dataclass(frozen=True)
class Wanted:
    """What a plan is run for.

    address: where to serve, None: complete the prompt. arguments: more for llama-server. n_threads: of this host, 0:
    the plan's.
    """

    model: Path
    prompt: str
    address: Address | None
    arguments: tuple[str, ...]
    n_generate: int
    temperature: float
    seed: int | None
    json: bool
    n_threads: int = 0

    @property
    def server(self) -> tuple[str, ...] | None:
        """All arguments for llama-server; None without one."""
        if self.address is None:
            return None
        return ("--host", self.address.host, "--port", str(self.address.port), *self.arguments)


def run_plan(path: Path, wanted: Wanted, options: Options, agent: str | None) -> int:
    """Complete the prompt, or serve, by a plan of `cluster plan`; returns the exit code."""
    quiet()
    plan = ClusterPlan.load(path)
    graph = autoplan.read_graph(wanted.model, Settings(n_ctx=plan.context.n_ctx))
    check_model(plan.model, graph.model, "make a new one with `oallama cluster plan`")
    return run_made(plan, wanted, options, agent)


def run_made(plan: ClusterPlan, wanted: Wanted, options: Options, agent: str | None) -> int:
    """As `run_plan`, by a plan that was just made."""
    wanted = replace(wanted, n_threads=wanted.n_threads or plan.n_threads)
    chosen = plan.chosen
    if chosen and chosen.ranks:
        return _run_ranks(plan, chosen.ranks, wanted, agent)
    if chosen and chosen.way == "here":
        return _run_here(plan, wanted)
    return _run_pipeline(plan, wanted, replace(options, n_threads=wanted.n_threads), agent)


def _run_here(plan: ClusterPlan, wanted: Wanted) -> int:
    settings = Settings(**asdict(plan.context), n_threads=wanted.n_threads)
    with progress_bar("preparing", announces=True) as report:
        made = plan_here(wanted.model, settings, plan.request, report)
    say(f"{wanted.model.name}: on this host alone")
    if wanted.address:
        return _serve_here(made, wanted, wanted.address)
    from oallama.llama import Llama

    n = wanted.n_threads
    threads: dict[str, Any] = {"n_threads": n, "n_threads_batch": n} if n else {}
    llm = Llama(str(wanted.model), plan=made, verbose=False, **threads)
    warm_up(llm)  # as the other ways do
    clock, text = complete(llm, wanted.prompt, wanted.n_generate, wanted.temperature, wanted.seed, quiet=wanted.json)
    n_prompt = len(llm.tokenize(wanted.prompt.encode()))
    llm.close()
    if wanted.json:
        times = {"ttft_s": clock.ttft_s, "tpot_s": clock.tpot_s, "token_times_s": clock.times}
        print_json({"way": "here", "text": text, "n_prompt": n_prompt, "n_generated": len(clock.times), **times})
    else:
        say(clock.summary(n_prompt))
    return 0


def _serve_here(made: PlacementPlan, wanted: Wanted, address: Address) -> int:
    with tempfile.TemporaryDirectory(prefix="oallama-") as folder:
        file = Path(folder) / "plan.json"
        made.save(file)
        command = [*OALLAMA, "serve", str(wanted.model), "--plan", str(file)]
        command += ["--host", address.host, "--port", str(address.port), "--", *wanted.arguments]
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)
        with forwarded_signals(process) as asked_to_end:
            code = process.wait()
        return 0 if asked_to_end else code


def _run_ranks(plan: ClusterPlan, ranks: RankPlan, wanted: Wanted, agent: str | None) -> int:
    group = rank_group(ranks, agent)
    context = plan.context
    job = RankJob(
        model=str(wanted.model.resolve()),
        shares=tuple(host.share for host in ranks.hosts),
        server=wanted.server,
        prompt=wanted.prompt,
        n_generate=wanted.n_generate,
        temperature=wanted.temperature,
        seed=wanted.seed,
        n_ctx=context.n_ctx,
        n_ubatch=context.n_ubatch,
        n_parallel=context.n_seq_max,
        json=wanted.json,
    )
    group, job = launch.prepare(group, job, say)
    say(f"{wanted.model.name}: ranks on {', '.join(f'{h.name} ({h.share:.1%})' for h in ranks.hosts)}")
    if wanted.address:
        return launch.serve(group, job, wanted.address, say)
    return launch.run(group, job).code


def _run_pipeline(plan: ClusterPlan, wanted: Wanted, options: Options, agent: str | None) -> int:
    with _pipeline(wanted.model, plan, agent, options) as pipeline:
        layers = Counter(pipeline.plan.layers)
        say(f"{wanted.model.name}: layers on {', '.join(f'{name} ({n})' for name, n in layers.items())}")
        if (server := wanted.server) is not None:
            return pipeline.serve(lambda job: server_of(job, server))
        came = pipeline.complete(wanted.prompt, wanted.n_generate, wanted.temperature, wanted.seed)
        tokens = list(_shown(came, quiet=wanted.json))
        _report(pipeline, tokens, wanted)
    return 0


def _report(pipeline: Pipeline, tokens: list[Token], wanted: Wanted) -> None:
    n_prompt = pipeline.n_prompt
    times = [token.at for token in tokens]
    ttft = times[0] if times else None
    tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
    asked = replace(pipeline.plan.request, n_prompt=max(1, n_prompt), n_parallel=1)
    predicted = pipeline.plan.predict(asked)
    if wanted.json:
        text = b"".join(token.piece for token in tokens).decode("utf-8", "replace")
        result = {
            "way": "pipeline",
            "text": text,
            "n_prompt": n_prompt,
            "n_generated": len(tokens),
            "ttft_s": ttft,
            "tpot_s": tpot,
        }
        more: dict[str, Any] = {
            "tokens": [token.id for token in tokens],
            "token_times_s": times,
            "predicted": {"ttft_s": predicted.ttft_s, "tpot_s": predicted.tpot_s},
            "layers": pipeline.plan.layers,
            "changes": pipeline.changes_made,
            "memory": pipeline.memory,
        }
        print_json(result | more)
    else:
        say(
            f"{n_prompt} prompt tokens, {len(tokens)} generated: TTFT {seconds(ttft)} (predicted "
            f"{seconds(predicted.ttft_s)}), TPOT {seconds(tpot)} (predicted {seconds(predicted.tpot_s)})"
        )


@contextmanager
def _pipeline(model: Path, made: ClusterPlan, agent: str | None, options: Options) -> Iterator[Pipeline]:
    """Devices that cannot be used any more are planned without."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # everything that was started ends as with Ctrl-C
    gone: list[Lost] = []
    with members(made.devices, agent, lambda name, error: gone.append(Lost(name, str(error)))) as hosts:
        pipeline = Pipeline(model, made, hosts, options, say)
        for lost in gone:
            pipeline.lose(lost, HORIZON_TOKENS)
        pipeline.check_links()
        yield pipeline


def _shown(tokens: Iterator[Token], quiet: bool) -> Iterator[Token]:
    """Passes tokens on and writes their text; characters may be spread over tokens."""

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        if not quiet:
            write_text(decoder.decode(token.piece))
        yield token
    if not quiet:
        write_text(decoder.decode(b"", final=True) + "\n")
