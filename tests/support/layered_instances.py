"""Instances for the exact solver's tests: small random ones, ones shaped like real models, and brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from oallama.solving.layered import Instance, LayerClass, Solution

BANDWIDTH = np.array([40e9, 900e9, 400e9])  # bytes/s of the host and two accelerators when decoding
PREFILL = np.array([1.3e-9, 1.7e-11, 5.1e-11])  # seconds per byte of weight for a prompt of 512 tokens
HOP = 30e-6  # seconds an activation needs to change devices


def random_instance(seed: int, accelerators: int | None = None) -> Instance:
    """2-5 layers of 1-3 classes over 1-4 states; half have seconds that tie often; capacities from tight to roomy.

    Half have layers that count some of the next one's seconds, whose own then fall below zero.
    """
    rng = np.random.default_rng(seed)
    k = int(rng.integers(0, 3)) if accelerators is None else accelerators
    states, n_classes, n_layers = rng.integers(1, 5), rng.integers(1, 4), rng.integers(2, 6)
    unit = rng.choice([1, 256, 10**8 + 7])
    classes = []
    for _ in range(n_classes):
        n = rng.integers(2, 9)
        classes.append(
            LayerClass(
                rng.integers(0, states, n).astype(np.int16),
                rng.integers(0, states, n).astype(np.int16),
                rng.integers(0, 20, n) * 0.1 if rng.random() < 0.5 else rng.random(n),
                (rng.integers(0, 10, (n, k)) * unit).astype(np.int64),
            )
        )
    layers = rng.integers(0, n_classes, n_layers)
    layers = np.sort(layers) if rng.random() < 0.5 else layers
    capacity = (rng.uniform(0.1, 0.8, k) * 6 * n_layers * unit).astype(np.int64)
    start = tuple(int(s) for s in np.unique(rng.integers(0, states, 2)))
    if rng.random() < 0.5:
        early = rng.integers(0, 20, states) * 0.1
        early[list(start)] = 0.0  # so that no path takes less than nothing
        classes = [replace(one, seconds=one.seconds + early[one.leave] - early[one.enter]) for one in classes]
    return Instance(tuple(classes), tuple(int(x) for x in layers), capacity, start)


def brute_force(instance: Instance) -> float | None:
    """The fewest seconds of all choices that fit: inf if none fits, None if no choice's states match at all."""
    best: float | None = None
    for choice in product(*(range(len(instance.classes[which].seconds)) for which in instance.layers)):
        total = walked(instance, choice)
        if total is not None:
            seconds, nbytes = total
            found = seconds if (nbytes <= instance.capacity).all() else np.inf
            best = found if best is None else min(best, found)
    return best


def walked(instance: Instance, choice) -> tuple[float, np.ndarray] | None:
    """Seconds and bytes of a choice of ways, added up the plain way; None if its states do not match."""
    allowed, seconds, nbytes = set(instance.start), 0.0, np.zeros(len(instance.capacity), dtype=np.int64)
    for which, way in zip(instance.layers, choice, strict=True):
        one = instance.classes[which]
        if int(one.enter[way]) not in allowed:
            return None
        allowed = {int(one.leave[way])}
        seconds, nbytes = seconds + one.seconds[way], nbytes + one.nbytes[way]
    return seconds, nbytes


def assert_honest(instance: Instance, solution: Solution) -> None:
    """A solution is what it says: ways that match, sums that add up, within the capacity, not below its bound."""
    total = walked(instance, solution.ways)
    assert total is not None, "the states do not match"
    assert np.isclose(total[0], solution.seconds, rtol=1e-12)
    assert (total[1] == solution.nbytes).all() and (total[1] <= instance.capacity).all()
    assert solution.bound <= solution.seconds


def layer_like(megabytes: list[float], devices: int, kv: float = 64.0) -> LayerClass:
    """A layer whose matrices and KV cache each sit on any of D devices, with or without uploads: 2 * D^(n+3) ways.

    States: (device of the residual stream when decoding) * devices + (when prefilling). Device 0 is the host.
    """
    nbytes = np.array(megabytes) * 1e6
    homes = np.array(list(product(range(devices), repeat=len(megabytes) + 1)), dtype=np.intp)
    home, cache = homes[:, :-1], homes[:, -1]
    on = np.stack([(home == k) @ nbytes + (cache == k) * kv * 1e6 for k in range(1, devices)], axis=1).astype(np.int64)
    parts = []
    for upload, enter_decode, enter_prefill in product((False, True), range(devices), range(devices)):
        uploaded = (home == 0) & upload
        prefill_on = np.where(uploaded, 1, home)
        decode = (nbytes / BANDWIDTH[home]).sum(axis=1) + np.where(cache == 0, 2e-3, 2e-4)
        prefill = (nbytes * (PREFILL[prefill_on] + uploaded / 12e9)).sum(axis=1) + np.where(cache == 0, 6e-3, 6e-4)
        hops = []
        for enter, run_on in ((enter_decode, home), (enter_prefill, prefill_on)):
            row = (np.full(len(homes), enter), run_on[:, 0], cache, *run_on.T[1:])
            hops.append(sum((a != b) * HOP for a, b in pairwise(row)))
        seconds = 256 * (decode + hops[0]) + prefill + 8 * hops[1]
        enters = np.full(len(homes), enter_decode * devices + enter_prefill)
        parts.append((enters, home[:, -1] * devices + prefill_on[:, -1], seconds, on))
    enter, leave, seconds, on_all = (np.concatenate(column) for column in zip(*parts, strict=True))
    return LayerClass(enter.astype(np.int16), leave.astype(np.int16), seconds, on_all)


def model_like(
    megabytes: list[float], devices: int, layers: int, fraction: float, *, scales: tuple[float, ...] = (1.0,)
) -> Instance:
    """Layers of one class per scale, in a random order, and a head; the capacity holds `fraction` of their bytes."""
    rng = np.random.default_rng(0)
    classes = [layer_like([m * scale for m in megabytes], devices) for scale in scales]
    order = rng.integers(0, len(scales), layers)
    head = layer_like([400.0], devices, kv=0.0)
    total = fraction * layers * (sum(megabytes) + 64) * 1e6
    shares = np.array([1.0]) if devices == 2 else np.array([0.6, 0.4])
    capacity = (total * shares).astype(np.int64)
    return Instance((*classes, head), (*(int(x) for x in order), len(scales)), capacity, (0,))
