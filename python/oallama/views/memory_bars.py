"""The memory of a plan's devices as bars."""

from __future__ import annotations

from dataclasses import dataclass

from ..data.budget import format_bytes
from ..data.plan import PlacementPlan

PARTS = ("weights", "KV cache", "compute buffers", "pool for conversions")


@dataclass(frozen=True)
class MemoryBar:
    """A device. text: bytes in all, of the budget where it has one. shares: of the bar, in percent, by PARTS.

    sizes: bytes of the parts in words, "-" for none.
    """

    device: str
    text: str
    has_budget: bool
    shares: tuple[float, ...]
    sizes: tuple[str, ...]


def memory_bars(plan: PlacementPlan) -> list[MemoryBar]:
    """A bar is as long as the budget or, without one, as the largest sum of all devices."""
    totals = [memory.total for memory in plan.predicted.devices.values()]
    bars = []
    for device in plan.devices:
        memory, budget = plan.predicted.devices.get(device), plan.budgets.get(device)
        if memory is None:
            continue
        sizes = (memory.weights, memory.kv, memory.compute, memory.pool)
        whole = max(memory.total, budget, 1) if budget else max(*totals, 1)
        used = format_bytes(memory.total)
        bars.append(
            MemoryBar(
                device,
                f"{used} of {format_bytes(budget)}" if budget else used,
                budget is not None,
                tuple(round(100 * size / whole, 2) for size in sizes),
                tuple(format_bytes(size) if size else "-" for size in sizes),
            )
        )
    return bars
