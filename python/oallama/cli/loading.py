"""Opens a model for `run` and `chat`: by a plan, given or made, or as llama.cpp does by itself."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oallama.base.printing import say
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine.load_settings import KV_TYPES, Settings
from oallama.engine.runtime import debugging
from oallama.errors import OallamaError
from oallama.loading import autoplan, given_plan
from oallama.loading.autoplan import Choices
from oallama.loading.budgets import refuse_margin
from oallama.loading.start import plan_model

from .options import Hardware, Kernels, Placing, Sizes, settings
from .terminal import interruptible, progress_bar

if TYPE_CHECKING:
    from oallama.llama import Llama


@dataclass(frozen=True)
class Source:
    """What to load and how; None: not given.

    eval_callback: as `PlacedLlama` takes it. all_logits: whether a plan that is made has memory for those of all rows.
    """

    model: Path
    placing: Placing
    hardware: Hardware
    sizes: Sizes
    kernels: Kernels
    eval_callback: tuple[int, int] | None = None
    all_logits: bool = False


def open_llama(source: Source) -> Llama:
    """Load the model; says on stderr where it runs.

    Raises:
        OallamaError: for a file, plan or budget that will not do.
    """
    chosen = source.hardware.connect().device or autoplan.find_accelerator()
    unplanned = source.placing.makes_none(chosen or HOST)
    if source.placing.plan and source.placing.vram:
        raise OallamaError("give --vram (make a plan) or --plan (use this one), not both")
    if source.placing.plan:
        refuse_margin(source.hardware.margin)
        return _load(source, given_plan.load_plan(source.placing.plan), _given(source))
    wanted = settings(source.sizes, source.kernels)
    if unplanned:
        return _load_unplanned(source, wanted)
    hardware = source.hardware
    choices = replace(
        source.sizes.choices(),
        device=chosen,
        profile=hardware.profile,
        margin=hardware.margin,
        all_logits=source.all_logits,
    )
    plan = make_plan(source.model, source.placing, wanted, choices)
    say_where(plan, chosen)
    return _load(source, plan, {"n_threads": source.kernels.threads} if source.kernels.threads else {})


def make_plan(model: Path, placing: Placing, wanted: Settings, choices: Choices) -> PlacementPlan:
    """The plan that a command starts the model with.

    Raises:
        OallamaError: as `plan_model`; where only the plan is the matter, it names --no-plan.
    """
    try:
        with progress_bar("preparing", announces=True) as report:
            return plan_model(model, placing.vram, wanted, choices, report, placing.trial())
    except OallamaError as error:
        if choices.device in (None, HOST) and (placing.vram, choices.margin, choices.profile) == (None, None, None):
            # Raises its own error where the model or the settings are the matter.
            autoplan.resolve(wanted, autoplan.read_graph(model, wanted).n_ctx_train)
            raise OallamaError(f"{error}; --no-plan loads the model as llama.cpp does by itself") from error
        raise


def say_where(plan: PlacementPlan, device: str | None) -> None:
    """A line where a plan is for the CPU alone. device: that was asked for."""
    if plan.devices == (HOST,) and device in (None, HOST):
        say("no accelerator is used: planned for the CPU alone (--no-plan: as llama.cpp does by itself)")


def _load_unplanned(source: Source, wanted: Settings) -> Llama:
    refuse_margin(source.hardware.margin, "no plan is made")
    graph = autoplan.read_graph(source.model, wanted)
    wanted = autoplan.resolve(wanted, graph.n_ctx_train)
    say("no plan: the model runs on the CPU alone, as llama.cpp does by itself")
    arguments = {
        "n_ctx": wanted.n_ctx,
        "n_batch": wanted.n_batch,
        "n_ubatch": wanted.n_ubatch,
        "n_threads": wanted.n_threads,
        "n_threads_batch": wanted.n_threads,
        "type_k": KV_TYPES[wanted.type_k],
        "type_v": KV_TYPES[wanted.type_v],
        "flash_attn": wanted.flash_attn == "on",
        "op_offload": False,
    }
    return _load(source, None, arguments)


def _given(source: Source) -> dict[str, Any]:
    """Arguments for what was given beside a plan, which brings the rest."""
    arguments = {
        "n_ctx": source.sizes.ctx,
        "n_batch": source.sizes.batch,
        "n_ubatch": source.sizes.ubatch,
        "n_threads": source.kernels.threads or None,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def _load(source: Source, plan: PlacementPlan | None, arguments: dict[str, Any]) -> Llama:
    from oallama.llama import Llama

    if source.eval_callback is not None:
        arguments = {**arguments, "eval_callback": source.eval_callback}
    try:
        with interruptible():
            llm = Llama(os.fspath(source.model), plan=plan, verbose=debugging(), **arguments)
        if (trained := llm._model.n_ctx_train()) < llm.n_ctx():
            say(f"note: a context of {llm.n_ctx()} tokens is longer than the {trained} the model was trained with")
        return llm
    except OallamaError:
        raise
    except (ValueError, RuntimeError) as error:
        # llama-cpp-python's own messages do not say why; what can be wrong with the file was checked before.
        raise OallamaError(
            f"{error}; most likely there was not enough memory: lower --ctx, or see OALLAMA_DEBUG=1"
        ) from error
