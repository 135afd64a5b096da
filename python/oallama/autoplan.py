"""From a model file and a budget to a plan: where engine, profiler and planner meet.

`Llama`, the command line and the benchmarks all go through here, so that one model and one budget give one plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oallama import engine
from oallama.engine import Settings
from oallama.errors import OallamaError
from oallama.plan import HOST, ContextSettings, PlacementPlan
from oallama.planning import OperatorGraph, make_plan, parse_budget
from oallama.planning.cost import Workload
from oallama.planning.planner import DEFAULT_WORKLOAD, PlannerName
from oallama.profiling.fingerprint import cpu_set, fingerprint
from oallama.profiling.profile import REMEDY, Profile
from oallama.profiling.profiler import profile_machine

# Token counts measured: decode, the smallest batch that is worth uploading weights for, a full micro-batch.
TIERS = (1, 32, 512)
# KV rows at which attention is measured: up to the first that the context does not exceed.
DEPTHS = (128, 1024, 4096, 16384)
ACCELERATOR_TYPES = ("gpu", "igpu")
PathOrText = str | os.PathLike[str]
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Choices:
    """How a plan is made; the defaults are what `Llama(vram=...)` does.

    Attributes:
        device: the accelerator by name, "CPU" for none of them, None for the first one.
        profile: measured times to use instead of this machine's cached ones.
        planner: "best" takes OATO's plan unless llama.cpp's own placement under the same budget, or the CPU alone, is
            predicted to be faster.
        elsewhere: the profile is of another machine, and so is the plan.
    """

    device: str | None = None
    profile: Profile | PathOrText | None = None
    planner: PlannerName = "best"
    workload: Workload = DEFAULT_WORKLOAD
    paper: bool = False
    fraction: float | None = None
    elsewhere: bool = False


def read_graph(path: PathOrText, settings: Settings) -> OperatorGraph:
    """The operators of a model, without loading a weight. Raises OallamaError when llama.cpp cannot load the file."""
    tiers = sorted({min(n, settings.n_ubatch) for n in TIERS})
    # One sequence: with more, llama.cpp reserves graphs only for multiples of their number, of the same operators.
    raw = engine.read_graphs(os.fspath(path), replace(settings, n_seq_max=1), tiers)
    return OperatorGraph.from_engine(raw, model=model_fingerprint(raw))


def model_fingerprint(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan must agree with: names, types and shapes of all weights. Their values do not matter."""
    tensors = json.dumps([(t["name"], t["type"], list(t["ne"])) for t in raw["tensors"]])
    return {
        "name": raw["description"],
        "arch": raw["arch"],
        "n_params": raw["n_params"],
        "nbytes": raw["nbytes"],
        "tensors_sha256": hashlib.sha256(tensors.encode()).hexdigest(),
    }


def resolve(settings: Settings, n_ctx_train: int) -> Settings:
    """Fill in zeros (the model's context, the CPUs this process may use); batches are no larger than the context."""
    n_ctx = settings.n_ctx or n_ctx_train
    n_batch = min(n_ctx, settings.n_batch)
    n_threads = settings.n_threads or len(cpu_set())
    return replace(
        settings, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=min(n_batch, settings.n_ubatch), n_threads=n_threads
    )


def find_accelerator() -> str | None:
    """The first accelerator of this process, registered RPC devices included; None without one."""
    return next((d.name for d in engine.devices() if d.type in ACCELERATOR_TYPES), None)


def choose_device(wanted: str | None) -> str:
    """The accelerator to plan for.

    Raises:
        OallamaError: for an unknown name, or without a name when there is no accelerator.
    """
    if wanted is not None:
        return engine.device(wanted).name
    found = find_accelerator()
    if found is None:
        raise OallamaError(
            "a memory budget needs an accelerator, and this machine has none (devices: "
            f"{', '.join(d.name for d in engine.devices())}); take an RPC device (--rpc HOST:PORT, or --local-rpc "
            "to try it on this machine; in Python oallama.LocalRpcServer), or leave the budget out"
        )
    return found


def load_profile(source: Profile | PathOrText, n_threads: int, elsewhere: bool = False) -> Profile:
    """A given profile, if it holds for this machine.

    Raises:
        OallamaError: when it does not (unless `elsewhere`), is missing or corrupt.
    """
    profile = source if isinstance(source, Profile) else Profile.load(source)
    if elsewhere:
        return profile
    here = {d.name for d in engine.devices()}
    known = [d.name for d in profile.devices if d.name in here]
    if differences := profile.is_stale(fingerprint(known, n_threads)):
        name = "the profile" if isinstance(source, Profile) else f"the profile {source}"
        raise OallamaError(
            f"{name} is stale ({differences[0]}); {REMEDY}, or plan for the machine it was recorded on with "
            "`oallama plan --elsewhere`"
        )
    return profile


def plan_model(
    path: PathOrText,
    vram: str | int | None,
    settings: Settings,
    choices: Choices = Choices(),
    progress: Progress | None = None,
) -> PlacementPlan:
    """Plan one model under a budget, profiling what was not measured yet.

    Args:
        vram: what `parse_budget` takes; None is "auto" where an accelerator is used.
        settings: exactly those the model will be loaded with.
        progress: called before every measurement.

    Raises:
        OallamaError: for everything a user can get wrong; the message says what to do.
    """
    graph = read_graph(path, settings)
    return plan_graph(path, graph, vram, settings, choices, progress)


