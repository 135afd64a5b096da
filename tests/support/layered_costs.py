"""The layered form beside the predictor, on random placements and machines."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from oallama.data.operators import OperatorGraph
from oallama.data.profile import Profile
from oallama.data.workload import Workload
from oallama.planning.cost import CostModel
from oallama.planning.divided import bytes_of
from oallama.planning.layered_model import LayeredModel
from oallama.planning.predict import Predictor
from oallama.planning.stage import Homes
from support.synthetic import Shape, Speed, graph, profile

SLOWER = Speed(200e9, 20e12)


def everything_on_the_host(costs: CostModel) -> Homes:
    n = len(costs.small)
    return Homes(
        targets=np.zeros(len(costs.targets), np.int8),
        upload=np.zeros(len(costs.targets), bool),
        small=np.zeros(n, np.int8),
        small_upload=np.zeros(n, bool),
        layers=np.zeros(costs.graph.n_layer + 1, np.int8),
    )


def random_arcs(layered: LayeredModel, rng: np.random.Generator) -> list[int]:
    """One arc per layer with matching states."""
    instance = layered.instance([10**15] * (len(layered.costs.names) - 1))
    classes = [instance.classes[c] for c in instance.layers]
    states, arcs = np.array(instance.start), []
    for at, cls in enumerate(classes):
        possible = np.isin(cls.enter, states)
        if at + 1 < len(classes):
            possible &= np.isin(cls.leave, classes[at + 1].enter)
        arcs.append(int(rng.choice(np.flatnonzero(possible))))
        states = cls.leave[arcs[-1:]]
    return arcs


def assert_equal_seconds(
    costs: CostModel, work: Workload, uploads: bool, n: int, seed: int = 0, divides: bool = False
) -> None:
    """n random placements: the sum over layers is the predictor's request, and their bytes are the placement's."""
    rng, predictor = np.random.default_rng(seed), Predictor(costs)
    upload = np.zeros(len(costs.targets), bool)
    if uploads:  # not only those that pay
        upload = rng.random(len(upload)) < 0.7
    layered = LayeredModel(costs, work, upload, [0] * costs.graph.n_layer, divides=divides)
    instance = layered.instance([10**15] * (len(costs.names) - 1))
    n_divided = 0
    for _ in range(n):
        arcs = random_arcs(layered, rng)
        homes = layered.homes(arcs, everything_on_the_host(costs))
        if homes.split is not None:
            parts = [(g, int(homes.split[g.targets[0]])) for g in layered.divided.groups]
            n_divided += sum(count > 0 for _, count in parts)
            whole = int(costs.nbytes[homes.targets > 0].sum())
            small = sum(costs.graph.tensor[name].nbytes for name, d in zip(costs.small, homes.small, strict=True) if d)
            taken = sum(instance.classes[c].nbytes[arc, 0] for c, arc in zip(instance.layers, arcs, strict=True))
            assert taken == whole + small + sum(bytes_of(g, count) for g, count in parts if count)
        total = sum(instance.classes[c].seconds[arc] for c, arc in zip(instance.layers, arcs, strict=True))
        assert total == pytest.approx(predictor.request(homes, work), rel=1e-12)
    assert bool(n_divided) == divides


TINY = tuple(
    graph(Shape(n_layer, n_embd=64, n_ff=0, n_vocab=n_vocab, n_head_kv=kv, one_qkv=True, fused=fused), tiers=(1, 64))
    for n_layer, n_vocab, kv, fused in product((1, 2), (64, 512), (1, 4), (True, False))
)


def random_machine(model: OperatorGraph, rng: random.Random, accelerators: int) -> Profile:
    """Any device may be the fastest for any operator; changes of device cost anything."""

    def speed() -> Speed:
        return Speed(10 ** rng.uniform(8, 10), 10 ** rng.uniform(9, 12), 10 ** rng.uniform(-7, -5))

    machine = profile(
        model, gpu=speed(), cpu=speed(), link=10 ** rng.uniform(7, 11), latency=10 ** rng.uniform(-8, -5),
        more={f"GPU{i}": speed() for i in range(1, accelerators)}, flash=(True, False),
    )  # fmt: skip
    switches = tuple(replace(s, median_s=10 ** rng.uniform(-8, -5)) for s in machine.switches)
    jitter = tuple(replace(o, median_s=o.median_s * rng.uniform(0.5, 2)) for o in machine.operators)
    return replace(machine, switches=switches, operators=jitter)
