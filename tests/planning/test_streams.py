"""Planning of streamed weights: the prediction, break-even, what is chosen, and the modes that stream everything."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from oallama.data.plan import HOST, ContextSettings, PlacementPlan
from oallama.errors import OallamaError
from oallama.planning import Workload, make_plans, uncertainty
from oallama.planning.cost import CostModel
from oallama.planning.exact import exact
from oallama.planning.predict import Predictor
from oallama.planning.stage import Homes
from oallama.planning.streams import NEVER, break_even, stream_pays
from support.layered_costs import TINY, random_machine
from support.synthetic import CONTEXT, DEVICE, QWQ_32B, SMALL, FakeMemory, Shape, Speed, graph, profile, space

MODEL = graph(SMALL)
QWQ = graph(QWQ_32B)
PCIE4 = profile(QWQ, link=10e9, overlap=1.0)  # pinned: twice that
PROMPT = Workload(2048, 128)
QWQ_MEMORY = FakeMemory(QWQ, compute=300 << 20)


def streamed(costs: CostModel, start: int = 1, caches: bool = False) -> Homes:
    """All targets on the host and streamed, all else on the device."""
    n = len(costs.small)
    layers = np.ones(costs.graph.n_layer + 1, np.int8)
    return Homes(
        targets=np.zeros(len(costs.targets), np.int8),
        upload=np.zeros(len(costs.targets), bool),
        small=np.array([name != "token_embd.weight" for name in costs.small], np.int8),
        small_upload=np.zeros(n, bool),
        layers=layers * (not caches),
        stream=np.full(len(costs.targets), start),
        stream_caches=caches,
    )


def stream_plan(budget: str, workload: Workload = PROMPT, planner: str = "exact", **more) -> PlacementPlan:
    request = space(QWQ, budget, machine=PCIE4, memory=QWQ_MEMORY, workload=workload, free_ubatch=True, **more)
    return make_plans(request, planner).best


def modes(plan: PlacementPlan) -> set[str]:
    return {t.mode for t in plan.tensors.values()}


# ---- prediction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [1e8, 1e9, 1e11])
def test_a_pass_takes_the_longer_of_copies_and_computing_plus_the_first_copy(link: float) -> None:
    for overlap in (0.0, 0.4, 1.0):
        costs = CostModel(MODEL, profile(MODEL, link=link, overlap=overlap), [DEVICE], CONTEXT)
        predictor, homes = Predictor(costs), streamed(costs)
        resident = replace(homes, targets=np.ones_like(homes.targets), stream=None)
        computing = float(predictor.stage(resident, 512, 512).total[0])
        sizes = [MODEL.tensor[name].nbytes for name in costs.targets]
        copies = sum(costs.link_s(1, "h2d", size, "pinned") for size in sizes)
        first = max(costs.link_s(1, "h2d", size, "pinned") for size in sizes)
        found = float(predictor.stage(homes, 512, 512).total[0])
        assert found == pytest.approx(computing + copies - overlap * min(computing, copies - first), rel=1e-9)
        if overlap == 1.0:
            assert found == pytest.approx(max(copies, computing + first), rel=1e-9)


def test_below_its_break_even_a_weight_is_computed_on_the_host() -> None:
    costs = CostModel(MODEL, profile(MODEL, overlap=1.0), [DEVICE], CONTEXT)
    predictor, homes = Predictor(costs), streamed(costs, start=40)
    on_host = replace(homes, stream=None)
    for n in (2, 39):
        assert predictor.stage(homes, n, n).total == predictor.stage(on_host, n, n).total
    stage = predictor.stage(homes, 40, 40)
    assert stage.copies[0] > 0 and stage.targets[0] < predictor.stage(on_host, 40, 40).targets[0]


def test_streamed_caches_cost_a_copy_of_every_layers_rows() -> None:
    costs = CostModel(MODEL, profile(MODEL), [DEVICE], CONTEXT)
    predictor = Predictor(costs)
    for depth in (1, 1024, 4000):
        without, with_caches = (float(predictor.tpot(streamed(costs, caches=c), depth)) for c in (False, True))
        rows = -(-depth // 256) * 256
        each = sum(
            costs.link_s(1, "h2d", rows * shape.n_head_kv * width * 2, "pageable")
            for shape in MODEL.attention
            if shape
            for width in (shape.head_dim_k, shape.head_dim_v)
        )
        assert with_caches - without >= each


def test_break_even_is_the_first_size_from_which_it_pays() -> None:
    rng = random.Random(4)
    seen = set()
    for _ in range(40):
        machine = replace(random_machine(MODEL, rng, 1))
        context = ContextSettings(n_ctx=4096, n_ubatch=64)
        costs = CostModel(MODEL, machine, [DEVICE], context)
        by_rows = np.array([costs.stream_gain(n) for n in range(1, 65)])
        for gains, found in zip(by_rows.T, break_even(costs).tolist(), strict=True):
            if found == NEVER:
                assert gains[-1] <= 0
                continue
            seen.add(found)
            assert gains[found - 1] > 0 and gains[-1] > 0
            if found > 1:
                assert gains[found - 2] <= 0
    assert len(seen) > 5


# ---- choice --------------------------------------------------------------------------------------------------------


def test_exact_with_streams_against_every_placement() -> None:
    """Every home of every weight and cache times every set of streamed weights; what is left to the host is a search
    of its own, so the optimum is met to within a few percent, and a stated gap is true."""
    rng, ratios, proven = random.Random(8), [], 0
    for _ in range(60):
        model = rng.choice(TINY)
        machine = random_machine(model, rng, 1)
        overlaps = tuple(replace(o, share=rng.choice((0.3, 1.0))) for o in machine.overlaps)
        devices = tuple(replace(d, op_offload=False) for d in machine.devices)
        machine = replace(machine, overlaps=overlaps, devices=devices)
        work, memory = Workload(40, 4), FakeMemory(model, compute=0)
        request = space(
            model,
            "100%",
            machine=machine,
            memory=memory,
            context=ContextSettings(64, n_ubatch=64),
            workload=work,
            gap=0.0,
        )
        builder, found = exact(request)
        if not found.proposal.params.get("streams"):
            continue
        costs = builder.costs
        start = min(40, costs.context.n_ubatch)
        n_targets, n_layer = len(costs.targets), model.n_layer
        limit = request.budgets[DEVICE].limit
        best = np.inf
        n_small = len(costs.small)
        keep = found.proposal.homes  # small weights and caches as chosen; homes and streams of all targets vary
        for devices in product((0, 1, 2), repeat=n_targets):
            at = np.array(devices, np.int8)
            homes = replace(
                keep,
                targets=np.where(at == 2, 0, at).astype(np.int8),
                upload=np.zeros(n_targets, bool),
                stream=np.where(at == 2, start, 0),
            )
            small = sum(model.tensor[costs.small[s]].nbytes for s in range(n_small) if keep.small[s])
            if costs.nbytes[homes.targets == 1].sum() + small <= limit:
                best = min(best, builder.predictor.request(homes, work))
        assert n_layer == len(keep.layers) - 1
        ratios.append(found.dry_run.seconds / best)
        if "gap" in found.proposal.params:
            proven += 1
            assert found.dry_run.seconds * (1 - found.proposal.params["gap"]) <= best * (1 + 1e-9)
    assert len(ratios) > 10 and proven > 3
    assert np.median(ratios) < 1.01 and max(ratios) < 1.1


@pytest.mark.parametrize("budget", ["4GiB", "8GiB"])
def test_streams_are_chosen_where_they_pay(budget: str) -> None:
    with_streams, without = stream_plan(budget), stream_plan(budget, streams=False)
    assert "stream" in modes(with_streams) and "stream" not in modes(without)
    assert with_streams.predicted.request_s < without.predicted.request_s
    prefill = [sum(p.predicted.parts["prefill"].values()) for p in (with_streams, without)]
    assert prefill[1] > 1.5 * prefill[0]
    starts = {t.stream_from for t in with_streams.tensors.values() if t.mode == "stream"}
    assert min(starts) > 1  # decode reads weights where they are
    assert PlacementPlan.from_json(with_streams.to_json()) == with_streams
    assert f"slots {with_streams.stream_slots}" in with_streams.to_backend_map()


def test_long_prompts_are_streamed_in_larger_micro_batches() -> None:
    plan = stream_plan("4GiB")
    fixed = space(QWQ, "4GiB", machine=PCIE4, memory=QWQ_MEMORY, workload=PROMPT)
    assert plan.context.n_ubatch > CONTEXT.n_ubatch
    assert plan.predicted.request_s < make_plans(fixed, "exact").best.predicted.request_s


def test_long_prompts_are_uploaded_in_larger_micro_batches_which_raise_the_batch() -> None:
    context, longest = replace(CONTEXT, n_ctx=8192, n_batch=512), Workload(4096, 4)

    def made(**more: Any) -> PlacementPlan:
        asked = {"context": context, "workload": longest, "streams": False, "free_ubatch": True, "free_batch": True}
        request = space(QWQ, "4GiB", machine=PCIE4, memory=QWQ_MEMORY, **{**asked, **more})
        return make_plans(request, "exact").best

    plan = made()
    assert "upload" in modes(plan)
    assert 512 < plan.context.n_ubatch == plan.context.n_batch <= 4096
    assert plan.predicted.request_s < made(free_batch=False).predicted.request_s
    for fixed in ({"free_batch": False}, {"free_ubatch": False}, {"workload": Workload(512, 4)}):
        assert made(**fixed).context.n_ubatch <= 512, fixed
    everything = space(QWQ, "40GiB", machine=PCIE4, memory=QWQ_MEMORY, context=context, workload=longest,
                       free_ubatch=True, free_batch=True)  # fmt: skip
    assert make_plans(everything, "exact").best.context.n_ubatch <= 512  # nothing moves


def test_a_larger_micro_batch_that_gains_less_than_its_times_may_be_off_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Times beyond a full micro-batch are not measured; the faster the link, the less there is to gain."""

    def chosen(link: float) -> int:
        machine = replace(PCIE4, links=tuple(replace(each, median_s=each.median_s / link) for each in PCIE4.links))
        asked = {"workload": Workload(4096, 4), "streams": False, "free_ubatch": True, "free_batch": True}
        context = replace(CONTEXT, n_ctx=8192)
        return make_plans(
            space(QWQ, "4GiB", machine=machine, memory=QWQ_MEMORY, context=context, **asked), "exact"
        ).best.context.n_ubatch

    assert chosen(link=1) > 512 and chosen(link=16) == 512
    monkeypatch.setattr(uncertainty, "_EXTRAPOLATED", {2: 0.0})
    assert chosen(link=16) > 512


