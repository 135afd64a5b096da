"""`oallama profile --routing`: which experts a model chooses, recorded, kept and shown."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from oallama.base.printing import print_json, say
from oallama.data.expert_hits import POLICIES
from oallama.data.plan import HOST
from oallama.data.routing import Routers, RoutingTrace, StageRouting, is_trace
from oallama.engine import native
from oallama.engine.routers import routers_of
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.loading.routing_traces import keep_trace, kept_trace, read_trace, trace_file
from oallama.tracing.experts import PROMPTS, record_experts
from oallama.views.routing import default_ks, render_trace
from oallama.views.routing_plot import write_trace_plot

from .compare_models import read_text
from .loading import Source, open_llama
from .options import Hardware, Kernels, Placing, Sizes
from .terminal import out, progress_bar

MIXED_TEXT = Path(__file__).resolve().parents[1] / "data" / "texts" / "mixed.txt"

Text = Annotated[
    str | None,
    typer.Argument(
        help="With --routing: a text, a file of text, or a trace from elsewhere. Default: a mixed text of ours.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Routing:
    """What is recorded of a mixture's routing, and what is shown of it."""

    routing: Annotated[
        bool, typer.Option("--routing", help="Record which experts the model's routers choose on TEXT.")
    ] = False
    show: Annotated[
        bool, typer.Option("--show", help="With --routing: run nothing, show the trace that is kept, or TEXT's.")
    ] = False
    plan: Annotated[
        Path | None,
        typer.Option(help="With --routing: run by this plan. Default: as llama.cpp does, on the CPU alone."),
    ] = None
    vram: Annotated[str | None, typer.Option(help="With --routing: run by a plan for this memory.")] = None
    n_generate: Annotated[
        int | None, typer.Option("--n-generate", "-n", min=PROMPTS, help="With --routing: tokens to generate, 256.")
    ] = None
    kept: Annotated[
        str | None, typer.Option("--k", help="With --routing: experts of a layer to show hits for, 8,16,32.")
    ] = None
    plot: Annotated[Path | None, typer.Option(help="With --routing: draw the curves to this PNG.")] = None

    def check(self, text: str | None) -> None:
        """Raises OallamaError for an option of --routing without it."""
        given = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        if given and not self.routing:
            name = {"kept": "k", "n_generate": "n-generate"}.get(given[0], given[0])
            raise OallamaError(f"--{name} needs --routing")
        if text is not None and not self.routing:
            raise OallamaError(f"a text ({text[:40]!r}) needs --routing")


@dataclass(frozen=True)
class Job:
    """A model and how it is loaded, as `Source`; output: also write the trace there."""

    model: Path
    text: str | None
    hardware: Hardware
    sizes: Sizes
    kernels: Kernels
    output: Path | None
    json: bool


def profile_routing(job: Job, wanted: Routing) -> None:
    """Record, or with --show read, the trace of a mixture; keep it and show it.

    Raises OallamaError for a dense model, and for a trace that is damaged or of another model.
    """
    quiet()
    hardware = job.hardware
    if not (wanted.plan or wanted.vram) and (hardware.rpc or hardware.local_rpc or hardware.device not in (None, HOST)):
        raise OallamaError("a trace is recorded on the CPU alone; for another device give --plan or --vram, too")
    routers = routers_of(job.model)
    if routers is None:
        raise OallamaError(f"{job.model} has no experts: there is nothing to trace")
    ks = _ks(wanted.kept, routers.n_experts)
    given = _given_file(job.text)
    if given is not None and is_trace(given):
        trace = read_trace(given, routers, job.model)
    elif wanted.show:
        if job.text is not None:
            raise OallamaError("--show runs nothing: leave out the text, or give the file of a trace")
        trace = kept_trace(routers, job.model)
    else:
        trace = _record(job, wanted, routers, given)
    where = trace_file(routers) if wanted.show else _keep(trace, job.model)
    if job.output:
        trace.save(job.output)
    if wanted.plot:
        write_trace_plot(trace, wanted.plot)
    if job.json:
        print_json(_content(trace, ks, where))
        return
    out.print(render_trace(trace, ks))
    if written := [path for path in (None if wanted.show else where, job.output, wanted.plot) if path]:
        out.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)


def _record(job: Job, wanted: Routing, routers: Routers, file: Path | None) -> RoutingTrace:
    text = read_text(file or MIXED_TEXT) if job.text is None or file else job.text
    name = "our mixed text" if job.text is None else file.name if file else "the given text"
    watch = native.core().ExpertWatch()
    source = Source(job.model, Placing(no_plan=True), Hardware(device=HOST), job.sizes, job.kernels)
    if wanted.plan or wanted.vram:
        placing = Placing(wanted.plan, wanted.vram, verify=False)
        source = replace(source, placing=placing, hardware=job.hardware, all_logits=True)
    llm = open_llama(replace(source, eval_callback=watch.addresses))
    try:
        with progress_bar("tracing") as report:
            tokens = llm.tokenize(text.encode())
            recorded = record_experts(llm, watch, tokens, wanted.n_generate or 256, report)
    finally:
        llm.close()
    return RoutingTrace(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model=job.model.name,
        text=name,
        routers=routers,
        layers=recorded.layers,
        n_ubatch=recorded.n_ubatch,
        stages={stage: StageRouting.judge(ids, routers.n_experts) for stage, ids in recorded.ids.items()},
    )


def _keep(trace: RoutingTrace, model: Path) -> Path | None:
    try:
        return keep_trace(trace, model)
    except OallamaError as error:  # what was recorded is shown all the same
        say(f"oallama: {error}; the trace is not kept")
        return None


def _given_file(text: str | None) -> Path | None:
    """The file that a text names; None for a text.

    Raises OallamaError for one word that names no file: no text is as short.
    """
    if text is None:
        return None
    with suppress(OSError, ValueError):  # a text is no name that a file can have
        if Path(text).is_file():
            return Path(text)
    if not any(character.isspace() for character in text):
        raise OallamaError(f"there is no file {text}")
    return None


def _ks(given: str | None, n_experts: int) -> Sequence[int]:
    if given is None:
        return default_ks(n_experts)
    try:
        ks = sorted({int(part) for part in given.split(",")})
    except ValueError:
        raise OallamaError(f"--k expects numbers such as 8,16,32, got {given!r}") from None
    if wrong := [k for k in ks if not 1 <= k <= n_experts]:
        raise OallamaError(f"--k {wrong[0]}: a layer of this model has {n_experts} experts, expected 1 to {n_experts}")
    return ks


def _content(trace: RoutingTrace, ks: Sequence[int], where: Path | None) -> dict[str, Any]:
    """For programs: means of the layers. The file has the rest."""
    stages = {
        name: {
            "n_tokens": stage.n_tokens,
            "judged": stage.judged,
            "hit_rates": {p: {k: float(trace.hit_rate(name, p, k).mean()) for k in ks} for p in POLICIES},
            "unions": dict(zip(stage.widths, map(float, stage.unions.mean(axis=0)), strict=True)),
            "counts": trace.counts(name).tolist(),
        }
        for name, stage in trace.stages.items()
    }
    about = {"created": trace.created, "model": trace.model, "text": trace.text, "routers": asdict(trace.routers)}
    used = {"layers": trace.layers, "n_used": trace.n_used, "n_ubatch": trace.n_ubatch}
    return {"file": str(where) if where else None, **about, **used, "stages": stages}
