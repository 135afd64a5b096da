"""Chains that a backend computes in one piece are priced as measured; a plan that cuts one pays for its parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from oallama.data.entries import CHAINS, FEED_FORWARD, NORM, OTHER, ROPE_STORE
from oallama.data.fusion import chains
from oallama.data.profile import Profile
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.planning import OperatorGraph, Workload
from oallama.planning.cost import CostModel
from oallama.planning.layered_model import LayeredModel
from oallama.planning.predict import Predictor
from oallama.planning.stage import Homes
from oallama.solving.solve import solve
from support.layered_costs import SLOWER, assert_equal_seconds, everything_on_the_host
from support.synthetic import CONTEXT, DEVICE, SMALL, Shape, graph, profile

FUSED = {NORM: 1.5e-6, ROPE_STORE: 2.5e-6, FEED_FORWARD: 9e-6}


def everything_on(costs: CostModel, device: int, host: tuple[str, ...] = ()) -> Homes:
    targets = np.array([0 if name in host else device for name in costs.targets], dtype=np.int8)
    return Homes(
        targets=targets,
        upload=np.zeros(len(targets), bool),
        small=np.full(len(costs.small), device, dtype=np.int8),
        small_upload=np.zeros(len(costs.small), bool),
        layers=np.full(costs.graph.n_layer + 1, device, dtype=np.int8),
    )


def test_chains_of_the_engines_graphs(tiny: Callable[..., Path]) -> None:
    """Both norms of a layer and the last one, the keys' RoPE, the feed-forward."""

    def found(arch: str, tier: int) -> Counter[str]:
        model = autoplan.read_graph(tiny(arch), Settings(n_ctx=512))
        return Counter(chain.kind for chain in chains(model, tier, "f16"))

    for tier in (1, 512):
        assert found("llama", tier) == {NORM: 9, ROPE_STORE: 4, FEED_FORWARD: 4}
        assert found("qwen3moe", tier) == {NORM: 9, ROPE_STORE: 2}  # keys and queries have norms, too
        assert found("minicpm3", tier) == {NORM: 17, FEED_FORWARD: 4}  # MLA stores its keys in another way


def test_a_chain_costs_what_was_measured() -> None:
    model = graph()
    apart, fused = (
        CostModel(model, machine, [DEVICE], CONTEXT) for machine in (profile(model), profile(model, in_one_piece=FUSED))
    )
    per_layer = {NORM: 2, ROPE_STORE: 1, FEED_FORWARD: 1}
    stage = apart.stage(1, decode=True)
    other, ffn = (
        float(stage.other[1, 0]),
        2 * float(stage.seconds[1, stage.graph.target == targets(apart)["blk.0.ffn_up.weight"]][0]),
    )
    gain = {
        NORM: FUSED[NORM] - 2 * other,
        ROPE_STORE: FUSED[ROPE_STORE] - 2 * other,
        FEED_FORWARD: FUSED[FEED_FORWARD] - ffn - other,
    }
    expected = SMALL.n_layer * sum(n * gain[kind] for kind, n in per_layer.items()) + gain[NORM]

    def tpot(costs: CostModel, device: int) -> float:
        return Predictor(costs).tpot(everything_on(costs, device), 100)

    assert tpot(fused, 1) - tpot(apart, 1) == pytest.approx(expected, rel=1e-9)
    assert tpot(fused, 0) == tpot(apart, 0)  # the host's were not measured


def targets(costs: CostModel) -> dict[str, int]:
    return {name: i for i, name in enumerate(costs.targets)}


