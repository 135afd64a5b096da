"""What of a loaded model is where: predicted and measured bytes per device, and the tensors that live there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from oallama.data.plan import HOST, DeviceMemory, PlacementPlan
from oallama.engine import native, skeleton
from oallama.engine.expert_counts import expert_counts
from oallama.loading.expert_hits import ExpertHits, expert_hits
from oallama.loading.run_times import RunTimes, times_of
from oallama.views.placement import render_placement

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class DevicePlacement:
    """One device of a loaded model. None: nothing was planned.

    Attributes:
        measured: bytes of this model's buffers.
        process_bytes: bytes of all live buffers of this process, from the ledger the engine keeps at every allocation.
        tensors: names, in the order of the model.
    """

    device: str
    measured: DeviceMemory
    process_bytes: int
    budget: int | None
    predicted: DeviceMemory | None
    tensors: tuple[str, ...] | None


@dataclass(frozen=True)
class Placement:
    """The devices of a loaded model, accelerators first; print it with rich for a table.

    Attributes:
        times: None before any run.
        left_mapped: bytes of host weights that were not repacked for faster kernels but stay in the mapped file,
            because memory is short.
        experts: uses of experts that two devices share, and hits; None before any.
    """

    devices: tuple[DevicePlacement, ...]
    times: RunTimes | None = None
    left_mapped: int = 0
    experts: ExpertHits | None = None

    def __getitem__(self, device: str) -> DevicePlacement:
        for placed in self.devices:
            if placed.device == device:
                return placed
        raise KeyError(device)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values: each device by its name, with totals, "times" (with "drift", a text) or None,
        "left_mapped", and "experts" (totals, and "layers") or None."""
        result: dict[str, Any] = {}
        for d in self.devices:
            entry = asdict(d)
            for kind in ("measured", "predicted"):
                if (memory := getattr(d, kind)) is not None:
                    entry[kind]["total"] = memory.total
            result[entry.pop("device")] = entry
        result["times"] = self.times.to_dict() if self.times else None
        result["left_mapped"] = self.left_mapped
        result["experts"] = self.experts.to_dict() if self.experts else None
        return result

    def __rich__(self) -> RenderableType:
        return render_placement(self)


def placement_of(context: int, plan: PlacementPlan | None, left_mapped: int = 0) -> Placement:
    """Measure a live context. `context` is the address of its llama_context; left_mapped: as in Placement."""
    buffers: Sequence[Mapping[str, Any]] = native.core().memory_of(context)
    measured = skeleton.by_device([dict(b) for b in buffers])
    names = [d for d in plan.devices if d != HOST] if plan else []
    names += [name for name in measured if name not in names and name != HOST]
    process = _process_bytes(buffers)
    devices = tuple(_device(name, measured, process, plan) for name in (*names, HOST))
    return Placement(devices, times_of(context, plan), left_mapped, expert_hits(expert_counts(context), plan))


def _device(
    name: str, measured: Mapping[str, Mapping[str, int]], process: Mapping[str, int], plan: PlacementPlan | None
) -> DevicePlacement:
    tensors = {n: t for n, t in plan.tensors.items() if any(s.device == name for s in t.segments)} if plan else None
    return DevicePlacement(
        device=name,
        measured=DeviceMemory(**measured.get(name, {"weights": 0, "kv": 0, "compute": 0})),
        process_bytes=process.get(name, 0),
        budget=plan.budgets.get(name) if plan else None,
        predicted=plan.predicted.devices.get(name) if plan else None,
        tensors=None if tensors is None else tuple(tensors),
    )


def _process_bytes(buffers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    device_of = {b["buffer_type"]: HOST if b["is_host"] else b["device"] for b in buffers}
    result: dict[str, int] = {}
    for buffer_type, entry in native.core().ledger().items():
        device = device_of.get(buffer_type, HOST)
        result[device] = result.get(device, 0) + entry["current"]
    return result
