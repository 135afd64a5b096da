"""llama-server's options, written once: as a command line, or as a section of its router's preset file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..base.environment import BACKEND_MAP
from ..data.plan import HOST, PlacementPlan
from ..engine import runtime
from ..engine.load_settings import LOAD_MODES, Settings
from ..planning.heads import CACHE_TYPE
from ..profiling.tuner import tuned_variable

# By llama-server's long names. True stands for a flag without a value.
Options = Mapping[str, object]


@dataclass(frozen=True)
class Draft:
    """A draft model, where it lies, and how many tokens it guesses at a time."""

    model: Path
    plan: PlacementPlan
    n: int

    def options(self) -> dict[str, object]:
        """Without the type llama-server would load the draft and never ask it."""
        devices = [name for name in self.plan.devices if name != HOST]
        return {
            "spec-type": "draft-simple",
            "spec-draft-model": os.fspath(self.model),
            "spec-draft-n-max": self.n,
            "spec-draft-type-k": self.plan.context.type_k,
            "spec-draft-type-v": self.plan.context.type_v,
            "spec-draft-ngl": "all" if devices else "0",
            "spec-draft-device": ",".join(devices) or "none",
        }


@dataclass(frozen=True)
class Heads:
    """The model's own MTP heads, which its plan places, and how many tokens they guess at a time."""

    n: int

    def options(self) -> dict[str, object]:
        return {
            "spec-type": "draft-mtp",
            "spec-draft-n-max": self.n,
            "spec-draft-type-k": CACHE_TYPE,
            "spec-draft-type-v": CACHE_TYPE,
        }


def model_options(model: str | os.PathLike[str], settings: Settings, devices: Sequence[str]) -> dict[str, object]:
    """Options of one model: all of it on `devices` (ggml's names), on the CPU alone without any."""
    loading = {} if settings.use_mmap is None else {"load-mode": LOAD_MODES[settings.use_mmap]}
    return {
        "model": os.fspath(model),
        **loading,
        "fit": "off",
        "ctx-size": settings.n_ctx,
        "batch-size": settings.n_batch,
        "ubatch-size": settings.n_ubatch,
        "parallel": settings.n_seq_max,
        "threads": settings.n_threads,
        "flash-attn": settings.flash_attn,
        "cache-type-k": settings.type_k,
        "cache-type-v": settings.type_v,
        "n-gpu-layers": "all" if devices else "0",
        "device": ",".join(devices) or "none",
    }


def pooling_options(pooling: str) -> dict[str, object]:
    """For a model made for embeddings, which then answers requests for them alone; "rank": for reranking; "": none."""
    return {"reranking" if pooling == "rank" else "embeddings": True} if pooling else {}


def command_line(options: Options) -> list[str]:
    """llama-server with these options; RPC servers must come before the devices that they bring."""
    command = [str(runtime.program("llama-server"))]
    for name, value in options.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return command


def preset_section(name: str, options: Options) -> str:
    """A model of the router's preset file."""
    lines = (f"{key} = {'true' if value is True else value}\n" for key, value in options.items())
    return f"[{name}]\n{''.join(lines)}"


def planned_server(
    model: Path,
    settings: Settings,
    plan: PlacementPlan | None,
    endpoints: Sequence[str] = (),
    draft: Draft | Heads | None = None,
    pooling: str = "",
) -> list[str]:
    """The command line that loads a model as planned; without a plan on the CPU alone.

    endpoints: RPC servers. pooling: as `pooling_options` takes it.
    """
    devices = [name for name in plan.devices if name != HOST] if plan else []
    servers = {"rpc": ",".join(endpoints)} if endpoints else {}
    speculation = draft.options() if draft else {}
    more = {"no-kv-unified": True, "metrics": True, **speculation, **pooling_options(pooling)}
    return command_line({**servers, **model_options(model, settings, devices), **more})


@contextmanager
def planned_environment(plan: PlacementPlan | None, draft: PlacementPlan | None = None) -> Iterator[dict[str, str]]:
    """The environment of a llama.cpp program that obeys the plan, and loads a draft by its own after that.

    The tables are files that are gone afterwards.
    """
    environment = {name: value for name, value in os.environ.items() if name != BACKEND_MAP.name}
    if plan is None:
        yield environment
        return
    plans = [plan, draft] if draft else [plan]
    with ExitStack() as files:
        tables = []
        for each in plans:
            table = files.enter_context(tempfile.NamedTemporaryFile("w", prefix="oallama-", suffix=".map"))
            table.write(each.to_backend_map())
            table.flush()
            tables.append(table.name)
        devices = tuple(dict.fromkeys(name for each in plans for name in each.devices))
        yield environment | {BACKEND_MAP.name: ":".join(tables)} | tuned_variable(devices)
