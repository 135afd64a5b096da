"""Algorithm 1 of OATO, literally and slowly: plain loops from docs/sources.md, no code shared with planning/oato.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Reference:
    on_device: list[bool]
    affinity: list[float]
    order: list[int]
    iterations: int
    reason: str
    predicted_seconds: float


def reference_oato(
    t_host: list[float],
    t_device: list[float],
    nbytes: list[int],
    capacity: float,
    edges: list[tuple[int, int, float]],
    anchors: list[tuple[int, bool, float]],
    fraction: float = 0.90,
    fill: str = "prefix",
    skip_negative: bool = False,
    transfer: str = "current",
    max_iterations: int = 64,
) -> Reference:
    n = len(nbytes)

    def transfers_of(i: int, plan: list[bool], i_on_device: bool) -> float:
        """Seconds of the transfers of operator i if it sat there, all others as in `plan`."""
        seconds = 0.0
        for a, b, cost in edges:
            if a == i and b != i and plan[b] != i_on_device:
                seconds += cost
        for a, b, cost in edges:
            if b == i and a != i and plan[a] != i_on_device:
                seconds += cost
        anchored = 0.0
        for a, side, cost in anchors:
            if a == i and side != i_on_device:
                anchored += cost
        return seconds + anchored

    def total_seconds(plan: list[bool]) -> float:
        seconds = 0.0
        for i in range(n):
            seconds += t_device[i] if plan[i] else t_host[i]
        for a, b, cost in edges:
            if plan[a] != plan[b]:
                seconds += cost
        for a, side, cost in anchors:
            if plan[a] != side:
                seconds += cost
        return seconds

    def place(extra: list[float]) -> tuple[list[float], list[int], list[bool]]:
        benefit = [(t_host[i] - t_device[i] - extra[i]) / nbytes[i] for i in range(n)]
        affinity = []
        for i in range(n):
            low, high = min(benefit), max(benefit)
            affinity.append((benefit[i] - low) / (high - low) if high > low else 1.0)
        order = sorted(range(n), key=lambda i: -affinity[i])  # Python's sort is stable
        limit = fraction * capacity
        on_device = [False] * n
        running = 0.0
        for i in order:
            if skip_negative and benefit[i] <= 0:
                continue
            if running + nbytes[i] <= limit:
                running += nbytes[i]
                on_device[i] = True
            elif fill == "prefix":
                break
        return affinity, order, on_device

    affinity, order, plan = place([0.0] * n)
    best = (total_seconds(plan), plan, affinity, order)
    history = [plan]
    iterations, reason = 0, "bound"
    while iterations < max_iterations:
        extra = []
        for i in range(n):
            if transfer == "current":
                extra.append(transfers_of(i, plan, plan[i]))
            else:
                extra.append(transfers_of(i, plan, True) - transfers_of(i, plan, False))
        affinity, order, plan = place(extra)
        iterations += 1
        seconds = total_seconds(plan)
        if seconds < best[0]:
            best = (seconds, plan, affinity, order)
        if plan in history:
            reason = "converged" if plan == history[-1] else "cycle"
            break
        history.append(plan)
    return Reference(best[1], best[2], best[3], iterations, reason, best[0])