def test_nothing_is_streamed_over_a_slow_link_or_without_accelerator() -> None:
    slow = CostModel(MODEL, profile(MODEL, link=1e4), [DEVICE], CONTEXT)
    assert not stream_pays(slow, PROMPT).any() and set(break_even(slow)) == {NEVER}
    alone = CostModel(MODEL, profile(MODEL), [], CONTEXT)
    assert not stream_pays(alone, PROMPT).any()


def test_where_the_link_is_the_bottleneck_the_host_computes_some() -> None:
    """64 tokens: copying all weights takes longer than computing a part of them on the host meanwhile."""
    plan = stream_plan("4GiB", Workload(64, 64))
    computed = {n for n, t in plan.tensors.items() if t.mode == "host" and n.startswith("blk.")}
    assert computed and "stream" in modes(plan)
    assert plan.planner["params"]["status"] == "not proven" and "gap" not in plan.planner["params"]


# ---- streaming for every token -------------------------------------------------------------------------------------


def test_minimal_keeps_norms_and_slots_on_the_device() -> None:
    plan = stream_plan("4GiB", planner="minimal")
    assert plan.stream_caches and set(plan.layers) == {HOST} and plan.context.flash_attn == "on"
    on_device = {n for n, t in plan.tensors.items() if t.device == DEVICE}
    assert on_device and all("norm" in name for name in on_device)
    assert {t.stream_from for t in plan.tensors.values() if t.mode == "stream"} == {1}
    lines = plan.to_backend_map().splitlines()
    assert "slots 2" in lines and "caches stream" in lines
    assert plan.predicted.tpot_s[2048] > plan.predicted.tpot_s[0]
    with pytest.raises(OallamaError, match="another device than the KV cache"):
        plan.to_llama_cpp_flags()


