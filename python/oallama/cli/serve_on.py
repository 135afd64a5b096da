"""Serves one model until it is asked to end: where an RPC server dies, by a new plan without it."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from oallama.base.children import die_with_parent, run_server
from oallama.base.printing import say
from oallama.data.plan import PlacementPlan
from oallama.engine.device_list import rpc_server_answers
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.serving.command import Draft, Heads, planned_environment, planned_server
from oallama.serving.door import Address
from oallama.serving.page import page_options
from oallama.serving.serve_limits import Limits
from oallama.serving.served_runs import recorded


@dataclass(frozen=True)
class Served:
    """A model, and how it is loaded. endpoints: of RPC servers. pooling: as `planned_server` takes it."""

    model: Path
    settings: Settings
    plan: PlacementPlan | None
    draft: Draft | Heads | None
    endpoints: tuple[str, ...]
    pooling: str


@dataclass(frozen=True)
class Where:
    """Where requests come in. address: host and port as `arguments`, which are llama-server's own, may change them."""

    host: str
    port: int
    address: Address
    limits: Limits
    arguments: Sequence[str]


def serve_on(served: Served, where: Where, options: Sequence[str]) -> int:
    """Serve, and return llama-server's exit code. ggml aborts it where an RPC server fails: then another one starts.

    options: of `oallama plan`, for a plan without a server that is gone.

    Raises:
        OallamaError: where there is no such plan.
    """
    while True:
        code, had_loaded = _run(served, where)
        if code != -signal.SIGABRT or not served.endpoints:
            return code
        if gone := [endpoint for endpoint in served.endpoints if not rpc_server_answers(endpoint)]:
            served = _without(served, gone, options)
        elif had_loaded:
            say("the server aborted, and all RPC servers are there; loading the model again")
        else:
            return code


def _run(served: Served, where: Where) -> tuple[int, bool]:
    """The server's exit code, and whether it had loaded the model."""
    plan, draft = served.plan, served.draft
    command = planned_server(served.model, served.settings, plan, served.endpoints, draft, served.pooling)
    command += ["--host", where.host, "--port", str(where.port)]
    purpose = {"": "", "rank": " for reranking"}.get(served.pooling, f" for embeddings ({served.pooling})")
    what = served.model.name + purpose
    say(f"loading {what} {f'by plan {plan.hash[:8]}' if plan else 'without a plan on the CPU alone'}")
    predicted = plan if draft is None else None  # a step with a draft is none of the plan's
    tables = planned_environment(plan, draft.plan if isinstance(draft, Draft) else None)
    listening = where.address.announced(f"serving {what}")
    runs = recorded(predicted, where.address.url, served.settings.n_threads)
    with page_options(plan, where.arguments) as page, tables as environment, runs, listening as answered:
        command += [*page, *where.arguments]
        code = run_server(command, environment | where.limits.of_server(served.settings.n_seq_max))
    return code, answered.is_set()


def _without(served: Served, gone: Sequence[str], options: Sequence[str]) -> Served:
    """The same on a new plan, without these RPC servers and without guesses."""
    left = tuple(endpoint for endpoint in served.endpoints if endpoint not in gone)
    guesses = ", and without guesses" if served.draft else ""
    say(f"{' and '.join(gone)} no longer answers; planning without it{guesses}")
    plan = _plan_apart(served.model, served.settings, left, options)
    settings = replace(served.settings, **asdict(plan.context))
    return replace(served, settings=settings, plan=plan, draft=None, endpoints=left)


def _plan_apart(model: Path, wanted: Settings, endpoints: Sequence[str], options: Sequence[str]) -> PlacementPlan:
    """A plan for these RPC servers and what this machine has, made in a process of its own.

    This one has registered devices whose servers are gone. ggml cannot forget them, and aborts when it asks them.
    """
    with tempfile.TemporaryDirectory(prefix="oallama-") as folder:
        path = Path(folder) / "plan.json"
        command = [sys.executable, "-c", "from oallama.cli import main; main()", "plan", str(model), "-o", str(path)]
        command += ["--ctx", str(wanted.n_ctx), "--parallel", str(wanted.n_seq_max), "--threads", str(wanted.n_threads)]
        command += ["--type-k", wanted.type_k, "--type-v", wanted.type_v, *options]
        command += [word for endpoint in endpoints for word in ("--rpc", endpoint)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, preexec_fn=die_with_parent
        )
        if done.returncode or not path.is_file():
            said = done.stderr.strip().splitlines() or ["it says nothing"]
            raise OallamaError(f"no plan can be made without the RPC server that is gone: {said[-1]}")
        return PlacementPlan.load(path)
