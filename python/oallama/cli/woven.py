"""`oallama serve --hot --cold`: several models behind one address, the hot one's guests in the cold ones' memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oallama import autoplan, engine, runtime
from oallama.children import run_server
from oallama.engine import Settings
from oallama.errors import OallamaError
from oallama.plan import check_model
from oallama.planning.budget import format_bytes, parse_budget
from oallama.profiling.fingerprint import cpu_set
from oallama.serve_limits import Limits
from oallama.weave import remove_abandoned
from oallama.weave.channel import DEFAULT_PART
from oallama.weave.plan import REMEDY, read_part
from oallama.weave.serving import ENVIRONMENTS, Served, check, environments, preset

from .options import quiet
from .terminal import say


@dataclass(frozen=True)
class Weaving:
    """What is served and how.

    guests: sequences of the hot model beyond its own; None: as many as its own. lend: memory of each cold model's
    process for them; None: for as much context as the hot one has at home. deadline_s: of the attention of a layer.
    plan: of `oallama weave plan`, for the hot model and one of the cold ones; the others look for tasks as ever.
    """

    hot: Path
    cold: Sequence[Path]
    limits: Limits
    guests: int | None = None
    lend: str | None = None
    deadline_s: float = 0.1
    plan: Path | None = None


def planned(weaving: Weaving, wanted: Settings) -> tuple[Served, list[Served]]:
    """What every model is served with; threads are dealt out evenly unless given.

    Raises:
        OallamaError: a file is no model, two have one name, or `lend` is no size.
    """
    quiet()
    n_threads = wanted.n_threads or max(1, len(cpu_set()) // (1 + len(weaving.cold)))
    guests = wanted.n_seq_max if weaving.guests is None else weaving.guests

    of_hot, of_cold, part = read_part(weaving.plan) if weaving.plan else ({}, {}, DEFAULT_PART)

    def served(path: Path) -> Served:
        graph = autoplan.read_graph(path, wanted)
        if weaving.plan and path == weaving.hot:
            check_model(of_hot, graph.model, REMEDY)
        n_ctx = autoplan.resolve(wanted, graph.n_ctx_train).n_ctx
        looks = part if graph.model == of_cold else DEFAULT_PART
        return Served(path, n_ctx, wanted.n_seq_max, n_threads, wanted.type_k, wanted.type_v, part=looks)

    hot, cold = served(weaving.hot), [served(path) for path in weaving.cold]
    check([hot, *cold])
    if cold and guests:
        lent = _lent(weaving, replace(wanted, n_ctx=hot.n_ctx, devices=()), guests)
        hot, cold = replace(hot, guests=guests), [replace(model, lend_nbytes=lent) for model in cold]
    return hot, cold


def _lent(weaving: Weaving, settings: Settings, guests: int) -> int:
    if weaving.lend is not None:
        budget = parse_budget(weaving.lend, weights_bytes=0, free_bytes=0)
        if budget.bytes_total is None:
            raise OallamaError(f'--lend is a size, like "2GiB", got {weaving.lend}')
        return budget.bytes_total
    memory = engine.dry_run(os.fspath(weaving.hot), settings, None)
    at_home = sum(found["kv"] for found in memory.values())
    return -(-at_home * guests // (settings.n_seq_max * len(weaving.cold)))


def serve_woven(weaving: Weaving, wanted: Settings, host: str, port: int, more: Sequence[str]) -> int:
    """Run llama-server's router until it ends; returns its exit code."""
    hot, cold = planned(weaving, wanted)
    remove_abandoned()
    say(f"{hot.name}: {hot.parallel} sequences at home, {hot.guests} more as guests, {hot.n_threads} threads")
    for model in cold:
        lends = format_bytes(model.lend_nbytes) if model.lend_nbytes else "nothing"
        say(f"{model.name}: {model.parallel} sequences, {model.n_threads} threads, lends {lends}")
    with tempfile.NamedTemporaryFile("w", prefix="oallama-", suffix=".ini") as file:
        file.write(preset([hot, *cold]))
        file.flush()
        command = [str(runtime.program("llama-server")), "--models-preset", file.name]
        command += ["--models-max", str(1 + len(cold)), "--host", host, "--port", str(port), *more]
        say(f"serving on http://{host}:{port} (OpenAI API under /v1); models load now")
        of_models = environments(hot, cold, weaving.deadline_s, weaving.limits)
        try:
            return run_server(command, os.environ | weaving.limits.of_router() | {ENVIRONMENTS: of_models})
        finally:
            remove_abandoned()
