"""Two parts of a model that compute at once: the last layers a micro-batch of a prompt, the first ones the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .costs import make_costs
from .problem import Device, Problem

Layers = tuple[str, ...]


def overlapping(problem: Problem, seconds: Callable[[Layers], float]) -> Layers | None:
    """The fastest allocation that has its first layers on one device and its last ones on another, which is not the
    client: the client hands work to the last device and does not wait (predict.py). None where nothing fits.

    seconds: of the request with these layers.
    """
    costs, names = make_costs(problem), [device.name for device in problem.devices]
    known: dict[Layers, float | None] = {}

    def of(layers: Layers) -> float | None:
        if layers not in known:
            fits = costs.fits(tuple(names.index(name) for name in layers))
            known[layers] = seconds(layers) if fits else None
        return known[layers]

    pairs = [(a, b) for a in problem.devices for b in problem.devices[1:] if a is not b]
    for first, last in pairs:
        _walk(problem, first, last, of)
    found = {layers: s for layers, s in known.items() if s is not None}
    return min(found, key=found.__getitem__, default=None)


def _walk(problem: Problem, first: Device, last: Device, of: Callable[[Layers], float | None]) -> None:
    """From where both compute for as long, one layer at a time, as long as that is faster or does not fit yet."""
    n_layers = len(problem.layers)

    def layers(n_first: int) -> Layers:
        return (first.name,) * n_first + (last.name,) * (n_layers - n_first)

    begin = _even(problem, first, last)
    for step in (-1, 1):
        at, best = begin, of(layers(begin))
        while 0 < at + step < n_layers:
            at += step
            now = of(layers(at))
            if best is not None and (now is None or now >= best):
                break
            best = now


def _even(problem: Problem, first: Device, last: Device) -> int:
    """Layers of the first device with which both compute for about as long; each has one at least."""
    times = [(problem.seconds_on(first, layer), problem.seconds_on(last, layer)) for layer in problem.layers]
    return min(range(1, max(2, len(times))), key=lambda n: abs(_sum(times[:n], 0) - _sum(times[n:], 1)))


def _sum(times: Sequence[tuple[float, float]], which: int) -> float:
    return sum(pair[which] for pair in times)
