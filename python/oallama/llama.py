"""`Llama`: llama-cpp-python's class on our engine, with a memory budget.

Without `vram` and `plan` nothing differs from upstream. With them the weights go where the plan says: the backend map
is set while upstream's constructor loads, and what it cannot be told is set whenever its structures are read.
"""

from __future__ import annotations

import atexit
import inspect
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from oallama.base.printing import say
from oallama.data.budget import format_bytes
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.profile import Profile
from oallama.engine import device_list, native
from oallama.engine.backend_map import backend_map
from oallama.engine.expert_counts import ExpertCounts, expert_counts
from oallama.engine.load_settings import KV_TYPES, Settings
from oallama.engine.placed_llama import UPSTREAM, PlacedLlama
from oallama.errors import OallamaError
from oallama.loading import given_plan, start
from oallama.loading.autoplan import Choices, PathOrText, Progress, announce_once
from oallama.loading.budgets import refuse_margin
from oallama.loading.expert_hits import HitsWatch
from oallama.loading.placement import Placement, placement_of
from oallama.loading.recording import RunRecorder
from oallama.loading.trial import Trial
from oallama.profiling.fingerprint import cpu_set
from oallama.profiling.tuner import apply_tuned

_SIGNATURE = inspect.signature(UPSTREAM.__init__)
_PLAN_DECIDES = ("n_gpu_layers", "split_mode", "main_gpu", "tensor_split", "vocab_only", "offload_kqv", "op_offload")
_TYPE_NAMES = {number: name for name, number in KV_TYPES.items()}
# Planning and loading redirect things of the whole process: llama.cpp's log and, with verbose=False, stdout and stderr.
_LOADING = threading.RLock()


# Those that nobody closes are recorded before the interpreter takes its modules apart.
_OPEN: weakref.WeakSet[Llama] = weakref.WeakSet()


@atexit.register
def _record_open() -> None:
    for llm in _OPEN:
        llm._record()


