"""A profile that holds for this machine, with made-up times: what planning needs, without seconds of measuring."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.data.profile import Profile
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.profiling.fingerprint import fingerprint
from support import synthetic


def made_profile(
    model: Path, device: str | None, settings: Settings, name: str | None = None, own: float | None = None
) -> Profile:
    """Times of `model`'s operators; `device` is much faster than the CPU. `name`: what another process calls it.

    device None: the CPU alone. own: how many times as fast our kernels of attention are there.
    """
    host = synthetic.Speed(5e7, 1e9)
    profile = synthetic.profile(autoplan.read_graph(model, settings), cpu=host, op_offload=False, own=own)

    mark = fingerprint([*([device] if device else []), "CPU"], settings.n_threads)
    name = name or device or synthetic.DEVICE

    def rename(entries: tuple[Any, ...], field: str = "device") -> tuple[Any, ...]:
        return tuple(replace(e, **{field: name}) if getattr(e, field) == synthetic.DEVICE else e for e in entries)

    return replace(
        profile,
        fingerprint={**mark, "devices": {name if d == device else d: text for d, text in mark["devices"].items()}},
        devices=rename(profile.devices, "name"),
        operators=rename(profile.operators),
        attention=rename(profile.attention),
        links=rename(profile.links),
        switches=rename(profile.switches),
        overlaps=rename(profile.overlaps),
        concurrency=rename(profile.concurrency),
    )
