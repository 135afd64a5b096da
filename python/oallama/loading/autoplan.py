"""From a model file and a budget to a plan: where engine, profiler and planner meet.

`Llama`, the command line and the benchmarks all go through here, so that one model and one budget give one plan.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from oallama.base.printing import say
from oallama.data.budget import AUTO
from oallama.data.plan import HOST, ContextSettings, PlacementPlan
from oallama.data.profile import REMEDY, Profile
from oallama.data.tuning import Crossover
from oallama.data.workload import context_of_each
from oallama.engine import device_list, native, skeleton
from oallama.engine.device_list import ACCELERATOR_TYPES
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading.budgets import budgets_for, more_than_there_is, refuse_margin
from oallama.loading.dry_run import LocalAllocators
from oallama.loading.routing_traces import expert_use
from oallama.loading.times_now import TimesNow, times_now
from oallama.planning import Candidates, OperatorGraph, PlannerName, Space, Workload, make_plans
from oallama.planning.arenas import Arena
from oallama.planning.planner import DEFAULT_WORKLOAD
from oallama.planning.terms import terms_of
from oallama.planning.uncertainty import noise_of
from oallama.profiling.fingerprint import check_threads, cpu_set, fingerprint
from oallama.profiling.profiler import forget, profile_machine
from oallama.profiling.tuner import tuned
from oallama.profiling.workload import UNFUSED_V_TYPES, depths_for

# Token counts measured: decode, the smallest batch that is worth uploading weights for, a full micro-batch.
TIERS = (1, 32, 512)
MINIMAL = "minimal"  # the budget of the planner of that name
PathOrText = str | os.PathLike[str]
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Choices:
    """How a plan is made; the defaults are what `Llama(vram=...)` does.

    Attributes:
        device: the accelerator by name, several with commas, "CPU" for none of them, None for the first one.
        profile: measured times to use instead of this machine's cached ones.
        planner: "auto" takes the plan predicted to be fastest, llama.cpp's own placements among them.
        workload: the request to make fast; default: `default_workload` of the context.
        paper: OATO literally as published: decode times only, transfers as caused by the current plan, memory filled
            up to the first operator that does not fit, with operators too that the device does not speed up.
        fraction: share of the memory left after KV cache and compute buffers that OATO's weights may take (Algorithm
            1's 90 % rule). Default: 0.90 for paper=True with a budget in bytes or "auto", else 1.0.
        elsewhere: the profile is of another machine, and so is the plan.
        fixed_ubatch: the micro-batch must be as the settings say.
        fixed_batch: the batch must be as the settings say; else a larger micro-batch raises it.
        recheck: re-measure the heaviest operators of each device (about a second each) before planning from cached
            times; a device that changed by more than 15 % has its times scaled, and the plan says so.
        all_logits: logits of all rows may be wanted (embeddings, drafts, perplexity), not only of each sequence's last.
        outputs: rows with logits of each sequence in a step: 1, and one for every token that a draft guesses.
        streams: whether weights may be streamed (docs/streaming.md).
        offline_arenas: whether our own plans have their compute buffers laid out offline (docs/compute-buffers.md).
        own_attention: whether fused attention on CPUs may be computed by our kernels (docs/attention.md).
        repack: whether weights on the host may be repacked or tiled for faster kernels, which round differently, and
            be in memory as both where the host has the room. False: all are plain, so that a matrix gives the same bits
            on every CPU device.
        reserve: bytes per device that others hold out of the same budget, a draft model planned before for example:
            `{name: memory.total for name, memory in draft.predicted.devices.items()}`. They are taken off budgets in
            bytes and "auto"; what is loaded already is not free, so "auto" knows of it. A share of the weights stays.
        all_candidates: whether "auto" makes also candidates that cannot come near the fastest, to be measured.
        margin: bytes of each accelerator's free memory that the budget "auto" leaves free, an int or a text
            ("512MiB"). Default: `gpu_reserve` of its memory; 0 for devices whose memory is the host's.
    """

    device: str | None = None
    profile: Profile | PathOrText | None = None
    planner: PlannerName = "auto"
    workload: Workload | None = None
    paper: bool = False
    fraction: float | None = None
    elsewhere: bool = False
    fixed_ubatch: bool = False
    fixed_batch: bool = False
    recheck: bool = False
    all_logits: bool = False
    outputs: int = 1
    streams: bool = True
    offline_arenas: bool = False
    repack: bool = True
    own_attention: bool = True
    reserve: Mapping[str, int] = field(default_factory=dict)
    all_candidates: bool = False
    margin: str | int | None = None


def read_graph(path: PathOrText, settings: Settings, tiers: Sequence[int] = TIERS) -> OperatorGraph:
    """The operators of a model, without loading a weight. Raises OallamaError when llama.cpp cannot load the file.

    tiers: token counts, those above the micro-batch taken as one micro-batch; beside them a step of all sequences.
    """
    counts = sorted({min(n, settings.n_ubatch) for n in (*tiers, settings.n_seq_max)})
    # One sequence: with more, llama.cpp reserves graphs only for multiples of their number, of the same operators.
    raw = skeleton.read_graphs(os.fspath(path), replace(settings, n_seq_max=1), counts)
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


def resolve(settings: Settings, n_ctx_train: int, elsewhere: bool = False) -> Settings:
    """Fill in zeros (the model's context, the CPUs this process may use); batches are no larger than the context.

    Raises OallamaError for more threads than CPUs, unless they are another machine's.
    """
    if not elsewhere:
        check_threads(settings.n_threads)
    n_ctx = settings.n_ctx or n_ctx_train
    n_batch = min(n_ctx, settings.n_batch)
    n_threads = settings.n_threads or len(cpu_set())
    return replace(
        settings, n_ctx=n_ctx, n_batch=n_batch, n_ubatch=min(n_batch, settings.n_ubatch), n_threads=n_threads
    )


def find_accelerator() -> str | None:
    """The first accelerator of this process, registered RPC devices included; None without one."""
    return next((d.name for d in device_list.devices() if d.type in ACCELERATOR_TYPES), None)


def choose_devices(wanted: str | None) -> tuple[str, ...]:
    """The accelerators to plan for: the first one there is, if none is named; none for "CPU".

    Raises:
        OallamaError: for an unknown or repeated name.
    """
    if wanted is not None:
        return _accelerators(device_list.device(name.strip()).name for name in wanted.split(","))
    found = find_accelerator()
    return () if found is None else (found,)


def announce_once() -> Progress:
    """Says on stderr, with the first measurement, that there are some."""
    said = False

    def announce(done: float, total: float, text: str) -> None:
        nonlocal said
        if total > 0 and not said:
            say("oallama: measuring this machine for this model; the times are kept for later")
            said = True

    return announce


def _check_budget(vram: str | int | None, accelerators: Sequence[str], named: str | None) -> None:
    """Raises OallamaError for a budget that no device is there for. "auto" of no device in particular may be nothing.

    named: the device that was asked for.
    """
    if accelerators or vram is None or (vram == AUTO and named is None):
        return
    if named is not None:
        raise OallamaError(f"a memory budget ({vram}) is for an accelerator, not for the device {HOST}; leave one out")
    raise OallamaError(
        "a memory budget needs an accelerator, and this machine has none (devices: "
        f"{', '.join(d.name for d in device_list.devices())}); take an RPC device (--rpc HOST:PORT, or --local-rpc "
        "to try it on this machine; in Python oallama.LocalRpcServer), or leave the budget out"
    )


def _check_margin(margin: str | int | None, accelerators: Sequence[str]) -> None:
    if not accelerators:
        refuse_margin(margin, "no accelerator is used")


def load_profile(source: Profile | PathOrText, n_threads: int, elsewhere: bool = False) -> Profile:
    """A given profile, if it holds for this machine.

    Raises:
        OallamaError: when it does not (unless `elsewhere`), is missing or corrupt.
    """
    profile = source if isinstance(source, Profile) else Profile.load(source)
    if elsewhere:
        return profile
    present = {d.name for d in device_list.devices()}
    known = [d.name for d in profile.devices if d.name in present]
    if differences := profile.is_stale(fingerprint(known, n_threads)):
        name = "the profile" if isinstance(source, Profile) else f"the profile {source}"
        raise OallamaError(
            f"{name} is stale ({differences[0]}); {REMEDY}, or plan for the machine it was recorded on with "
            "`oallama plan --elsewhere`"
        )
    return profile


def plan_graph(
    path: PathOrText,
    graph: OperatorGraph,
    vram: str | int | None,
    settings: Settings,
    choices: Choices,
    progress: Progress | None = None,
) -> PlacementPlan:
    """The plan to take by prediction, for a graph that is already read; arguments and errors as in `plan_model`."""
    return candidates(path, graph, vram, settings, choices, progress).best


def candidates(
    path: PathOrText,
    graph: OperatorGraph,
    vram: str | int | None,
    settings: Settings,
    choices: Choices,
    progress: Progress | None = None,
) -> Candidates:
    """Every candidate of `choices.planner`, the plan to take first; arguments and errors as in `start.plan_model`."""
    return consider(path, graph, vram, settings, choices, progress).found


@dataclass(frozen=True)
class Considered:
    """Every candidate, and what they were predicted from. learned: factors in the times of the space's profile."""

    found: Candidates
    space: Space
    learned: Mapping[str, float]

    def with_terms(self, plan: PlacementPlan) -> PlacementPlan:
        """One of the plans, with its seconds by device and kind of work, and when its profile was made."""
        predicted = replace(plan.predicted, terms=terms_of(self.space, plan, self.learned))
        params = {**plan.planner["params"], "profile": self.space.profile.created}
        return replace(plan, predicted=predicted, planner={**plan.planner, "params": params})


def consider(
    path: PathOrText,
    graph: OperatorGraph,
    vram: str | int | None,
    settings: Settings,
    choices: Choices,
    progress: Progress | None = None,
) -> Considered:
    """As `candidates`."""
    settings = resolve(settings, graph.n_ctx_train, choices.elsewhere)
    if vram == MINIMAL and choices.planner not in ("auto", MINIMAL):
        raise OallamaError(f'the budget "minimal" is a planner of its own; leave out planner {choices.planner!r}')
    if not choices.elsewhere:  # before minutes of profiling
        there = choose_devices(choices.device)
        _check_budget(vram, there, choices.device)
        _check_margin(choices.margin, there)
    if vram == MINIMAL:
        vram, choices = None, replace(choices, planner="minimal")
    profile, accelerators = profile_and_devices(graph, settings, choices, progress)
    _check_budget(vram, accelerators, choices.device if vram == AUTO else HOST)
    _check_margin(choices.margin, accelerators)
    if choices.elsewhere:
        times = TimesNow(profile, noise_of(profile, (*accelerators, HOST)))
    else:

        def anew() -> Profile:
            forget(accelerators, settings.n_threads)
            return profile_and_devices(graph, settings, choices, progress)[0]

        own = choices.profile is None
        times = times_now(profile, accelerators, settings.n_threads, choices.recheck, anew if own else None)
    profile, notes = times.profile, [*times.notes]
    elsewhere = profile if choices.elsewhere else None
    budgets = budgets_for(vram, accelerators, graph.weights_bytes, elsewhere, choices.margin)
    budgets = {name: budget.less(choices.reserve.get(name, 0)) for name, budget in budgets.items()}
    use, of_routing = expert_use(path, graph)
    notes += [*more_than_there_is(budgets, elsewhere), *of_routing]
    allocators = LocalAllocators(path, settings, accelerators, elsewhere)
    graphs = {settings.flash_attn: graph}
    if settings.flash_attn == "auto" and settings.type_v in UNFUSED_V_TYPES and not choices.paper:
        ends = (min(graph.tiers), max(graph.tiers))  # all that predictions need
        with suppress(OallamaError):  # at a million tokens its scores alone exceed this machine's memory
            graphs["off"] = read_graph(path, replace(settings, flash_attn="off"), ends)
    space = Space(
        graphs=graphs,
        profile=profile,
        accelerators=accelerators,
        budgets=budgets,
        memory=allocators.memory,
        context=context_of(settings),
        workload=choices.workload or default_workload(settings.n_ctx, settings.n_seq_max),
        n_outputs_max=0 if choices.all_logits else settings.n_seq_max * choices.outputs,
        free_ubatch=not choices.fixed_ubatch,
        free_batch=not choices.fixed_batch,
        streams=choices.streams,
        offline_arenas=choices.offline_arenas,
        repack=choices.repack and settings.use_extra_bufts,
        host_memory=profile.device(HOST).memory_total if choices.elsewhere else native.core().host_memory(),
        own_attention=choices.own_attention,
        crossovers={} if choices.elsewhere else _crossovers(settings.n_threads),
        noise=times.noise,
        least_noise=times.least_noise,
        all_candidates=choices.all_candidates,
        fit=allocators.fit if all(budget.bytes_total for budget in budgets.values()) else None,
        paper=choices.paper,
        fraction=choices.fraction,
        expert_use=use,
    )
    found = make_plans(space, choices.planner)
    plans = {name: _learned(allocators.noted(plan, notes), times.learned) for name, plan in found.plans.items()}
    return Considered(replace(found, plans=plans), space, times.learned)


def _learned(plan: PlacementPlan, factors: Mapping[str, float]) -> PlacementPlan:
    own = {name: factor for name, factor in factors.items() if name.partition(" ")[0] in plan.devices}
    return replace(plan, predicted=replace(plan.predicted, learned=own))


def read_arenas(path: PathOrText, plan: PlacementPlan, settings: Settings, choices: Choices) -> list[Arena]:
    """Compute buffers of a plan made with these settings and choices: of a whole micro-batch, then of a decode step."""
    elsewhere = None
    if choices.elsewhere and choices.profile is not None:
        elsewhere = load_profile(choices.profile, settings.n_threads, elsewhere=True)
    accelerators = tuple(name for name in plan.devices if name != HOST)
    return LocalAllocators(path, settings, accelerators, elsewhere).arenas(plan)


def _crossovers(n_threads: int) -> dict[str, Crossover]:
    table = tuned(HOST, n_threads)
    return table.of("repack") if table else {}


def default_workload(n_ctx: int, n_parallel: int = 1) -> Workload:
    """512 + 128 tokens in a context a quarter full: who asks for a long context uses more than its beginning.

    n_parallel: sequences that generate together; each has its part of the n_ctx tokens.
    """
    n_ctx = context_of_each(n_ctx, n_parallel)
    n_prompt, n_generate = min(DEFAULT_WORKLOAD.n_prompt, max(1, n_ctx // 2)), DEFAULT_WORKLOAD.n_generate
    depth = max(0, min(n_ctx // 4, n_ctx - n_prompt - n_generate))
    return Workload(n_prompt, n_generate, depth, n_parallel)


def context_of(settings: Settings) -> ContextSettings:
    """The part of the settings that a plan is made for."""
    return ContextSettings(**{name: getattr(settings, name) for name in ContextSettings.__dataclass_fields__})


def _accelerators(named: Iterable[str]) -> tuple[str, ...]:
    """Raises OallamaError for a repeated name."""
    names = list(named)
    if len(set(names)) != len(names):
        raise OallamaError(f"a device may be named once; got {', '.join(names)}")
    return tuple(name for name in names if name != HOST)


def profile_and_devices(
    graph: OperatorGraph, settings: Settings, choices: Choices, progress: Progress | None = None
) -> tuple[Profile, tuple[str, ...]]:
    """The times to plan with, holding all that the graph needs, and the accelerators. Raises OallamaError."""
    if choices.elsewhere:
        if choices.profile is None:
            raise OallamaError("planning for another machine needs its profile: give it with --profile FILE")
        profile = load_profile(choices.profile, settings.n_threads, elsewhere=True)
        wanted = choices.device or next((d.name for d in profile.devices if d.type in ACCELERATOR_TYPES), HOST)
        return profile, _accelerators(profile.device(name.strip()).name for name in wanted.split(","))
    accelerators = choose_devices(choices.device)
    return profile_for(graph, replace(choices, device=",".join(accelerators) or HOST), settings, progress), accelerators


def profile_for(
    graph: OperatorGraph, choices: Choices, settings: Settings, progress: Progress | None = None
) -> Profile:
    """The profile given, or this machine's with everything measured that the graph needs on `choices.device`."""
    if choices.profile is not None:
        return load_profile(choices.profile, settings.n_threads)
    return profile_machine(
        graph,
        choices.device.split(",") if choices.device else [],
        n_threads=settings.n_threads,
        depths=depths_for(settings.n_ctx),
        type_k=settings.type_k,
        type_v=settings.type_v,
        progress=progress,
    )
