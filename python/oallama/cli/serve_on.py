"""Serves one model until it is asked to end: where an RPC server dies, by a new plan without it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from oallama.base.children import OALLAMA, Ended, die_with_parent, run_server
from oallama.base.printing import say
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine.device_list import add_rpc_server, rpc_server_answers
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.serving.command import Draft, Heads, planned_environment, planned_server
from oallama.serving.door import Address
from oallama.serving.page import page_options
from oallama.serving.serve_limits import Limits
from oallama.serving.served_runs import recorded
from oallama.serving.unavailable import REUSE_PORT, unavailable

BUSY_S = 20.0  # that an RPC server has to notice that its client is gone
AGAIN_S = 120.0  # a server that aborts so soon after loading is started again once


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
    """Where requests come in, and how many. arguments: llama-server's own, which may name another address."""

    host: str
    port: int
    limits: Limits
    arguments: Sequence[str]

    @property
    def address(self) -> Address:
        return Address(self.host, self.port).changed_by(self.arguments)


def serve_on(served: Served, where: Where, options: Sequence[str]) -> int:
    """Serve, and return llama-server's exit code. ggml aborts it where an RPC server fails: then another one starts.

    options: of `oallama plan`, for a plan without a server that is gone.

    Raises:
        OallamaError: where there is no such plan.
        KeyboardInterrupt: at SIGINT and SIGTERM between two runs.
    """
    early = 0  # aborts in a row soon after loading
    again = replace(where, arguments=[REUSE_PORT, *where.arguments])
    with ExitStack() as between:
        while True:
            ended, served_s = _run(served, where)
            between.close()
            early = early + 1 if served_s < AGAIN_S else 0
            if ended.asked or ended.code != -signal.SIGABRT or not served.endpoints:
                return ended.code
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            why = "an RPC server failed; the model is loaded again"
            next_starts = between.enter_context(unavailable(where.address, why))
            if gone := [each for each in served.endpoints if not rpc_server_answers(each, BUSY_S)]:
                served = _without(served, gone, options)
            elif served_s > 0 and early < 2:
                say("the server aborted, and all RPC servers are there; loading the model again")
            else:
                return ended.code
            where = again
            next_starts()


def _run(served: Served, where: Where) -> tuple[Ended, float]:
    """How the server ended, and the seconds since it had loaded the model; 0: it had not."""
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
    with page_options(plan, where.arguments) as page, tables as environment, runs, listening as loaded:
        command += [*page, *where.arguments]
        ended = run_server(command, environment | where.limits.of_server(served.settings.n_seq_max))
    return ended, loaded.seconds()


def _without(served: Served, gone: Sequence[str], options: Sequence[str]) -> Served:
    """The same on a new plan, without these RPC servers and without guesses."""
    left = tuple(endpoint for endpoint in served.endpoints if endpoint not in gone)
    answer, them = ("answers", "it") if len(gone) == 1 else ("answer", "them")
    guesses = ", and without guesses" if served.draft else ""
    say(f"{' and '.join(gone)} no longer {answer}; planning without {them}{guesses}")
    plan = _plan_apart(served.model, served.settings, [*_devices_left(served, left), *options])
    settings = replace(served.settings, **asdict(plan.context))
    return replace(served, settings=settings, plan=plan, draft=None, endpoints=left)


def _devices_left(served: Served, left: Sequence[str]) -> list[str]:
    """Options for the plan's accelerators that are left, in the bytes that it had there; for the CPU without any."""
    before, after = _numbered(served.endpoints), _numbered(left)
    now = {name: after.get(where, "") for where, name in before.items()}  # "" for those that are gone
    budgets = served.plan.budgets if served.plan else {}
    kept = {now.get(name, name): nbytes for name, nbytes in budgets.items() if now.get(name, name)}
    if not kept:
        return ["--device", HOST]
    vram = ",".join(f"{name}={nbytes}" for name, nbytes in kept.items())
    servers = [word for endpoint in left for word in ("--rpc", endpoint)]
    return [*servers, "--device", ",".join(kept), "--vram", vram]


def _numbered(endpoints: Sequence[str]) -> dict[tuple[str, int], str]:
    """Names of the devices behind RPC servers, by server and place there: ggml counts all of them in one row."""
    places = [(endpoint, i) for endpoint in endpoints for i in range(len(add_rpc_server(endpoint)))]
    return {place: f"RPC{number}" for number, place in enumerate(places)}


def _plan_apart(model: Path, wanted: Settings, options: Sequence[str]) -> PlacementPlan:
    """A plan that a process of its own makes, which says on stderr how far it is; its user's defaults do not count.

    This one has registered devices whose servers are gone. ggml cannot forget them, and aborts when it asks them.
    """
    with tempfile.TemporaryDirectory(prefix="oallama-") as folder:
        path = Path(folder) / "plan.json"
        command = [*OALLAMA, "plan", str(model), "-o", str(path)]
        command += ["--ctx", str(wanted.n_ctx), "--parallel", str(wanted.n_seq_max), "--threads", str(wanted.n_threads)]
        command += ["--type-k", wanted.type_k, "--type-v", wanted.type_v, *options]
        variables = os.environ | {"XDG_CONFIG_HOME": folder}
        done = subprocess.run(command, stdout=subprocess.DEVNULL, env=variables, preexec_fn=die_with_parent)
        if done.returncode or not path.is_file():
            raise OallamaError("no plan can be made without the RPC servers that are gone")
        return PlacementPlan.load(path)
