"""How llama-server's router is told to serve a hot model and cold ones, where guests of the hot one may live."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oallama.base.environment import (
    BACKEND_MAP,
    WEAVE_CHANNELS,
    WEAVE_CUDA_RECEIVER,
    WEAVE_DEADLINE_MS,
    WEAVE_FIRST_GUEST,
    WEAVE_RECEIVER,
)
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.profiling.tuner import tuned_variable
from oallama.serving.command import model_options, pooling_options, preset_section
from oallama.serving.serve_limits import Limits

from ..weave.channel import DEFAULT_PART, channel_path
from ..weave.distance import Distance


@dataclass(frozen=True)
class Served:
    """A model and how it is loaded; settings.n_seq_max sequences of its own share its context.

    Attributes:
        guests: sequences beyond those, that live in other processes.
        lend_nbytes: memory of this process for another model's guests, 0: none.
        part: multiply-adds of a thread between two looks for guests' tasks on the CPU; None: looks come after operators
            only.
        device: where all of it is, None: on the CPU.
        distance: between two looks on a GPU; None: the engine's default.
        plan: by which it is placed; None: as `device` says.
        parts: each sequence has a part of the context for itself; else all share it.
        pooling: of a model made for embeddings (`outline.pooling_of`).
    """

    model: Path
    settings: Settings
    guests: int = 0
    lend_nbytes: int = 0
    part: int | None = DEFAULT_PART
    device: str | None = None
    distance: Distance | None = None
    plan: PlacementPlan | None = None
    parts: bool = False
    pooling: str = ""

    @property
    def devices(self) -> list[str]:
        """Accelerators that it is on, by ggml's names."""
        if self.plan:
            return [name for name in self.plan.devices if name != HOST]
        return [self.device] if self.device else []

    @property
    def name(self) -> str:
        """What requests call it: the file's name without its ending."""
        return self.model.stem

    @property
    def n_sequences(self) -> int:
        """Sequences at once, guests included."""
        return self.settings.n_seq_max + self.guests


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
            **model_options(os.path.abspath(served.model), served.settings, served.devices),
            "parallel": served.n_sequences,
            "no-kv-unified" if served.parts else "kv-unified": True,
            "cache-ram": 0,
            "metrics": True,
            "load-on-startup": True,
            **pooling_options(served.pooling),
        }
        sections.append(preset_section(served.name, options))
    return "\n".join(sections)


def environments(hot: Served, cold: Sequence[Served], deadline_s: float, limits: Limits, folder: str) -> str:
    """Variables of the models' processes, as MODEL_ENVIRONMENTS wants them. folder: for receivers' sockets on GPUs, and
    for the tables of plans.

    A model that is unloaded alone gets less time to end than llama-server's router grants it, 10 s.
    """
    lenders = [served for served in cold if served.lend_nbytes > 0]
    paths = {
        served.name: f"{folder}/{number}" if served.device else channel_path(f"{os.getpid()}-{number}")
        for number, served in enumerate(lenders)
    }
    limits = replace(limits, drain_s=min(limits.drain_s, 5.0))
    found = {served.name: limits.of_server(served.n_sequences) for served in (hot, *cold)}
    for number, served in enumerate((hot, *cold)):
        if served.plan:
            table = Path(folder) / f"{number}.map"
            table.write_text(served.plan.to_backend_map())
            found[served.name] |= {BACKEND_MAP.name: str(table), **tuned_variable(served.devices)}
    for served in lenders:
        receiver = f"{paths[served.name]}:{served.lend_nbytes}"
        if served.device:
            found[served.name][WEAVE_CUDA_RECEIVER.name] = receiver + (f":{served.distance}" if served.distance else "")
        else:
            found[served.name][WEAVE_RECEIVER.name] = f"{receiver}:{served.part or 'operators'}"
    if hot.guests and paths:
        found[hot.name] |= {
            WEAVE_CHANNELS.name: ",".join(paths.values()),
            WEAVE_FIRST_GUEST.name: str(hot.settings.n_seq_max),
            WEAVE_DEADLINE_MS.name: f"{1e3 * deadline_s:g}",
        }
    return json.dumps(found)