def test_stream_all_fills_the_budget_with_the_last_layers() -> None:
    small, large = stream_plan("4GiB", planner="stream-all"), stream_plan("8GiB", planner="stream-all")
    counts = [p.planner["params"]["n_resident_layers"] for p in (small, large)]
    assert 0 <= counts[0] < counts[1]
    for plan in (small, large):
        assert modes(plan) == {"resident", "stream", "host"} and set(plan.layers) == {DEVICE}
        assert [n for n, t in plan.tensors.items() if t.mode == "host"] == ["token_embd.weight"]
        assert plan.tensors["blk.0.ffn_up.weight"].mode == "stream"
        assert plan.predicted.devices[DEVICE].total <= plan.budgets[DEVICE]


def test_a_device_that_cannot_overlap_is_named() -> None:
    notes = {}
    for overlap in (0.0, 1.0):
        machine = profile(MODEL, overlap=overlap)
        notes[overlap] = make_plans(space(MODEL, "100%", machine=machine), "minimal").best.predicted.notes
    assert any("do not overlap" in note for note in notes[0.0])
    assert not any("do not overlap" in note for note in notes[1.0])


def test_auto_never_streams_every_token() -> None:
    machine = profile(MODEL, overlap=1.0)
    names = make_plans(space(MODEL, "100%", machine=machine), "auto").plans
    assert not {"minimal", "stream-all"} & set(names)


def test_a_model_without_an_output_matrix_of_its_own_is_streamed() -> None:
    model = graph(Shape(tied=True))
    plan = make_plans(space(model, "100%", machine=profile(model), memory=FakeMemory(model)), "minimal").best
    assert plan.tensors["output.weight"].mode == "stream"


