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
from oallama.data.routing import NONE, RoutingTrace
from oallama.planning import Candidates, make_plans
from oallama.planning.cost import CostModel
from oallama.planning.divided import DividedCosts, bytes_of
from oallama.planning.expert_use import ExpertUse, SlotRun
from oallama.planning.planner import DIVISIONS
from oallama.planning.predict import Predictor
from oallama.views.plan_table import render_layers
from support.mixtures import MACHINE, MODEL, MOE, UNIFORM, WORK, candidates, plan, skewed, trace
from support.synthetic import CONTEXT, DEVICE, Speed, profile, space


@pytest.mark.parametrize(("n_experts", "n_used"), [(5, 2), (6, 3), (4, 4)])
def test_uniform_use_is_what_all_choices_give(n_experts: int, n_used: int) -> None:
    use = ExpertUse.uniform(n_experts, n_used)
    for k in range(n_experts + 1):
        hits = [len(set(choice) & set(range(k))) for choice in combinations(range(n_experts), n_used)]
        assert use.static.together[k] == pytest.approx(
            np.bincount(hits, minlength=n_used + 1) / comb(n_experts, n_used)
        )
        assert use.static.hits["decode"][k] == pytest.approx(np.mean(hits) / n_used)


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
        assert use.static.together[k] == pytest.approx(np.bincount(hits, minlength=n_used + 1) / len(hits))
        assert use.static.hits["decode"][k] == pytest.approx(np.mean(hits) / n_used, abs=1e-6)
        of = use.computed(np.array([k]), 1, decode=True)
        assert of.likely.sum() == pytest.approx(1) and of.device + of.host == pytest.approx(1)
        assert of.likely @ of.device == pytest.approx(use.static.hits["decode"][k], abs=1e-6)
    for number, layer in enumerate(ids):
        all_uses = np.bincount(layer.ravel(), minlength=n_experts)
        best = use.most_used(number, 2)
        assert best == tuple(sorted(best)) and all_uses[list(best)].sum() == np.sort(all_uses)[-2:].sum()


def test_layers_that_use_fewer_experts_count_those_alone() -> None:
    ids = skewed(np.random.default_rng(1), 2, 40, 8, 3).astype(np.uint16)
    ids[1, :, 2] = NONE
    use = ExpertUse.of_trace(trace(ids, 8))
    assert use.static.together.sum(axis=1) == pytest.approx(1) and use.static.together[8, 3] == pytest.approx(0.5)