class Llama(PlacedLlama):
    """Drop-in for `llama_cpp.Llama` 0.3.36: the same arguments, methods and results, and six arguments more.

    Args:
        vram: memory of the accelerator to use: bytes, "8GiB", "75%" (of the weights), "auto" (what is free) or
            "minimal" (weights and KV caches stay on the host and are streamed). The first accelerator is taken;
            without one "auto" plans for the CPU alone, and all else is an error.
        plan: a PlacementPlan or its file, instead of `vram`. It brings the context settings that are not given.
        margin: bytes (or "512MiB") of the accelerator's free memory that vram="auto" leaves free; default: 5 % of a
            GPU's memory, at least 1 GiB.
        profile: a Profile or its file for planning under `vram`; default: this machine's, measured when missing.
        verify: whether a new plan is measured beside llama.cpp's own placements at the first use of a model, where that
            takes seconds: True, False, or the seconds that it may take. The plan that wins is kept for later starts.
        progress: called with (done, total, text) while the machine is profiled; default: with `verbose`, one line on
            stderr says that it is.

    With `vram` or `plan`, flash attention is llama.cpp's "auto" unless given, threads default to the CPUs this process
    may use, and arguments that the plan decides (n_gpu_layers, tensor_split, ...) are refused. LoRA adapters are not
    counted in the budget.

    Raises:
        OallamaError: (a ValueError) for a plan or budget that does not fit the model, the machine or the arguments,
            and when the host has less free memory than the plan needs there.
        TypeError: for an argument that upstream does not know either (upstream ignores those).

    >>> llm = Llama("qwq-32b-q4_k_m.gguf", n_ctx=16384, vram="16GiB")
    >>> rich.print(llm.placement())
    """

    def __init__(
        self,
        model_path: str,
        *,
        vram: str | int | None = None,
        plan: PlacementPlan | PathOrText | None = None,
        margin: str | int | None = None,
        profile: Profile | PathOrText | None = None,
        verify: bool | float = True,
        progress: Progress | None = None,
        **kwargs: Any,
    ) -> None:
        self._stack = ExitStack()  # upstream's; close() needs it when planning fails
        _check_names(kwargs)
        self._left_mapped = 0
        self._recorder: RunRecorder | None = None
        self._hits: HitsWatch | None = None
        self.plan: PlacementPlan | None = None
        if vram is None and plan is None and profile is None and margin is None:
            super().__init__(model_path, **kwargs)
            return
        with _LOADING:
            request = _Request(vram, plan, margin, profile, verify, progress)
            self.plan = _make_plan(model_path, request, kwargs)
            if self.plan.context.n_outputs_max and _wants_all_logits(kwargs):
                raise OallamaError(
                    "this plan has no memory for the logits of all rows, which logits_all=, embedding= and "
                    "draft_model= need; make a new plan with vram= or `oallama plan --all-logits`"
                )
            completed = _complete(kwargs, self.plan)
            _check_host_memory(self.plan, completed)
            planned = self.plan.context
            apply_tuned(self.plan.devices)
            with backend_map(self.plan.to_backend_map()):
                super().__init__(
                    model_path,
                    devices=device_list.device_array([name for name in self.plan.devices if name != HOST]),
                    n_outputs_max=planned.n_outputs_max,
                    flash_attn_type="auto" if "flash_attn" not in kwargs and planned.flash_attn == "auto" else None,
                    n_gpu_layers=-1,
                    **completed,
                )
                self._left_mapped = native.core().backend_map_left_mapped()
        if self._eval_callback is None:  # a run that is watched takes longer than others
            self._recorder = RunRecorder(self.plan, self.n_threads)
            self._hits = HitsWatch(self.plan, partial(expert_counts, self.ctx))
            _OPEN.add(self)

    def eval(self, tokens: Sequence[int]) -> None:
        """Upstream's; raises OallamaError when weights could not be streamed (the file was changed or cut off)."""
        try:
            super().eval(tokens)
        except RuntimeError as error:
            if reason := native.core().take_stream_error():
                raise OallamaError(reason) from error
            raise
        if self._hits:
            self._hits.step()

    def close(self) -> None:
        """Upstream's; what the plan took is kept for later predictions (`oallama history`)."""
        self._record()
        super().close()

    def _record(self) -> None:
        recorder, self._recorder = getattr(self, "_recorder", None), None
        if recorder is not None:
            recorder.record(self.ctx)

    def placement(self) -> Placement:
        """What is where: budget, predicted and measured bytes per device, and its tensors (with a plan)."""
        return placement_of(self.ctx, self.plan, self._left_mapped)

    def expert_counts(self) -> list[ExpertCounts]:
        """Uses and hits of experts that two devices share, by layer, since the model was loaded; [] without any."""
        return expert_counts(self.ctx)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self.plan is not None:
            state = {key: value for key, value in state.items() if key not in _PLAN_DECIDES} | {"plan": self.plan}
            if self._flash_attn_type is not None:
                del state["flash_attn"]
        return state


@dataclass(frozen=True)
class _Request:
    """The constructor's own arguments about plans."""

    vram: str | int | None
    plan: PlacementPlan | PathOrText | None
    margin: str | int | None
    profile: Profile | PathOrText | None
    verify: bool | float
    progress: Progress | None


def _check_names(given: Mapping[str, Any]) -> None:
    """Raises TypeError for an argument that neither upstream's signature nor ours has: upstream would ignore it."""
    own = {**inspect.signature(Llama.__init__).parameters, **inspect.signature(PlacedLlama.__init__).parameters}
    known = {name for name, p in {**_SIGNATURE.parameters, **own}.items() if p.kind is not p.VAR_KEYWORD} - {"self"}
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            also = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"Llama() got an unexpected keyword argument {name!r}{also}")


def _make_plan(path: str, request: _Request, kwargs: dict[str, Any]) -> PlacementPlan:
    vram, plan = request.vram, request.plan
    if vram is None and plan is None:
        raise OallamaError('profile= and margin= are for planning under a budget: give vram= too, as vram="8GiB"')
    if vram is not None and plan is not None:
        raise OallamaError("give vram= (make a plan) or plan= (use this one), not both")
    if decided := [name for name in _PLAN_DECIDES if name in kwargs]:
        raise OallamaError(f"{decided[0]}= has no place beside vram= or plan=: the plan decides it; leave it out")
    if plan is not None:
        refuse_margin(request.margin)
        plan = given_plan.load_plan(plan)
        given_plan.check_plan(plan, path, settings_of(_complete(kwargs, plan)))
        return plan
    progress, verbose = request.progress, kwargs.get("verbose", True)
    if progress is None and verbose:
        progress = announce_once()
    choices = Choices(
        profile=request.profile,
        fixed_ubatch="n_ubatch" in kwargs,
        fixed_batch="n_batch" in kwargs,
        all_logits=_wants_all_logits(kwargs),
        margin=request.margin,
    )
    return start.plan_model(path, vram, settings_of(kwargs), choices, progress, _trial(request.verify, verbose))


