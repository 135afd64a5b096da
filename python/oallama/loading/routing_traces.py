"""Routing traces of models on this machine: where they are kept, and what plans say of them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from oallama.data.plan import SLOT_UPLOADS
from oallama.data.routing import NONE, Routers, RoutingTrace
from oallama.engine import native
from oallama.engine.routers import routers_of
from oallama.errors import OallamaError
from oallama.loading import plan_cache
from oallama.planning import OperatorGraph
from oallama.planning.expert_use import ExpertUse, SlotRun
from oallama.profiling.fingerprint import cpu_set
from oallama.profiling.recorder import cache_dir

RECORD = "`oallama profile MODEL.gguf --routing`"
_UNIFORM = "uniform routing of the experts is assumed"


def trace_file(routers: Routers) -> Path:
    """Where the trace of the model with these routers is kept."""
    return cache_dir() / "routing" / f"{routers.arch}-{routers.sha256[:12]}.npz"


def read_trace(path: str | os.PathLike[str], routers: Routers, model: str | os.PathLike[str]) -> RoutingTrace:
    """The trace in a file. Raises OallamaError where it is damaged, or of another model."""
    trace = RoutingTrace.load(path)
    trace.check_model(routers, path, model)
    return trace


def kept_trace(routers: Routers, model: str | os.PathLike[str]) -> RoutingTrace:
    """The trace that is kept of a model. Raises OallamaError where there is none, or it is damaged."""
    path = trace_file(routers)
    if not path.is_file():
        raise OallamaError(f"there is no routing trace of {model}; record one with {RECORD}")
    return read_trace(path, routers, model)


def keep_trace(trace: RoutingTrace, model: str | os.PathLike[str]) -> Path:
    """Keep it in place of an older one; plans of the model are made anew. Raises OallamaError if it cannot be."""
    path = trace_file(trace.routers)
    trace.save(path)
    plan_cache.forget(model)
    return path


def replayed(ids: NDArray[np.uint16], n_experts: int, slots: int) -> SlotRun:
    """What the engine's slots do with a trace (planning/expert_use.py), where an upload takes a step at most."""
    n_layers, n_tokens, n_used = ids.shape
    together, uploads = np.zeros((n_layers, n_used + 1)), np.zeros(n_layers)

    def of_layer(layer: int) -> None:
        own = ids[layer]
        chosen = own[:, own[0] != NONE].astype(np.int32)
        steps = np.array(native.core().replay_slots(chosen, n_experts, slots, uploads=SLOT_UPLOADS))[n_tokens // 2 :]
        together[layer] = np.bincount(steps[:, 0], minlength=n_used + 1) / len(steps)
        uploads[layer] = steps[:, 1].mean()

    with ThreadPoolExecutor(len(cpu_set())) as at_once:
        list(at_once.map(of_layer, range(n_layers)))
    return SlotRun(together, uploads)


def expert_use(model: str | os.PathLike[str], graph: OperatorGraph) -> tuple[ExpertUse | None, list[str]]:
    """How often a mixture's experts are used, and what a plan says of it; None for a dense model."""
    op = next((op for op in graph.operators(min(graph.tiers)) if op.op == "MUL_MAT_ID" and op.weight), None)
    if op is None:
        return None, []
    n_experts = graph.tensor[op.weight or ""].ne[2]
    uniform = ExpertUse.uniform(n_experts, op.n_used)
    routers = routers_of(Path(model))
    if routers is None or not trace_file(routers).is_file():
        return uniform, [f"{_UNIFORM}: there is no trace of it ({RECORD} records one)"]
    try:
        use = ExpertUse.of_trace(kept_trace(routers, model), replayed)
    except OallamaError as error:
        return uniform, [f"{_UNIFORM}: {error}"]
    if (use.n_experts, use.n_used) != (n_experts, op.n_used):
        return uniform, [f"{_UNIFORM}: the trace has other numbers of experts"]
    return use, ["experts are divided, and what batches read of them is priced, by the routing trace"]
