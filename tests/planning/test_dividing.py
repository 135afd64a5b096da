"""The planner of divided weights: what may be divided, that budgets hold, and that it wins where it should."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.data.plan import HOST, PlacementPlan
from oallama.errors import OallamaError
from oallama.planning import Workload, make_plans
from oallama.planning.cost import CostModel
from oallama.planning.divided import DividedGroup, bytes_of, groups, top_up
from oallama.planning.planner import BESIDE
from oallama.planning.predict import Predictor
from oallama.planning.space import BudgetTooSmall
from support.synthetic import CONTEXT, DEVICE, QWQ_32B, Shape, Speed, graph, profile, space

SHAPE = Shape(6, 4096, 32, 8, 128, 14336, 32000, "q4_K")
MODEL = graph(SHAPE)
HOST_SPEED = Speed(5e10, 1e12)
MACHINE = profile(MODEL, cpu=HOST_SPEED, concurrency=1.0)
WORK = Workload(64, 256)


def plan(budget: str, planner: str, machine=MACHINE, **more) -> PlacementPlan:
    return make_plans(space(MODEL, budget, machine=machine, workload=WORK, **more), planner).best


def costs(machine=MACHINE) -> CostModel:
    return CostModel(MODEL, machine, (DEVICE,), CONTEXT)


def test_feed_forwards_and_the_output_matrix_are_divided():
    found = groups(costs())
    names = [[costs().targets[t] for t in group.targets] for group in found]
    assert [len(n) for n in names] == [3] * SHAPE.n_layer + [1] and names[-1] == ["output.weight"]
    assert {n.split(".")[2] for n in names[0]} == {"ffn_up", "ffn_gate", "ffn_down"}
    assert all(group.width == SHAPE.n_ff for group in found[:-1])


def test_a_tied_output_stays_whole():
    tied = replace(MODEL, tied_output=True)
    assert len(groups(CostModel(tied, MACHINE, (DEVICE,), CONTEXT))) == SHAPE.n_layer


def test_other_operators_between_the_matrices_keep_them_whole():
    tiers = {n: tuple(replace(op, op="NORM") if op.op == "GLU" else op for op in ops) for n, ops in MODEL.tiers.items()}
    found = groups(CostModel(replace(MODEL, tiers=tiers), MACHINE, (DEVICE,), CONTEXT))
    assert len(found) == 1  # the output matrix


@given(st.integers(0, 10**6), st.lists(st.tuples(st.integers(2, 40), st.data()), min_size=1, max_size=8))
def test_topping_up_keeps_to_bytes_steps_and_ends(room: int, sizes: list[tuple[int, st.DataObject]]):
    wanted = [DividedGroup((i,), 32 * n, 32, 1000 * n + 7) for i, (n, _) in enumerate(sizes)]
    before = [32 * data.draw(st.integers(1, n - 1)) for n, data in sizes]
    most = [32 * data.draw(st.integers(1, n - 1)) for n, data in sizes]
    counts = top_up(wanted, before, most, room)
    taken = sum(bytes_of(g, n) - bytes_of(g, old) for g, n, old in zip(wanted, counts, before, strict=True))
    assert 0 <= taken <= room
    for group, old, count, end in zip(wanted, before, counts, most, strict=True):
        assert count % group.step == 0 and old <= count <= max(old, end)
        # To the last step.
        assert count + group.step > end or room - taken < bytes_of(group, count + group.step) - bytes_of(group, count)


@pytest.mark.parametrize("concurrency", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_group_takes_what_its_two_parts_take(concurrency: float, share: float):
    """The prediction against the formula, for one divided feed-forward."""
    model = costs(profile(MODEL, cpu=HOST_SPEED, concurrency=concurrency))
    group = groups(model)[0]
    predictor = Predictor(model)
    whole = builder_of(model).uniform(1)
    split = np.zeros(len(model.targets), dtype=np.intp)
    split[list(group.targets)] = int(share * group.width)
    targets = whole.targets.copy()
    targets[list(group.targets)] = 0
    divided = replace(whole, targets=targets, split=split)
    at = model.stage(1, decode=True)
    ops = np.flatnonzero(np.isin(at.graph.target, group.targets))
    device, host = share * at.seconds[1, ops].sum(), (1 - share) * at.seconds[0, ops].sum()
    together = device + host - concurrency * min(device, host)
    moved = model.link_s(1, "d2h", 4 * SHAPE.n_embd) + model.link_s(1, "h2d", 4 * SHAPE.n_embd)
    expected = together - at.seconds[1, ops].sum() + moved + model.switch[0, 1] + model.switch[1, 0]
    found = predictor.stage(divided, 1, 100, decode=True).total - predictor.stage(whole, 1, 100, decode=True).total
    assert found[0] == pytest.approx(expected)


def builder_of(model: CostModel):
    return space(MODEL, "50%", machine=model.profile).builder(CONTEXT)


@settings(max_examples=15)
@given(st.integers(3, 99), st.sampled_from([0.3, 1.0]))
def test_budgets_hold_and_plans_survive_their_file(percent: int, concurrency: float):
    machine = profile(MODEL, cpu=HOST_SPEED, concurrency=concurrency)
    try:
        result = plan(f"{percent}%", "divided", machine)
    except BudgetTooSmall:
        assert percent < 10  # compute buffers do not fit
        return
    assert result.predicted.devices[DEVICE].weights <= MODEL.weights_bytes * percent / 100
    assert PlacementPlan.from_json(result.to_json()) == result
    for tensor in result.tensors.values():
        assert sum(s.nbytes for s in tensor.segments) == tensor.nbytes
        assert [s.device for s in tensor.segments] in ([HOST], [DEVICE], [HOST, DEVICE])


def test_it_is_smooth_where_whole_weights_make_steps_and_wins():
    budgets = range(60, 92, 6)
    seconds = {name: [plan(f"{b}%", name).predicted.request_s for b in budgets] for name in ("exact", "divided")}
    assert all(b <= a * 1.001 for a, b in zip(seconds["divided"], seconds["divided"][1:], strict=False))
    assert all(d < e for d, e in zip(seconds["divided"], seconds["exact"], strict=True))
    assert max(e / d for d, e in zip(seconds["divided"], seconds["exact"], strict=True)) > 1.1


def test_it_never_loses_to_whole_weights():
    for concurrency, budget in product((0.3, 1.0), range(10, 100, 20)):
        machine = profile(MODEL, cpu=HOST_SPEED, concurrency=concurrency)
        seconds = {name: plan(f"{budget}%", name, machine).predicted.request_s for name in ("exact", "divided")}
        assert seconds["divided"] <= seconds["exact"] * 1.005  # what both may leave unproven


def test_auto_takes_it_where_it_wins_and_not_where_the_sides_wait_for_each_other():
    assert "segment blk." in plan("90%", "auto").to_backend_map()
    alone = profile(MODEL, cpu=HOST_SPEED, concurrency=0.0)
    assert "segment " not in plan("90%", "auto", alone).to_backend_map()
    with pytest.raises(OallamaError, match="does not apply"):
        plan("90%", "divided", profile(MODEL, cpu=HOST_SPEED, concurrency=BESIDE / 2))


def test_stock_llama_cpp_cannot_follow():
    with pytest.raises(OallamaError, match="divided between two devices"):
        plan("90%", "divided").to_llama_cpp_flags()


def test_a_plan_for_a_published_shape():
    model = graph(QWQ_32B)
    machine = profile(model, concurrency=1.0, overlap=0.9)
    result = make_plans(space(model, "90%", machine=machine), "divided").best
    whole = make_plans(space(model, "90%", machine=machine), "exact").best
    assert result.predicted.request_s < 0.85 * whole.predicted.request_s
    assert len([t for t in result.tensors.values() if len(t.segments) == 2]) > 150