# ---- prompts that are longer than the workload's --------------------------------------------------------------------

SHORT = Workload(64, 32)
SLOW_CPU = profile(QWQ, link=10e9, overlap=1.0, cpu=Speed(50e9, 3e12))


def short_plan(budget: str | int, **more) -> PlacementPlan:
    request = space(QWQ, budget, machine=SLOW_CPU, memory=QWQ_MEMORY, workload=SHORT, **more)
    return make_plans(request, "exact").best


def test_a_plan_for_short_prompts_streams_for_long_ones() -> None:
    """As fast for its own request as without. A plan for the long prompt would have more KV caches on the device."""
    plan, without = short_plan("50%"), short_plan("50%", streams=False)
    own = make_plans(space(QWQ, "50%", machine=SLOW_CPU, memory=QWQ_MEMORY, workload=Workload(512, 32)), "exact").best
    assert plan.predicted.request_s <= without.predicted.request_s * 1.001
    assert plan.predicted.ttft_s[512] < 0.5 * without.predicted.ttft_s[512]
    assert plan.predicted.ttft_s[512] <= 1.5 * own.predicted.ttft_s[512]
    later = plan.planner["params"]["streams_later"]
    assert later in (128, 256, 512)
    starts = {t.stream_from for t in plan.tensors.values() if t.mode == "stream"}
    assert later in starts and all(n <= 64 or n in (128, 256, 512) for n in starts)
    for n in (128, 256, 512):
        assert plan.predicted.ttft_s[n] <= without.predicted.ttft_s[n] * 1.001


TINY_REQUEST = Workload(16, 32)
FAST_CPU = profile(QWQ, link=10e9, overlap=1.0, concurrency=0.9, cpu=Speed(50e9, 20e12))


def with_and_without(budget: str | int, planner: str) -> tuple[PlacementPlan, PlacementPlan]:
    """Plans that may stream weights and may not."""
    made, without = (
        make_plans(
            space(QWQ, budget, machine=FAST_CPU, memory=QWQ_MEMORY, workload=TINY_REQUEST, streams=streams), planner
        ).best
        for streams in (True, False)
    )
    return made, without


def test_the_slots_of_long_prompts_beside_a_share_of_the_weights_take_nothing_from_the_request() -> None:
    made, without = with_and_without("50%", "exact")
    assert "streams_later" in made.planner["params"] and "gave_way" not in made.planner["params"]
    assert made.predicted.request_s == pytest.approx(without.predicted.request_s)


@pytest.mark.parametrize("planner", ["exact", "divided", "oato"])
def test_weights_give_way_to_the_slots_of_long_prompts(planner: str) -> None:
    """Of a budget that the plan fills: the request takes hardly longer, a long prompt half as long."""
    budget = QWQ.weights_bytes // 4 + (2 << 30)
    made, without = with_and_without(budget, planner)
    params = made.planner["params"]
    assert made.predicted.devices[DEVICE].total <= budget
    assert made.predicted.devices[DEVICE].weights == without.predicted.devices[DEVICE].weights - params["gave_way"]
    assert 1 < made.predicted.request_s / without.predicted.request_s <= 1.03
    assert made.predicted.ttft_s[512] < 0.7 * without.predicted.ttft_s[512]
    assert params["streams_later"] == 64
    if planner == "exact":
        bound = made.predicted.request_s * (1 - params["gap"])
        assert bound == pytest.approx(params["bound_s"]) and bound <= without.predicted.request_s
        assert params["status"] == "room for slots"


def test_no_weight_gives_way_where_the_request_takes_longer() -> None:
    made, without = with_and_without(QWQ.weights_bytes // 2 + (6 << 30), "exact")
    assert "stream" not in modes(made) and "gave_way" not in made.planner["params"]
    assert made.predicted.request_s == pytest.approx(without.predicted.request_s)


def test_a_plan_for_full_micro_batches_and_oato_as_published_stay_as_they_are() -> None:
    full = make_plans(space(QWQ, "50%", machine=SLOW_CPU, memory=QWQ_MEMORY, workload=Workload(512, 32)), "exact").best
    assert "streams_later" not in full.planner["params"]
    paper = make_plans(
        space(QWQ, "50%", machine=SLOW_CPU, memory=QWQ_MEMORY, workload=SHORT, paper=True, fraction=1.0), "oato"
    ).best
    assert "stream" not in modes(paper)
    oato = make_plans(space(QWQ, "50%", machine=SLOW_CPU, memory=QWQ_MEMORY, workload=SHORT), "oato").best
    assert "streams_later" in oato.planner["params"] or "upload" in modes(oato)
