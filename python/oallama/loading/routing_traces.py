"""Routing traces of models on this machine: where they are kept, and what plans say of them."""

from __future__ import annotations

import os
from pathlib import Path

from oallama.data.routing import Routers, RoutingTrace
from oallama.engine.routers import routers_of
from oallama.errors import OallamaError
from oallama.loading import plan_cache
from oallama.planning import OperatorGraph
from oallama.profiling.recorder import cache_dir

RECORD = "`oallama profile MODEL.gguf --routing`"


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


def routing_notes(model: str | os.PathLike[str], graph: OperatorGraph) -> list[str]:
    """What a plan says of a mixture's routing; nothing for a dense model."""
    if not graph.has_experts:
        return []
    routers = routers_of(Path(model))
    if routers is None or not trace_file(routers).is_file():
        return [f"uniform routing of the experts is assumed: there is no trace of it ({RECORD} records one)"]
    return ["uniform routing of the experts is assumed: plans do not use the routing trace yet"]