def _trial(verify: bool | float, verbose: bool) -> Trial | None:
    if verify is False:
        return None
    seconds = None if verify is True else float(verify)
    return Trial(seconds, say) if verbose else Trial(seconds)


def _check_host_memory(plan: PlacementPlan, kwargs: dict[str, Any]) -> None:
    """Raises OallamaError when what the plan has on the host does not fit. Weights in a mapped file always do."""
    mapped = kwargs.get("use_mmap", True) and not kwargs.get("lora_path")
    on_host, free = plan.predicted.devices.get(HOST), native.core().host_memory()
    if on_host is None or (needed := on_host.total - (on_host.weights if mapped else 0)) <= free:
        return
    weights = "" if mapped else f"weights {format_bytes(on_host.weights)}, "
    remedy = "a smaller n_ctx needs less" if mapped else "with use_mmap=True weights may stay in the file"
    raise OallamaError(
        f"the plan needs {format_bytes(needed)} of host memory ({weights}KV cache {format_bytes(on_host.kv)}, compute "
        f"buffers {format_bytes(on_host.compute)}), and {format_bytes(free)} are free; {remedy}"
    )


def _wants_all_logits(kwargs: dict[str, Any]) -> bool:
    """Whether rows other than each sequence's last are read: llama.cpp aborts when more are asked for than planned."""
    return any(kwargs.get(name) for name in ("logits_all", "embedding", "draft_model"))


def _complete(kwargs: dict[str, Any], plan: PlacementPlan) -> dict[str, Any]:
    """The arguments with what the plan fixes where the user said nothing."""
    planned = plan.context
    defaults = {
        "n_ctx": planned.n_ctx,
        "n_batch": planned.n_batch,
        "n_ubatch": planned.n_ubatch,
        "type_k": KV_TYPES[planned.type_k],
        "type_v": KV_TYPES[planned.type_v],
        "n_threads": len(cpu_set()),
        "n_threads_batch": kwargs.get("n_threads") or len(cpu_set()),
    }
    if planned.flash_attn != "auto":
        defaults["flash_attn"] = planned.flash_attn == "on"
    if planned.use_mmap is not None:
        defaults["use_mmap"] = planned.use_mmap
    return defaults | kwargs


def settings_of(kwargs: dict[str, Any]) -> Settings:
    """The settings upstream's constructor will use for these arguments, when a plan is in force."""
    bound = _SIGNATURE.bind(None, "", **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    return Settings(
        n_ctx=given["n_ctx"],
        n_batch=given["n_batch"],
        n_ubatch=given["n_ubatch"],
        type_k=_type_name("type_k", given["type_k"]),
        type_v=_type_name("type_v", given["type_v"]),
        flash_attn=("on" if kwargs["flash_attn"] else "off") if "flash_attn" in kwargs else "auto",
        n_threads=given["n_threads"] or 0,
        use_mmap=None if given["use_mmap"] else False,
    )


def _type_name(argument: str, number: int | None) -> str:
    if number is None:
        return "f16"
    if number not in _TYPE_NAMES:
        raise OallamaError(f"{argument}={number} is no type of a KV cache; expected one of {_TYPE_NAMES}")
    return _TYPE_NAMES[number]


def _with_ours() -> inspect.Signature:
    ours = inspect.signature(Llama.__init__).parameters
    theirs = _SIGNATURE.parameters
    extra = [ours[name] for name in ("vram", "plan", "margin", "profile", "verify", "progress")]
    *named, rest = theirs.values()
    return _SIGNATURE.replace(parameters=[*named, *extra, rest])


# Tools that look at the constructor see all of upstream's arguments.
Llama.__init__.__signature__ = _with_ours()  # type: ignore[attr-defined]

__all__ = ["Llama"]
