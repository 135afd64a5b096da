"""The planner `experts`: what a device's experts compute, by a trace or by chance, and what plans make of it."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oallama.data.plan import HOST
from oallama.data.routing import NONE
from oallama.planning.cost import CostModel
from oallama.planning.divided import DividedCosts, bytes_of
from oallama.planning.expert_use import ExpertUse
from oallama.planning.predict import Predictor
from oallama.views.plan_table import render_layers
from support.mixture import MACHINE, MODEL, MOE, UNIFORM, WORK, plan, skewed, trace
from support.synthetic import CONTEXT, DEVICE


@pytest.mark.parametrize(("n_experts", "n_used"), [(5, 2), (6, 3), (4, 4)])
def test_uniform_use_is_what_all_choices_give(n_experts: int, n_used: int) -> None:
    use = ExpertUse.uniform(n_experts, n_used)
    for k in range(n_experts + 1):
        hits = [len(set(choice) & set(range(k))) for choice in combinations(range(n_experts), n_used)]
        assert use.together[k] == pytest.approx(np.bincount(hits, minlength=n_used + 1) / comb(n_experts, n_used))
        assert use.hits["decode"][k] == pytest.approx(np.mean(hits) / n_used)


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(2, 12), st.integers(1, 3))
def test_a_trace_is_counted_one_by_one(seed: int, n_layers: int, n_tokens: int, n_used: int) -> None:
    rng, n_experts = np.random.default_rng(seed), 5
    ids = skewed(rng, n_layers, n_tokens, n_experts, n_used)
    use, half = ExpertUse.of_trace(trace(ids, n_experts)), n_tokens // 2
    for k in range(n_experts + 1):
        hits = []
        for layer in ids:
            learned = np.bincount(layer[:half].ravel(), minlength=n_experts)
            best = set(np.argsort(-learned, kind="stable")[:k].tolist())
            hits += [len(best & set(token.tolist())) for token in layer[half:]]
        assert use.together[k] == pytest.approx(np.bincount(hits, minlength=n_used + 1) / len(hits))
        assert use.hits["decode"][k] == pytest.approx(np.mean(hits) / n_used, abs=1e-6)
        computed, likely = use.computed(k, 1, decode=True)
        assert likely.sum() == pytest.approx(1) and computed @ likely == pytest.approx(use.hits["decode"][k], abs=1e-6)
    for number, layer in enumerate(ids):
        all_uses = np.bincount(layer.ravel(), minlength=n_experts)
        best = use.most_used(number, 2)
        assert best == tuple(sorted(best)) and all_uses[list(best)].sum() == np.sort(all_uses)[-2:].sum()


def test_layers_that_use_fewer_experts_count_those_alone() -> None:
    ids = skewed(np.random.default_rng(1), 2, 40, 8, 3).astype(np.uint16)
    ids[1, :, 2] = NONE
    use = ExpertUse.of_trace(trace(ids, 8))
    assert use.together.sum(axis=1) == pytest.approx(1) and use.together[8, 3] == pytest.approx(0.5)


def test_the_mean_of_tokens_counts_and_not_their_mean_share() -> None:
    """A token whose choices are all on one side waits for it: uneven tokens take longer than even ones."""
    costs = CostModel(MODEL, MACHINE, (DEVICE,), CONTEXT, expert_use=UNIFORM)
    tables, at = DividedCosts(costs, by_experts=True), costs.stage(1, decode=True)
    k = MOE.n_expert // 2
    even = replace(UNIFORM, together=np.eye(MOE.n_used + 1)[[MOE.n_used // 2] * (MOE.n_expert + 1)])
    calm = CostModel(MODEL, MACHINE, (DEVICE,), CONTEXT, expert_use=even)
    share = np.array([k / MOE.n_expert])
    uneven = tables.extra(at, 0, share)[0]
    assert uneven > DividedCosts(calm, by_experts=True).extra(calm.stage(1, decode=True), 0, share)[0]


def test_skewed_experts_win_more_than_uniform_ones() -> None:
    use = ExpertUse.of_trace(
        trace(skewed(np.random.default_rng(2), MOE.n_layer, 400, MOE.n_expert, MOE.n_used), MOE.n_expert)
    )
    chance, known, whole = plan("40%", "experts"), plan("40%", "experts", use), plan("40%", "exact", use)
    assert known.predicted.request_s < chance.predicted.request_s
    assert known.predicted.request_s < whole.predicted.request_s
    divided = {name: t for name, t in known.tensors.items() if any(s.experts for s in t.segments)}
    assert divided
    for name, t in divided.items():
        host, there = t.segments
        layer = int(name.split(".")[1])
        assert there.experts == use.most_used(layer, len(there.experts)) and there.device == DEVICE
        assert sorted((*host.experts, *there.experts)) == list(range(MOE.n_expert)) and host.device == HOST
    assert known.to_backend_map().count(" experts ") == len(divided)


def test_a_plan_is_predicted_as_it_was_chosen() -> None:
    made = plan("50%", "experts")
    costs = CostModel(MODEL, MACHINE, (DEVICE,), made.context, expert_use=UNIFORM)
    homes = costs.homes(made)
    assert homes.by_experts and homes.split is not None and homes.split.max() > 0
    assert Predictor(costs).request(homes, WORK) == pytest.approx(made.predicted.request_s, rel=1e-9)


def test_a_plan_says_what_its_experts_are_expected_to_compute() -> None:
    made = plan("50%", "experts")
    (note,) = (note for note in made.predicted.notes if note.startswith(f"expected on {DEVICE}: "))
    (k,) = {len(s.experts) for t in made.tensors.values() for s in t.segments[1:] if s.experts}
    assert note.startswith(f"expected on {DEVICE}: {k} of {MOE.n_expert} experts compute {k / MOE.n_expert:.0%} of a")
    shown = StringIO()
    Console(width=200, file=shown).print(render_layers(made))
    assert f"{DEVICE} has {k} experts of each while CPU computes the others" in shown.getvalue()


@pytest.mark.parametrize("budget", ["20%", "45%", "80%"])
def test_budgets_hold(budget: str) -> None:
    made = plan(budget, "experts")
    assert made.predicted.devices[DEVICE].total <= made.budgets[DEVICE]
    group = DividedCosts(CostModel(MODEL, MACHINE, (DEVICE,), CONTEXT, expert_use=UNIFORM), by_experts=True).groups[0]
    assert group.width == MOE.n_expert and bytes_of(group, 3) == -(-group.nbytes * 4 // MOE.n_expert)
