"""How llama-server's router is told to serve a hot model and cold ones, where guests of the hot one may live."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oallama.errors import OallamaError
from oallama.serving.serve_limits import Limits

from ..weave.channel import DEFAULT_PART, channel_path
from ..weave.distance import Distance

ENVIRONMENTS = "OALLAMA_MODEL_ENVIRONMENTS"


@dataclass(frozen=True)
class Served:
    """A model: its context of n_ctx tokens is shared by `parallel` sequences; lend_nbytes: for guests, 0: none.

    device: where all of it is, None: on the CPU. part: multiply-adds of a thread between two looks for guests' tasks on
    the CPU; None: looks come after operators only. distance: between two looks on a GPU; None: the engine's default.

    The name is the file's without its ending.
    """

    model: Path
    n_ctx: int
    parallel: int
    n_threads: int
    type_k: str = "f16"
    type_v: str = "f16"
    guests: int = 0
    lend_nbytes: int = 0
    part: int | None = DEFAULT_PART
    device: str | None = None
    distance: Distance | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    flash_attn: str = "on"

    @property
    def name(self) -> str:
        """What requests call it."""
        return self.model.stem


def check(models: Sequence[Served]) -> None:
    """Raises OallamaError: two models of one name, or of a name that a preset cannot have."""
    names = [served.name for served in models]
    for name in names:
        if names.count(name) > 1:
            raise OallamaError(f"two models are called {name}: requests could not tell them apart; rename a file")
        if any(c in name for c in "[]:;#") or not name.isprintable():
            raise OallamaError(f"the model name {name!r} has characters that llama-server's presets do not take")


def preset(models: Sequence[Served]) -> str:
    """The preset file of the router: a section per model, all loaded at its start."""
    sections = ["version = 1\n"]
    for served in models:
        options = {
            "model": os.path.abspath(served.model),
            "ctx-size": served.n_ctx,
            "parallel": served.parallel + served.guests,
            "threads": served.n_threads,
            "cache-type-k": served.type_k,
            "cache-type-v": served.type_v,
            "kv-unified": "true",
            "batch-size": served.n_batch,
            "ubatch-size": served.n_ubatch,
            "flash-attn": served.flash_attn,
            "cache-ram": 0,
            "fit": "off",
            "n-gpu-layers": "all" if served.device else 0,
            "device": served.device or "none",
            "metrics": "true",
            "load-on-startup": "true",
        }
        lines = "".join(f"{name} = {value}\n" for name, value in options.items())
        sections.append(f"[{served.name}]\n{lines}")
    return "\n".join(sections)


def environments(hot: Served, cold: Sequence[Served], deadline_s: float, limits: Limits, folder: str) -> str:
    """Variables of the models' processes, as ENVIRONMENTS wants them. folder: for sockets of receivers on GPUs.

    A model that is unloaded alone gets less time to end than llama-server's router grants it, 10 s.
    """
    lenders = [served for served in cold if served.lend_nbytes > 0]
    paths = {
        served.name: f"{folder}/{number}" if served.device else channel_path(f"{os.getpid()}-{number}")
        for number, served in enumerate(lenders)
    }
    limits = replace(limits, drain_s=min(limits.drain_s, 5.0))
    found = {served.name: limits.of_server(served.parallel + served.guests) for served in (hot, *cold)}
    for served in lenders:
        receiver = f"{paths[served.name]}:{served.lend_nbytes}"
        if served.device:
            found[served.name]["OALLAMA_WEAVE_CUDA_RECEIVER"] = receiver + (
                f":{served.distance}" if served.distance else ""
            )
        else:
            found[served.name]["OALLAMA_WEAVE_RECEIVER"] = f"{receiver}:{served.part or 'operators'}"
    if hot.guests and paths:
        found[hot.name] |= {
            "OALLAMA_WEAVE_CHANNELS": ",".join(paths.values()),
            "OALLAMA_WEAVE_FIRST_GUEST": str(hot.parallel),
            "OALLAMA_WEAVE_DEADLINE_MS": f"{1e3 * deadline_s:g}",
        }
    return json.dumps(found)