def test_the_mean_of_tokens_counts_and_not_their_mean_share() -> None:
    """A token whose choices are all on one side waits for it: uneven tokens take longer than even ones."""
    costs = CostModel(MODEL, MACHINE, (DEVICE,), CONTEXT, expert_use=UNIFORM)
    tables, at = DividedCosts(costs, "experts"), costs.stage(1, decode=True)
    k = MOE.n_expert // 2
    even = replace(UNIFORM.static, together=np.eye(MOE.n_used + 1)[[MOE.n_used // 2] * (MOE.n_expert + 1)])
    calm = CostModel(MODEL, MACHINE, (DEVICE,), CONTEXT, expert_use=ExpertUse(even))
    share = np.array([k / MOE.n_expert])
    uneven = tables.extra(at, 0, share)[0]
    assert uneven > DividedCosts(calm, "experts").extra(calm.stage(1, decode=True), 0, share)[0]


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


def uneven(n_tokens: int = 400) -> ExpertUse:
    """Even layers with skew, odd ones without."""
    rng = np.random.default_rng(3)
    ids = skewed(rng, MOE.n_layer, n_tokens, MOE.n_expert, MOE.n_used)
    for layer in range(1, MOE.n_layer, 2):
        ids[layer] = np.argsort(rng.random((n_tokens, MOE.n_expert)), axis=1)[:, : MOE.n_used]
    return ExpertUse.of_trace(trace(ids, MOE.n_expert))


def test_layers_are_of_the_kind_of_their_skew() -> None:
    use = uneven()
    assert len(use.kinds) == 2 and use.kind_of == {layer: 1 - layer % 2 for layer in range(MOE.n_layer)}
    for layer in range(MOE.n_layer):
        of = use.of_layer(layer)
        alike = range(layer % 2, MOE.n_layer, 2)
        for k in (1, MOE.n_expert // 4, MOE.n_expert):
            wanted = np.mean([use.static.share(other, k, "decode") for other in alike])
            assert of.static.hits["decode"][k] == pytest.approx(wanted)
            assert of.static.together[k] @ np.arange(MOE.n_used + 1) / MOE.n_used == pytest.approx(wanted, abs=1e-6)
        assert of.most_used(layer, 5) == use.most_used(layer, 5)
    even = ExpertUse.of_trace(
        trace(skewed(np.random.default_rng(2), MOE.n_layer, 4000, MOE.n_expert, MOE.n_used), MOE.n_expert)
    )
    assert not even.kinds and even.of_layer(0) is even


def test_layers_of_more_skew_are_divided_first() -> None:
    """The plan of each layer's own kind is faster than that of the mean, by the layers' own numbers."""
    use = uneven()
    known, blind = (plan("30%", "experts", u) for u in (use, replace(use, kinds=(), kind_of={})))
    costs = CostModel(MODEL, MACHINE, (DEVICE,), blind.context, expert_use=use)
    assert known.predicted.request_s < Predictor(costs).request(costs.homes(blind), WORK)
    held = [0] * MOE.n_layer
    for name, t in known.tensors.items():
        if t.segments[1:] and t.segments[1].experts:
            held[int(name.split(".")[1])] = len(t.segments[1].experts)
    assert sum(held[::2]) > sum(held[1::2])


def test_a_plan_is_predicted_as_it_was_chosen() -> None:
    made = plan("50%", "experts")
    costs = CostModel(MODEL, MACHINE, (DEVICE,), made.context, expert_use=UNIFORM)
    homes = costs.homes(made)
    assert homes.division == "experts" and homes.split is not None and homes.split.max() > 0
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
    group = DividedCosts(CostModel(MODEL, MACHINE, (DEVICE,), CONTEXT, expert_use=UNIFORM), "experts").groups[0]
    assert group.width == MOE.n_expert and bytes_of(group, 3) == -(-group.nbytes * 4 // MOE.n_expert)


def keeps_the_last_used(ids: np.ndarray, n_experts: int, k: int) -> SlotRun:
    """LRU slots that take everything at once."""
    n_layers, n_tokens, n_used = ids.shape
    together, uploads = np.zeros((n_layers, n_used + 1)), np.zeros(n_layers)
    for number, layer in enumerate(ids.tolist()):
        slots: list[int] = []
        for at, token in enumerate(layer):
            missing = [e for e in token if e not in slots]
            if at >= n_tokens // 2:
                together[number, n_used - len(missing)] += 1
                uploads[number] += len(missing)
            slots = list(dict.fromkeys([*token, *slots]))[:k]
    judged = n_tokens - n_tokens // 2
    return SlotRun(together / judged, uploads / judged)


def local(rng: np.random.Generator, n_tokens: int) -> np.ndarray:
    """As `skewed`, where all experts are as likely, and tokens use those of the token before, nine times of ten."""
    ids = np.array([skewed(rng, MOE.n_layer, n_tokens, MOE.n_expert, MOE.n_used)])[0]
    ids = (ids + rng.integers(0, MOE.n_expert, (1, n_tokens, 1))) % MOE.n_expert
    for token in range(1, n_tokens):
        if rng.random() < 0.9:
            ids[:, token] = ids[:, token - 1]
    return ids


LOCAL = trace(local(np.random.default_rng(3), 400), MOE.n_expert)


def test_slots_are_what_their_simulation_says() -> None:
    use = ExpertUse.of_trace(LOCAL, keeps_the_last_used)
    assert use.slots is not None and use.slots.together.sum(axis=1) == pytest.approx(1)
    for k in (16, 32):  # simulated
        run = keeps_the_last_used(LOCAL.stages["decode"].ids, MOE.n_expert, k)
        assert use.slots.together[k] == pytest.approx(run.together.mean(axis=0))
        assert use.slots.uploads[k] == pytest.approx(run.uploads.mean())
        for layer, row in enumerate(run.together):
            hits = row @ np.arange(MOE.n_used + 1) / MOE.n_used
            assert use.slots.share(layer, k, "decode") == pytest.approx(hits)
    low, between, high = use.slots.together[[16, 20, 24]]
    assert between == pytest.approx((low + high) / 2)
    assert use.slots.share(0, 16, "prefill") == pytest.approx(16 / MOE.n_expert)
    assert not use.slots.uploads[[0, -1]].any() and use.slots.share(0, MOE.n_expert, "decode") == pytest.approx(1)


def test_slots_win_where_routing_is_local_and_the_link_is_wide() -> None:
    use = ExpertUse.of_trace(LOCAL, keeps_the_last_used)
    seconds = {name: plan("40%", name, use).predicted.request_s for name in ("slots", "experts", "exact")}
    assert seconds["slots"] < min(seconds["experts"], seconds["exact"])
    made = plan("40%", "slots", use)
    divided = {name: t for name, t in made.tensors.items() if any(s.slots for s in t.segments)}
    assert divided
    for name, t in divided.items():
        host, there = t.segments
        assert there.experts == use.most_used(int(name.split(".")[1]), there.slots) and host.nbytes == t.nbytes
        assert there.nbytes == t.nbytes // MOE.n_expert * (there.slots + 1)
    assert made.to_backend_map().count(" slots ") == len(divided)
    assert made.predicted.devices[DEVICE].total <= made.budgets[DEVICE]


def test_a_narrow_link_has_no_slots() -> None:
    """What the uploads of a step take beyond its computing is paid, so a plan keeps experts where they are."""
    use = ExpertUse.of_trace(LOCAL, keeps_the_last_used)
    narrow = profile(MODEL, cpu=Speed(5e10, 1e12), concurrency=1.0, link=2e7)
    for planner in ("slots", "auto"):
        made = candidates(use, planner=planner, machine=narrow).best
        assert not any(s.slots for t in made.tensors.values() for s in t.segments)


def test_the_host_pays_for_reading_what_enters_slots() -> None:
    """Of a mapped file, by a CPU that others wait for; weights that were read before are copied from where they are."""
    use = ExpertUse.of_trace(LOCAL, keeps_the_last_used)
    pinned = [replace(link, memory="pinned", median_s=link.median_s / 8) for link in MACHINE.links]
    machine = replace(MACHINE, links=(*MACHINE.links, *pinned))
    step = {}
    for use_mmap in (None, False):
        context = replace(CONTEXT, use_mmap=use_mmap)
        made = make_plans(space(MODEL, "40%", machine=machine, context=context, workload=WORK, expert_use=use), "slots")
        step[use_mmap] = min(made.best.predicted.tpot_s.values())
    assert step[None] > 1.05 * step[False]


def test_auto_divides_by_experts_where_routing_was_traced() -> None:
    use = ExpertUse.of_trace(LOCAL, keeps_the_last_used)
    assert {"experts", "slots"} <= {*candidates(use).plans} and not {"experts", "slots"} & {*candidates(UNIFORM).plans}
    assert candidates(use).best.planner["name"] == "slots"


def test_a_gpu_pays_for_the_expert_of_zeros() -> None:
    """It reads that once for one token, and multiplies all of a prompt's tokens with one or the other."""
    skips = UNIFORM.computed(np.array([16]), 1, decode=True)
    reads = UNIFORM.computed(np.array([16]), 1, decode=True, zeros=True)
    assert (reads.host == skips.host).all() and reads.device[:-1] == pytest.approx(skips.device[:-1] + 1 / MOE.n_used)
    assert reads.device[-1] == skips.device[-1] == 1
    prompt = UNIFORM.computed(np.array([16]), 64, decode=False, zeros=True)
    assert prompt.device == 1 and prompt.host == pytest.approx(1 - 16 / MOE.n_expert)


def few_take_all() -> RoutingTrace:
    """Eight experts take all uses."""
    ids = skewed(np.random.default_rng(2), MOE.n_layer, 400, 4, MOE.n_used // 2)
    return trace(np.concatenate([ids, ids + 4], axis=2), MOE.n_expert)


@pytest.mark.parametrize("traced", [few_take_all(), LOCAL], ids=["skewed", "local"])
def test_ways_to_divide_that_cannot_win_are_not_tried(traced: RoutingTrace) -> None:
    """Their bounds are above a plan that divides: the choice stays, and the search is shorter."""
    use = ExpertUse.of_trace(traced, keeps_the_last_used)

    def made(**more: bool) -> Candidates:
        return make_plans(space(MODEL, "40%", machine=MACHINE, workload=WORK, expert_use=use, **more))

    some, every = made(), made(all_candidates=True)
    skipped = set(DIVISIONS) & {*some.skipped}
    assert some.best == every.best and skipped and {*DIVISIONS} <= {*every.plans}
    fastest = min(some.plans[name].predicted.request_s for name in DIVISIONS if name in some.plans)
    for name in skipped:
        assert fastest <= some.skipped[name] <= every.plans[name].predicted.request_s
