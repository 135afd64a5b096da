"""What changes from one plan to another, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from .plan import PlacementPlan, Segment, TensorPlacement


def describe_difference(plan: PlacementPlan, other: PlacementPlan) -> list[str]:
    """What changes from `plan` to `other`, one readable line each; empty when the placement is the same."""
    lines = []
    settings = asdict(other.context)
    changed = [f"{k} {v} -> {settings[k]}" for k, v in asdict(plan.context).items() if v != settings[k]]
    if changed:
        lines.append(f"context: {', '.join(changed)}")
    for what in (
        "model",
        "devices",
        "budgets",
        "stream_slots",
        "slot_uploads",
        "stream_caches",
        "offline_arenas",
        "whole_layers",
    ):
        if getattr(plan, what) != getattr(other, what):
            lines.append(f"{what}: {_short(getattr(plan, what))} -> {_short(getattr(other, what))}")
    moved = [il for il, (a, b) in enumerate(zip(plan.layers, other.layers, strict=False)) if a != b]
    if moved or len(plan.layers) != len(other.layers):
        lines.append(f"layers: KV cache and attention of {len(moved)} layers move ({_numbers(moved)})")
    groups: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys((*plan.tensors, *other.tensors)):
        a, b = _home(plan.tensors.get(name)), _home(other.tensors.get(name))
        if a != b:
            groups.setdefault((a, b), []).append(name)
    for (a, b), names in groups.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        lines.append(f"tensors: {len(names)} go {a} -> {b}: {', '.join(names[:2])}{more}")
    return lines


def _home(tensor: TensorPlacement | None) -> str:
    if tensor is None:
        return "nowhere"
    return " + ".join(_home_of(s) for s in tensor.segments)


def _home_of(segment: Segment) -> str:
    if segment.mode == "resident":
        return f"{segment.device} ({segment.slots} slots)" if segment.slots else segment.device
    tokens = f" from {segment.stream_from} tokens" if segment.mode == "stream" else ""
    realisation = f", {segment.realisation}" if segment.realisation else ""
    return f"{segment.device} ({segment.mode}{tokens}{realisation})"


def _short(value: object) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{k}={v}" for k, v in value.items())
    elif isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return str(value)


def _numbers(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return shown + (", ..." if len(values) > 6 else "")
