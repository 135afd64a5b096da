"""`oallama serve --hot --cold`: several models behind one address, the hot one's guests in the cold ones' memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from oallama.base.children import run_server
from oallama.base.environment import MODEL_ENVIRONMENTS, REVIVE
from oallama.base.host_memory import available_bytes
from oallama.base.printing import say
from oallama.data.budget import format_bytes, parse_budget
from oallama.data.plan import HOST, PlacementPlan, check_model
from oallama.engine import runtime, skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.outline import pooling_of
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.given_plan import check_plan
from oallama.profiling.fingerprint import cpu_set
from oallama.serving.door import Address
from oallama.serving.model_config import ModelConfig
from oallama.serving.page import page_options
from oallama.serving.serve_limits import Limits
from oallama.serving.serving import Served, check, environments, preset
from oallama.weave import remove_abandoned
from oallama.weave.gpus import check_places, check_sharing, parse_places, room_for_guests
from oallama.weave.plan import REMEDY, read_looks

_KEPT_FREE = 0.05  # of the host's available memory


class Unplanned(NamedTuple):
    """A model, its settings, and the names of those that its configuration gives: a plan may not choose them."""

    model: Path
    settings: Settings
    given: Collection[str]


Planner = Callable[[Sequence[Unplanned]], Sequence[PlacementPlan]]  # for the CPU


@dataclass(frozen=True)
class HotCold:
    """What is served and how.

    guests: sequences of the hot model beyond its own; None: as many as its own. lend: memory of each cold model's
    process for them; None: for as much context as the hot one has at home, as far as there is room for it.
    deadline_s: of the attention of a layer. plan: of `oallama weave plan`, for the hot model and one of the cold ones;
    the others look for tasks as ever. device: as `parse_places` reads it. margin: bytes of a GPU that stay free.
    configs: of single models, by name. planner: of the models that have no plan, where all are on the CPU; None: they
    are loaded as llama.cpp does by itself.
    """

    hot: Path
    cold: Sequence[Path]
    limits: Limits
    guests: int | None = None
    lend: str | None = None
    deadline_s: float = 0.1
    plan: Path | None = None
    device: str | None = None
    margin: str | None = None
    configs: Mapping[str, ModelConfig] = field(default_factory=dict)
    planner: Planner | None = None

    def config(self, model: Path) -> ModelConfig:
        """What holds for one of the models alone."""
        return self.configs.get(model.stem, ModelConfig())

    @property
    def models(self) -> list[Path]:
        """The hot one first."""
        return [self.hot, *self.cold]


def planned(request: HotCold, wanted: Settings) -> tuple[Served, list[Served]]:
    """What every model is served with; threads are dealt out evenly unless given.

    Raises:
        OallamaError: a file is no model, two have one name, `lend` is no size or more than there is, a plan is for
            another model or context, or the devices do not allow what is wanted of them.
    """
    quiet()
    of_hot = _settings(request, request.hot, wanted)
    guests = of_hot.n_seq_max if request.guests is None else request.guests
    guests = guests if request.cold else 0
    places = parse_places(request.device)
    check_places(places, len(request.cold), guests)
    _check_options(request, of_hot, guests, places.on_gpus)
    asked_nbytes = None if request.lend is None else _parse_size(request.lend)
    looks = read_looks(request.plan, places.on_gpus) if request.plan else None
    n_threads = _threads_of_others(request, wanted)
    is_cold = []

    def served(path: Path, device: str | None) -> Served:
        config, own = request.config(path), _settings(request, path, wanted)
        graph = autoplan.read_graph(path, own)
        if looks and path == request.hot:
            check_model(looks.hot, graph.model, REMEDY)
        pooling = pooling_of(path)
        settings = replace(autoplan.resolve(own, graph.n_ctx_train), n_threads=own.n_threads or n_threads)
        if pooling not in ("", "last") and not config.plan and "n_ubatch" not in config.given:
            settings = _for_whole_texts(settings)
        if config.plan:
            try:
                check_plan(config.plan, path, settings)
            except OallamaError as error:
                raise OallamaError(f"{path.stem}: {error}") from None
            if guests and path == request.hot and settings.flash_attn == "auto":  # the CPU has it
                settings = replace(settings, flash_attn="on")
        parts = config.plan is not None and not (guests and path == request.hot)
        made = Served(path, settings, device=device, plan=config.plan, parts=parts, pooling=pooling)
        if not looks or graph.model != looks.cold:
            return made
        is_cold.append(path)
        return replace(made, part=looks.part, distance=looks.distance)

    hot, cold = served(request.hot, places.hot), [served(path, places.cold) for path in request.cold]
    check([hot, *cold])
    if looks and not set(is_cold) & set(request.cold):
        raise OallamaError(f"the weave plan {request.plan} is for another cold model; {REMEDY}")
    if request.planner and not places.on_gpus:  # takes longer than all that is checked before
        hot, *cold = _with_plans(request, request.planner, [hot, *cold])
    if guests:
        lent = _lent(request, [hot, *cold], guests, asked_nbytes)
        hot, cold = replace(hot, guests=guests), [replace(model, lend_nbytes=lent) for model in cold]
    elif any(model.devices for model in (hot, *cold)):
        _rooms(request, [hot, *cold])
    return hot, cold


def _settings(request: HotCold, model: Path, wanted: Settings) -> Settings:
    """Those of a model; without a plan, "auto" is "on"."""
    config = request.config(model)
    own = config.settings(wanted)
    return own if config.plan or own.flash_attn != "auto" else replace(own, flash_attn="on")


def _for_whole_texts(settings: Settings) -> Settings:
    """llama-server pools a text in one micro-batch."""
    n_ubatch = max(settings.n_ubatch, settings.n_ctx // settings.n_seq_max)
    return replace(settings, n_ubatch=n_ubatch, n_batch=max(n_ubatch, settings.n_batch))


def _threads_of_others(request: HotCold, wanted: Settings) -> int:
    """Of each model whose number of threads is not given."""
    given = [_settings(request, model, wanted).n_threads for model in request.models]
    return max(1, (len(cpu_set()) - sum(given)) // max(1, given.count(0)))


def _check_options(request: HotCold, of_hot: Settings, guests: int, on_gpus: bool) -> None:
    """Raises OallamaError for what cannot be together, and for plans of models that may not have one."""
    if guests and of_hot.flash_attn == "off":
        raise OallamaError(f"guests need flash attention, which {request.hot.stem} is not to have; or give --guests 0")
    if guests and pooling_of(request.hot):
        raise OallamaError(f"{request.hot.stem} is made for embeddings and has no sequences to lend; give --guests 0")
    if not guests and (request.lend is not None or request.plan):
        raise OallamaError("--lend and --weave are for guests, and there are none; leave them out")
    if request.margin is not None and not on_gpus:
        raise OallamaError("--margin is for models on GPUs (--device); leave it out")
    plans = {model.stem: plan for model in request.models if (plan := request.config(model).plan)}
    if on_gpus and plans:
        raise OallamaError(f"--device places whole models, and {min(plans)} has a plan; leave out one of them")
    for name, plan in plans.items():
        if guests and set(plan.devices) != {HOST}:
            raise OallamaError(
                f"guests need both models on the CPU, and the plan of {name} uses {plan.devices[0]}; leave it out, or "
                "give --guests 0"
            )


def _with_plans(request: HotCold, planner: Planner, models: Sequence[Served]) -> list[Served]:
    """By their own plans, or by new ones; slots share the context there, as they do without a plan."""
    asked = [Unplanned(of.model, of.settings, request.config(of.model).given) for of in models if not of.plan]
    plans = iter(planner(asked))

    def with_plan(of: Served) -> Served:
        plan = next(plans)
        return replace(of, plan=plan, settings=replace(of.settings, **asdict(plan.context)))

    return [of if of.plan else with_plan(of) for of in models]


def _parse_size(lend: str) -> int:
    budget = parse_budget(lend, weights_bytes=0, free_bytes=0)
    if budget.bytes_total is None:
        raise OallamaError(f'--lend is a size, like "2GiB", got {lend}')
    return budget.bytes_total


def _lent(request: HotCold, models: Sequence[Served], guests: int, asked_nbytes: int | None) -> int:
    """Bytes of each cold model's process, on its GPU if it has one. asked_nbytes: by `--lend`."""
    hot, cold = models[0], models[1:]
    where = cold[0].device or "the machine"
    room = _rooms(request, models)[cold[0].device] if cold[0].device else _room_on_host(models)
    if asked_nbytes is not None:
        if room is not None and asked_nbytes > room:
            short = f"{where} has {format_bytes(room)} left for guests, which is less than --lend {request.lend}"
            if cold[0].device:
                raise OallamaError(short)
            say(f"{short}; what is too much goes to swap, or ends a process")
        return asked_nbytes
    of_one = -(-sum(found["kv"] for found in _dry_run(hot).values()) // hot.settings.n_seq_max)
    asked = -(-of_one * guests // len(cold))
    if room is None or asked <= room:
        return asked
    if room < min(of_one, asked):
        raise OallamaError(f"{where} has no memory left for guests; lower --ctx, or give --lend, or --guests 0")
    say(f"{where} has {format_bytes(room)} left for guests, who might take {format_bytes(asked)}")
    return room


def _room_on_host(models: Sequence[Served]) -> int | None:
    """Bytes for guests of each cold model: what is available now, less all models with their weights, and a margin.

    None: the system does not say what is available.
    """
    available = available_bytes()
    if available is None:
        return None
    taken = [
        model.plan.predicted.devices[HOST].total if model.plan else sum(_dry_run(model)[HOST].values())
        for model in models
    ]
    return max(0, int((1 - _KEPT_FREE) * available) - sum(taken)) // (len(models) - 1)


def _rooms(request: HotCold, models: Sequence[Served]) -> dict[str, int]:
    """What every GPU has left beside the models on it."""
    taken: dict[str, list[int]] = {}
    for model in models:
        for device in model.devices:
            plan = model.plan
            nbytes = plan.predicted.devices[device].total if plan else sum(_dry_run(model)[device].values())
            taken.setdefault(device, []).append(nbytes)
    for device, each in taken.items():
        check_sharing(device, len(each))
    return {device: room_for_guests(device, each, request.margin) for device, each in taken.items()}


def _dry_run(model: Served) -> dict[str, dict[str, int]]:
    """Without a plan, if it has one: its cache is as large."""
    return _dry_run_of(model.model, model.settings, model.device)


@cache
def _dry_run_of(path: Path, settings: Settings, device: str | None) -> dict[str, dict[str, int]]:
    devices = (device,) if device else ()
    return skeleton.dry_run(os.fspath(path), replace(settings, devices=devices), None)


def _where(model: Served) -> str:
    if model.plan:
        return f" by plan {model.plan.hash[:8]}"
    return f" on {model.device}" if model.device else ""


def serve_hot_cold(request: HotCold, wanted: Settings, address: Address, more: Sequence[str]) -> int:
    """Run llama-server's router until it ends; returns its exit code. more: arguments of llama-server."""
    program = runtime.program("llama-server")  # before minutes of profiling
    hot, cold = planned(request, wanted)
    remove_abandoned()
    there = autoplan.find_accelerator()
    if there and not any(model.devices for model in (hot, *cold)):
        say(f"all models run on the CPU; --device {there}, or --device hot={there},cold=.., puts them on GPUs")
    at_home, threads = hot.settings.n_seq_max, hot.settings.n_threads
    say(f"{hot.name}{_where(hot)}: {at_home} sequences at home, {hot.guests} more as guests, {threads} threads")
    for model in cold:
        lends = format_bytes(model.lend_nbytes) if model.lend_nbytes else "nothing"
        n_sequences, threads = model.settings.n_seq_max, model.settings.n_threads
        say(f"{model.name}{_where(model)}: {n_sequences} sequences, {threads} threads, lends {lends}")
    with (
        tempfile.TemporaryDirectory(prefix="oallama-") as folder,
        tempfile.NamedTemporaryFile("w", prefix="oallama-", suffix=".ini") as file,
        page_options(None, more) as page,
    ):
        file.write(preset([hot, *cold]))
        file.flush()
        command = [str(program), "--models-preset", file.name]
        command += ["--models-max", str(1 + len(cold)), "--host", address.host, "--port", str(address.port)]
        command += [*page, *more]
        say("models load now")
        of_models = environments(hot, cold, request.deadline_s, request.limits, folder)
        ours = {MODEL_ENVIRONMENTS.name: of_models, REVIVE.name: "1"}
        environment = os.environ | request.limits.of_router() | ours
        try:
            with address.announced("serving"):
                return run_server(command, environment).code
        finally:
            remove_abandoned()
