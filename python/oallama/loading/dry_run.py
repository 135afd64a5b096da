"""Dry runs of a plan by this machine's allocators, also of a plan for a machine with other devices.

A device that is not here is represented by a stand-in: a device of this machine whose allocator answers for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from oallama.data.plan import HOST, PlacementPlan
from oallama.data.plan_export import backend_map
from oallama.data.profile import Profile
from oallama.engine import device_list, skeleton, stock_fit
from oallama.engine.device_list import ACCELERATOR_TYPES
from oallama.engine.load_settings import Settings
from oallama.engine.model_file import identity
from oallama.errors import OallamaError
from oallama.planning import StockFlags
from oallama.planning.arenas import Arena, graphs_of

# Dry runs of this process by file, settings and table: planners and rivals ask for the same ones.
known: dict[tuple[object, ...], dict[str, dict[str, int]]] = {}
_KEPT = 256


class LocalAllocators:
    """This machine's allocators, which answer for the devices of the plan.

    elsewhere: the profile of that machine when it is another one.
    """

    def __init__(
        self, path: str | os.PathLike[str], settings: Settings, accelerators: tuple[str, ...], elsewhere: Profile | None
    ) -> None:
        self._path, self._settings, self._accelerators = os.fspath(path), settings, accelerators
        answering = stand_ins(accelerators, elsewhere) if elsewhere else accelerators
        self._stand_in = dict(zip(accelerators, answering, strict=True))

    def memory(self, plan: PlacementPlan) -> dict[str, dict[str, int]]:
        """Dry run of a plan in the plan's own context."""
        settings, table = self._with_stand_ins(plan)
        key = (*identity(self._path), settings, table)
        if key not in known:
            while len(known) >= _KEPT:
                del known[next(iter(known))]
            known[key] = skeleton.dry_run(self._path, settings, table)
        return {self._planned_name(name): {**sizes} for name, sizes in known[key].items()}

    def arenas(self, plan: PlacementPlan) -> list[Arena]:
        """Compute buffers of the plan's graphs (`graphs_of`)."""
        settings, table = self._with_stand_ins(plan)
        found = skeleton.read_arenas(self._path, settings, graphs_of(plan.context), table)
        arenas = map(Arena.from_engine, found)
        return [replace(arena, device=self._planned_name(arena.device)) for arena in arenas]

    def _with_stand_ins(self, plan: PlacementPlan) -> tuple[Settings, str]:
        """Settings and backend map of the plan, with the devices that answer."""
        devices = tuple(self._stand_in[name] for name in plan.devices if name != HOST)
        settings = replace(self._settings, **asdict(plan.context), devices=devices)
        return settings, backend_map(plan, self._stand_in)

    def _planned_name(self, stand_in: str) -> str:
        return next((name for name, other in self._stand_in.items() if other == stand_in), stand_in)

    def fit(self, limits: Mapping[str, int]) -> StockFlags:
        """What llama.cpp's own --fit does with these budgets. Raises OallamaError where it finds nothing."""
        budgets = {self._stand_in[name]: limit for name, limit in limits.items()}
        settings = replace(self._settings, devices=tuple(self._stand_in[name] for name in self._accelerators))
        found = stock_fit.fit(self._path, settings, budgets)
        if found.status != "success":
            raise OallamaError(f"llama.cpp's --fit found nothing within the budget ({found.status})")
        names = {stand_in: name for name, stand_in in self._stand_in.items()}
        overrides = tuple((pattern, names.get(device, device)) for pattern, device in found.overrides)
        return StockFlags(found.n_gpu_layers, tuple(found.tensor_split), overrides)

    def noted(self, plan: PlacementPlan, notes: Sequence[str]) -> PlacementPlan:
        """The plan with these notes, and one of what was asked in place of devices that are not here."""
        notes = [*notes]
        others = [name for name in plan.devices if self._stand_in.get(name, name) != name]
        if others:
            device = device_list.device(self._stand_in[others[0]])
            # A loopback server is described by its port, which is another one every time: equal plans are equal texts.
            stand_in = "a loopback RPC device" if device.backend.startswith("RPC") else device.description
            notes.append(f"memory was dry-run on {stand_in} in place of {', '.join(others)}, which is not here")
        return replace(plan, predicted=replace(plan.predicted, notes=(*plan.predicted.notes, *notes)))


def stand_ins(names: tuple[str, ...], profile: Profile) -> tuple[str, ...]:
    """Devices of this machine whose allocators answer for those of the profile.

    The device of that name or another of its backend, else an RPC device: that one takes every tensor, while a device
    of another backend may refuse what the real one would hold.
    """
    from oallama.engine.rpc import LocalRpcServer

    spare = {d.name: d.backend for d in device_list.devices() if d.type in ACCELERATOR_TYPES}
    found = []
    for name in names:
        backend = profile.device(name).backend
        ranks = {own: (kind != backend, own != name) for own, kind in spare.items() if kind in (backend, "RPC")}
        found.append(min(ranks, key=lambda own: ranks[own]) if ranks else LocalRpcServer().devices[0])
        spare.pop(found[-1], None)
    return tuple(found)