def plan_graph(
    path: PathOrText,
    graph: OperatorGraph,
    vram: str | int | None,
    settings: Settings,
    choices: Choices,
    progress: Progress | None = None,
) -> PlacementPlan:
    """`plan_model` for a graph that is already read; several plans of one model cost one reading."""
    settings = resolve(settings, graph.n_ctx_train)
    profile, device = _profile_and_device(graph, settings, choices, progress)
    if device == HOST and vram is not None:
        raise OallamaError(f"a memory budget ({vram}) is for an accelerator, not for the device {HOST}; leave one out")
    free = profile.device(device).memory_total if choices.elsewhere else engine.device(device).memory_free
    budget = parse_budget(vram if vram is not None else "auto", weights_bytes=graph.weights_bytes, free_bytes=free)
    stand_in = _stand_in(device) if choices.elsewhere and device != HOST else device

    def memory(plan: PlacementPlan | None) -> dict[str, dict[str, int]]:
        assert plan is not None
        table = re.sub(rf"(?<= ){re.escape(device)}(?=[ \n])", stand_in, plan.to_backend_map())
        used = replace(settings, devices=tuple(stand_in for name in plan.devices if name != HOST))
        found = engine.dry_run(os.fspath(path), used, table)
        return {device if name == stand_in else name: sizes for name, sizes in found.items()}

    def make(planner: PlannerName) -> PlacementPlan:
        return make_plan(
            graph,
            profile,
            devices=(device,) if device == HOST else (device, HOST),
            budget=budget,
            memory=memory,
            context=ContextSettings(**{name: getattr(settings, name) for name in ContextSettings.__dataclass_fields__}),
            planner=planner,
            workload=choices.workload,
            paper=choices.paper,
            fraction=choices.fraction,
        )

    plan = make(choices.planner)
    if choices.planner == "best" and plan.planner["name"] != "oato":
        make("oato")  # raises when the budget is too small: a mistake to be told, not a reason to use the CPU
    if stand_in != device:
        note = f"memory was dry-run on {engine.device(stand_in).description} in place of {device}, which is not here"
        plan = replace(plan, predicted=replace(plan.predicted, notes=(*plan.predicted.notes, note)))
    return plan


def _profile_and_device(
    graph: OperatorGraph, settings: Settings, choices: Choices, progress: Progress | None
) -> tuple[Profile, str]:
    if choices.elsewhere:
        if choices.profile is None:
            raise OallamaError("planning for another machine needs its profile: give it with --profile FILE")
        profile = load_profile(choices.profile, settings.n_threads, elsewhere=True)
        device = choices.device or next((d.name for d in profile.devices if d.type in ACCELERATOR_TYPES), HOST)
        return profile, profile.device(device).name
    device = choose_device(choices.device)
    return profile_for(graph, replace(choices, device=device), settings, progress), device


def profile_for(
    graph: OperatorGraph, choices: Choices, settings: Settings, progress: Progress | None = None
) -> Profile:
    """The profile given, or this machine's with everything measured that the graph needs on `choices.device`."""
    if choices.profile is not None:
        return load_profile(choices.profile, settings.n_threads)
    return profile_machine(
        graph,
        [choices.device] if choices.device else [],
        n_threads=settings.n_threads,
        depths=depths_for(settings.n_ctx),
        type_k=settings.type_k,
        type_v=settings.type_v,
        progress=progress,
    )


def depths_for(n_ctx: int) -> list[int]:
    """The depths worth measuring for a context of this size."""
    return [depth for i, depth in enumerate(DEPTHS) if i == 0 or DEPTHS[i - 1] < n_ctx]


def _stand_in(device: str) -> str:
    """A device of this machine whose allocator answers for one that is elsewhere."""
    here = [d.name for d in engine.devices()]
    if device in here:
        return device
    if (found := find_accelerator()) is not None:
        return found
    from oallama.rpc import LocalRpcServer

    return LocalRpcServer().devices[0]


def check_settings(plan: PlacementPlan, settings: Settings) -> None:
    """Raises OallamaError when a context with these settings would need more memory than the plan counted."""
    planned = plan.context
    for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"):
        asked, limit = getattr(settings, name), getattr(planned, name)
        if asked > limit:
            raise OallamaError(f"the plan is for {name} up to {limit}, asked for {asked}; make a new plan for {asked}")
    for name in ("type_k", "type_v", "flash_attn"):
        asked, limit = getattr(settings, name), getattr(planned, name)
        if asked != limit:
            raise OallamaError(f"the plan is for {name} {limit}, asked for {asked}; make a new plan for {asked}")


def check_plan(plan: PlacementPlan, path: PathOrText, settings: Settings) -> None:
    """Raises OallamaError unless the plan is for this model, this machine and a context of at least this size."""
    graph = read_graph(path, settings)
    plan.check_model(graph.model)
    plan.check_devices(d.name for d in engine.devices())
    check_settings(plan, resolve(settings, graph.n_ctx_train))


def load_plan(source: PlacementPlan | PathOrText) -> PlacementPlan:
    """A plan, or the plan in a file."""
    return source if isinstance(source, PlacementPlan) else PlacementPlan.load(Path(source))