def test_a_cut_breaks_a_chain() -> None:
    """With one matrix of a feed-forward on the host the others are priced apart."""
    model = graph()
    apart, fused = (
        CostModel(model, machine, [DEVICE], CONTEXT) for machine in (profile(model), profile(model, in_one_piece=FUSED))
    )
    for host in (("blk.1.ffn_up.weight",), ("blk.1.ffn_gate.weight",), ("blk.1.ffn_down.weight",)):
        whole, cut = (
            [Predictor(c).tpot(everything_on(c, 1, names), 100) for c in (apart, fused)] for names in ((), host)
        )
        gain_whole, gain_cut = (a - f for a, f in (whole, cut))
        stage = apart.stage(1, decode=True)
        up = float(stage.seconds[1, stage.graph.target == targets(apart)["blk.1.ffn_up.weight"]][0])
        lost = 0.0 if "down" in host[0] else 2 * up + float(stage.other[1, 0]) - FUSED[FEED_FORWARD]
        assert gain_whole - gain_cut == pytest.approx(lost, abs=1e-15)


@pytest.mark.parametrize("accelerators", [(DEVICE,), (DEVICE, "GPU1")])
@pytest.mark.parametrize("shape", [SMALL, Shape(tied=True), Shape(n_expert=8, n_layer=3), Shape(one_qkv=True, n_ff=0)])
def test_layers_add_up_with_chains(shape: Shape, accelerators: tuple[str, ...]) -> None:
    """Norms lie across the cuts between layers."""
    model = graph(shape)
    costs = CostModel(model, profile(model, more={"GPU1": SLOWER}, in_one_piece=FUSED), accelerators, CONTEXT)
    for work, uploads in product((Workload(700, 20, 100), Workload(0, 30)), (False, True)):
        assert_equal_seconds(costs, work, uploads, n=8)
    if len(accelerators) == 1:
        assert_equal_seconds(costs, Workload(40, 20), False, n=16, divides=shape.n_ff > 0)


def test_a_layer_may_take_less_than_nothing() -> None:
    """A norm was timed slow apart. The layer before it pays for that, the gain of its chain counts in the next one."""
    model = graph()
    machine = profile(model, in_one_piece=FUSED)
    slow = tuple(replace(t, median_s=5e-3) if t.op == OTHER and t.device == DEVICE else t for t in machine.operators)
    costs = CostModel(model, replace(machine, operators=slow), (DEVICE,), CONTEXT)
    work, nothing = Workload(40, 20), np.zeros(len(costs.targets), bool)
    layered = LayeredModel(costs, work, nothing, [0] * model.n_layer)
    instance = layered.instance([int(costs.nbytes.sum()) // 2])
    assert min(one.seconds.min() for one in instance.classes) < 0
    by_labels, by_program = (solve(instance, gap=0, time_limit_s=60, method=method) for method in ("dp", "milp"))
    assert by_labels.status == by_program.status == "optimal"
    assert by_labels.seconds == pytest.approx(by_program.seconds, rel=1e-8)
    homes = layered.homes(by_labels.ways.tolist(), everything_on_the_host(costs))
    assert by_labels.seconds == pytest.approx(Predictor(costs).request(homes, work), rel=1e-9)


def test_a_profile_keeps_its_chains(tmp_path: Path) -> None:
    model: OperatorGraph = graph()
    machine = profile(model, in_one_piece=FUSED)
    machine.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == machine
    assert machine.chain_time(DEVICE, NORM, "f32", (64, 1), 1) == FUSED[NORM]
    assert machine.chain_time(DEVICE, NORM, "f32", (64, 1), 1024) is None  # not measured beyond 512
    assert machine.chain_time(DEVICE, NORM, "f32", (65, 1), 1) is None
    assert machine.chain_time("CPU", NORM, "f32", (64, 1), 1) is None
    slower = machine.scaled({DEVICE: 2.0})
    assert slower.chain_time(DEVICE, NORM, "f32", (64, 1), 1) == 2 * FUSED[NORM]
    wrong = replace(machine, chains=(replace(machine.chains[0], kind="everything"),))
    wrong.save(tmp_path / "wrong.json")
    with pytest.raises(OallamaError, match=f"kind is 'everything', expected {' or '.join(CHAINS)}".replace("+", r"\+")):
        Profile.load(tmp_path / "wrong.json")
