"""Bytes that a plan may use of each accelerator, from what a user says and what is free."""

from __future__ import annotations

from collections.abc import Mapping

from oallama.data.budget import Budget, format_bytes, gpu_reserve, parse_budget, parse_margin
from oallama.data.entries import DeviceInfo
from oallama.data.profile import Profile
from oallama.engine import device_list
from oallama.engine.device_list import Device
from oallama.errors import OallamaError
from oallama.profiling.fingerprint import computes_on_host


def budgets_for(
    vram: str | int | None,
    accelerators: tuple[str, ...],
    weights_bytes: int,
    elsewhere: Profile | None,
    margin: str | int | None = None,
) -> dict[str, Budget]:
    """One budget per accelerator: "8GiB" for each of them, or "CUDA0=20GiB,CUDA1=6GiB".

    margin: as in Choices. Raises OallamaError for what is not understood, and for a margin beside budgets that are all
    in bytes or shares.
    """
    asked: dict[str, str | int] = {name: "auto" if vram is None else vram for name in accelerators}
    if isinstance(vram, str) and "=" in vram:
        parts = (part.partition("=") for part in vram.split(","))
        asked = {name.strip(): text.strip() for name, _, text in parts}
        if set(asked) != set(accelerators):
            raise OallamaError(f"the budget {vram!r} names other devices than the plan: {', '.join(accelerators)}")
    found = {}
    for name in accelerators:
        there = elsewhere.device(name) if elsewhere else device_list.device(name)
        free = there.memory_total if isinstance(there, DeviceInfo) else there.memory_free
        keep = default_margin(there) if margin is None else parse_margin(margin)
        found[name] = parse_budget(asked[name], weights_bytes=weights_bytes, free_bytes=free, margin=keep)
    if margin is not None and found and not any(budget.is_auto for budget in found.values()):
        raise OallamaError(f'the margin {margin} is for the budget "auto", not for {vram}; leave one of them out')
    return found


def more_than_there_is(budgets: Mapping[str, Budget], elsewhere: Profile | None) -> list[str]:
    """A line for each budget that is above the memory of its device; devices that do not tell theirs have none."""
    lines = []
    for name, budget in budgets.items():
        total = (elsewhere.device(name) if elsewhere else device_list.device(name)).memory_total
        if 0 < total < (budget.bytes_total or 0):
            lines.append(f"the budget of {name} is {budget.text}, but it has {format_bytes(total)} of memory")
    return lines


def refuse_margin(margin: str | int | None, because: str = "a plan has its budget") -> None:
    """Raises OallamaError for a margin where nothing is planned for free memory."""
    if margin is not None:
        raise OallamaError(f'the margin {margin} is for the budget "auto": {because}; leave it out')


def default_margin(device: Device | DeviceInfo) -> int:
    """Bytes that the budget "auto" leaves free on a device: none where its memory is the host's."""
    return 0 if computes_on_host(device.description) else gpu_reserve(device.memory_total)
