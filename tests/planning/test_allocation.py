"""Which device computes which layer: solvers against brute force and the patent's formula, and what uses them."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from oallama.cluster.allocation.allocation import Allocation, DoesNotFit, allocate
from oallama.cluster.allocation.chains import solve_chains
from oallama.cluster.allocation.costs import make_costs
from oallama.cluster.allocation.explain import Explanation, explain
from oallama.cluster.allocation.grouped import count_layers, solve_grouped
from oallama.cluster.allocation.network import LinkQuality, Network
from oallama.cluster.allocation.passes import request_passes, request_seconds
from oallama.cluster.allocation.pieces import solve_pieces
from oallama.cluster.allocation.predict import predict_latency
from oallama.cluster.allocation.problem import ONE_TOKEN, Device, Layer, Pass, Problem, Settings
from oallama.cluster.pipeline.replan import changes, replan
from oallama.data.workload import Workload
from oallama.errors import OallamaError
from oallama.views.cluster import render_explanation

MIB = 2**20
# 20 tokens of prompt in micro-batches of 8, 5 of answer.
REQUEST = request_passes(Workload(20, 5), 8, 64)
CLOSE = 1e-6  # relative; solvers stop at a gap of 1e-7


def make_problem(seed=0, n_devices=4, n_layers=6, kinds=1, tightness=1.5, links="via-client", spread=0.6) -> Problem:
    """A random cluster; kinds: how many different layers; tightness: memory of all devices over what is needed."""
    rng = np.random.default_rng(seed)

    def factor() -> float:
        return float(rng.lognormal(0, spread))

    different = [Layer(2e8 * factor(), int(50 * MIB * factor()), 16384, kv_bytes=MIB) for _ in range(kinds)]
    layers = tuple(different[i] for i in rng.integers(kinds, size=n_layers))
    need = sum(layer.memory_bytes for layer in layers)
    shares = np.array([factor() for _ in range(n_devices)])
    memory = (shares / shares.sum() * need * tightness / 0.9).astype(int)
    names = ["client", *(f"d{i}" for i in range(1, n_devices))]
    devices = tuple(
        Device(name, int(size), 3e10 * factor(), 4e11 * factor()) for name, size in zip(names, memory, strict=True)
    )
    quality = {
        (a, b): LinkQuality(3e-4 * factor(), 1e8 * factor(), 1e-4 * factor(), float(rng.choice([0, 1e-3, 1e-2])))
        for a in names
        for b in names
        if a != b
    }
    return Problem(devices, Network(quality), layers, Layer(5e8, 0, 16384), links=links)


@st.composite
def problems(draw, devices=4, layers=6, links=("via-client", "direct"), kinds=3):
    problem = make_problem(
        draw(st.integers(0, 2**20)),
        draw(st.integers(1, devices)),
        draw(st.integers(1, layers)),
        draw(st.integers(1, kinds)),
        draw(st.sampled_from([0.95, 1.05, 1.3, 2.0, 6.0])),
        draw(st.sampled_from(links)),
    )
    outputs = draw(st.sampled_from([(16384, 16384), (4096, 16384)]))
    layers_ = tuple(replace(layer, output_bytes=outputs[1]) for layer in problem.layers)
    if draw(st.booleans()):
        problem = replace(problem, devices=(replace(problem.client, memory_bytes=0), *problem.devices[1:]))
    embedding = replace(problem.embedding, output_bytes=outputs[0])
    passes = draw(st.sampled_from([ONE_TOKEN, REQUEST, (Pass(7, 7, 0, 2),), (Pass(5, 0, 100), Pass(3, 1, 50, 4))]))
    first = draw(st.sampled_from([None, *(device.name for device in problem.devices)]))
    weights = replace(problem.settings, first_layer=first)
    return replace(problem, layers=layers_, embedding=embedding, passes=passes, settings=weights)


def pinned(problem: Problem, first: str | None) -> Problem:
    return replace(problem, settings=replace(problem.settings, first_layer=first))


def by_the_formula(problem: Problem, layers) -> float:
    """docs/sources.md, 5, for every pass."""
    return sum(each.count * of_a_pass(problem, layers, each) for each in problem.passes)


def of_a_pass(problem: Problem, layers, each: Pass) -> float:
    """docs/sources.md, 5, written down again: milliseconds, binaries, one term after the other."""
    w, names = problem.settings, [device.name for device in problem.devices]
    x = {(i, j): int(name == at) for j, at in enumerate(layers, 1) for i, name in enumerate(names)}
    x |= {(i, 0): int(i == 0) for i in range(len(names))}
    sub_models = [problem.embedding, *problem.layers]
    n = len(problem.layers)
    compute = sum(
        roofline(problem.devices[i], sub_models[j].flops, rows(each, j)) * 1e3 * used for (i, j), used in x.items()
    )
    used_links = []
    place = [0, *(names.index(name) for name in layers), 0]
    for j in range(n + 1):
        ends = [place[j], place[j + 1]]
        if problem.links == "via-client" and 0 not in ends and ends[0] != ends[1]:
            ends.insert(1, 0)
        sent = each.n_returned if j == n else each.n_tokens
        nbytes = sub_models[j].output_bytes * sent
        masked = [(i, k, nbytes + (each.mask_bytes if k else 0)) for i, k in itertools.pairwise(ends) if i != k]
        used_links += masked if sent else []
    data = qos = 0.0
    for i, k, nbytes in used_links:
        link = problem.network.links[names[i], names[k]]
        t = nbytes / (w.e_p * link.bandwidth) * 1e3
        data += link.latency_s * 1e3 + t + (slow_start(link, nbytes) * 1e3 if each.after_pause else 0.0)
        qos += w.wq1 * link.jitter_s * 1e3 + w.wq2 * t * link.loss + w.wq3 * link.loss**2
    complexity = w.w_c * sum(used for (_, j), used in x.items() if j)
    return (compute + data + complexity + qos) / 1e3


def slow_start(link: LinkQuality, nbytes: float) -> float:
    """Seconds that a link rests: every round trip that begins with data left has a window, twice the one before."""
    trip, rests = 2 * link.latency_s, 0.0
    for round_trip in range(40):
        window = 14480 * 2**round_trip
        is_left = nbytes > 14480 * (2 ** (round_trip + 1) - 1)
        rests += max(0.0, trip - window / link.bandwidth) if is_left else 0.0
    return rests


def roofline(device: Device, flops: float, n: int) -> float:
    """Seconds of n tokens: weights are read once, arithmetic takes its time for each."""
    prefill = max(device.flops_per_s, device.prefill_flops_per_s or 0.0)
    return max(flops / device.flops_per_s, n * flops / prefill) if n else 0.0


def rows(each: Pass, j: int) -> int:
    """Tokens that sub-model j computes in a pass; the head only those that are handed back."""
    return each.n_tokens if j else each.n_returned


def brute_force(problem: Problem, contiguous=True, order=None) -> float:
    """Seconds of the best of all allocations; inf when none fits."""
    best = float("inf")
    limits = {device.name: int(problem.settings.beta * device.memory_bytes) for device in problem.devices}
    for layers in itertools.product(limits, repeat=len(problem.layers)):
        stages = [name for name, _ in itertools.groupby(layers)]
        if contiguous and len(set(stages)) < len(stages):
            continue
        if problem.settings.first_layer not in (None, layers[0]):
            continue
        if order is not None and [name for name in order if name in stages] != stages:
            continue
        held = dict.fromkeys(limits, 0)
        for name, layer in zip(layers, problem.layers, strict=True):
            held[name] += layer.memory_bytes
        if all(held[name] <= limits[name] for name in limits):
            best = min(best, by_the_formula(problem, layers))
    return best


def cost(problem: Problem, solver, **options) -> float:
    """Seconds of a solver's answer by the formula; inf when it says that nothing fits."""
    try:
        found = allocate(problem, solver, **options)
    except DoesNotFit:
        return float("inf")
    assert found.terms.total_s == pytest.approx(by_the_formula(problem, found.layers), rel=1e-12)
    assert problem.settings.first_layer in (None, found.layers[0])
    assert found.gap <= CLOSE and found.bound_s <= found.terms.total_s * (1 + 1e-12)
    for device in problem.devices:
        assert found.held_bytes(device.name) <= problem.settings.beta * device.memory_bytes
    return found.terms.total_s


# ---- optima --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(problems())
def test_every_solver_finds_the_optimum(problem):
    expected = pytest.approx(brute_force(problem), rel=CLOSE)
    assert cost(problem, "milp") == expected
    assert cost(problem, "grouped") == expected


@settings(max_examples=40)
@given(problems(devices=4, layers=5))
def test_scattered_layers_are_solved_too(problem):
    assert cost(problem, "milp", contiguous=False) == pytest.approx(brute_force(problem, contiguous=False), rel=CLOSE)


@settings(max_examples=40)
@given(problems(), st.randoms(use_true_random=False))
def test_dynamic_is_the_optimum_of_its_order(problem, random):
    order = [device.name for device in problem.devices]
    random.shuffle(order)
    assert cost(problem, "dynamic", order=order) == pytest.approx(brute_force(problem, order=order), rel=CLOSE)


@settings(max_examples=40)
@given(problems(kinds=1, links=("via-client",)))
def test_scattering_equal_layers_gains_nothing_by_way_of_the_client(problem):
    problem = pinned(problem, None)
    assert brute_force(problem) == pytest.approx(brute_force(problem, contiguous=False), rel=1e-12)


@pytest.mark.parametrize("links", ["via-client", "direct"])
@pytest.mark.parametrize("seed", range(3))
def test_grouped_is_the_reference_on_medium_problems(links, seed):
    problem = make_problem(seed, n_devices=5, n_layers=10, tightness=1.4, links=links)
    assert cost(problem, "grouped") == pytest.approx(cost(problem, "milp"), rel=CLOSE)


@pytest.mark.parametrize("links", ["via-client", "direct"])
def test_grouped_is_the_reference_with_unequal_layers(links):
    problem = make_problem(3, n_devices=4, n_layers=10, kinds=2, tightness=1.4, links=links)
    assert cost(problem, "grouped") == pytest.approx(cost(problem, "milp"), rel=CLOSE)


@pytest.mark.parametrize("seed", range(5))
def test_three_forms_agree_on_a_large_problem(seed):
    costs = make_costs(make_problem(seed, n_devices=12, n_layers=40, tightness=2.0))
    expected = pytest.approx(count_layers(costs).bound, rel=CLOSE)
    assert costs.total(solve_pieces(costs).assignment) == expected
    assert costs.total(solve_chains(costs).assignment) == expected


@pytest.mark.parametrize(
    ("links", "kinds", "solver", "method"),
    [
        ("via-client", 1, "grouped", "dynamic programming"),
        ("via-client", 3, "grouped", "grouped MILP"),
        ("direct", 1, "grouped", "grouped MILP"),
        ("via-client", 1, "milp", "MILP"),
        ("via-client", 1, "dynamic", "dynamic programming"),
    ],
)
def test_what_solved_it_is_said(links, kinds, solver, method):
    found = allocate(make_problem(5, n_devices=5, n_layers=10, kinds=kinds, tightness=1.3, links=links), solver)
    how = found.solved
    assert (how.solver, how.method, how.gap) == (solver, method, 0.0) and 0 < how.seconds < 60
    assert how.is_proven == (solver != "dynamic")
    assert json.loads(json.dumps(found.to_dict()))["solved"]["method"] == method
    text = " ".join(shown(explain(found)).split())
    order = " with the devices in this order" if solver == "dynamic" else ""
    assert f"solved by {method} in " in text and f"({solver}): no allocation{order} costs less" in text


def test_a_plan_that_is_not_proven_says_so():
    """The time is up: whatever is known has no bound, or one below it."""
    found = allocate(make_problem(1, n_devices=12, n_layers=40, tightness=3.0, links="direct"), time_limit_s=0.0)
    how = found.solved
    assert (how.method, how.gap, how.is_proven) == ("dynamic programming", None, False) and found.bound_s == 0
    assert "is not known: the time was up" in " ".join(shown(Explanation(found, {}, found)).split())
    near = replace(found, bound_s=found.terms.total_s / 1.05).solved
    assert near.gap == pytest.approx(0.05) and not near.is_proven


@pytest.mark.parametrize("seed", range(3))
def test_forms_agree_on_a_large_problem_whose_first_layer_is_pinned(seed):
    problem = make_problem(seed, n_devices=12, n_layers=40, tightness=2.0)
    free = count_layers(make_costs(problem))
    unused = next(i for i, d in enumerate(problem.devices) if i not in free.assignment and d.memory_bytes > 100 * MIB)
    costs = make_costs(pinned(problem, problem.devices[unused].name))
    best = count_layers(costs)
    assert best.bound > free.bound and best.assignment[0] == unused
    for outcome in (solve_pieces(costs), solve_chains(costs)):
        assert outcome.assignment[0] == unused and costs.total(outcome.assignment) == pytest.approx(
            best.bound, rel=CLOSE
        )


def test_the_first_layer_needs_a_device_with_room():
    problem = make_problem(n_devices=3, tightness=3.0)
    devices = (replace(problem.client, memory_bytes=100), *problem.devices[1:])
    size = problem.layers[0].memory_bytes
    for solver in ("grouped", "milp", "dynamic"):
        with pytest.raises(DoesNotFit, match=rf"first layer must be on client .*client offers 90 .*: {size - 90} byt"):
            allocate(pinned(replace(problem, devices=devices), "client"), solver)
    with pytest.raises(OallamaError, match=r"must be on d9 \(first_layer\), expected one of client, d1, d2$"):
        allocate(pinned(problem, "d9"))


def test_a_device_that_must_have_the_first_layer_is_needed():
    problem = make_problem(n_devices=3, tightness=6.0)
    free = allocate(problem)
    other = next(device.name for device in problem.devices if device.name != free.layers[0])
    found = explain(allocate(pinned(problem, other)))
    assert found.without[other] is None and found.chosen.layers[0] == other
    assert found.chosen.terms.total_s > free.terms.total_s and found.time_only.layers[0] == other
    lost = tuple(device for device in problem.devices if device.name != other)
    if other != "client":
        with pytest.raises(OallamaError, match=rf"must be on {other} \(first_layer\), expected one of client"):
            replan(replace(found.chosen.problem, devices=lost), found.chosen.layers)


def test_circles_are_cut_off():
    """Two far islands whose devices are near each other: without cuts the far one is a circle of its own."""
    near, far = LinkQuality(1e-6, 1e12), LinkQuality(1.0, 1e12)
    names = ("client", "a", "b", "c", "d")
    islands = ({"client", "a", "b"}, {"c", "d"})
    links = {
        (x, y): near if any({x, y} <= island for island in islands) else far for x in names for y in names if x != y
    }
    devices = (Device("client", 0, 1e9), *(Device(name, 2000, 1e9) for name in names[1:]))
    settings_ = Settings(beta=1.0)
    problem = Problem(devices, Network(links), (Layer(1e6, 1000, 1),) * 8, Layer(0, 0, 1), settings_, links="direct")
    found = allocate(problem)
    assert found.terms.latency_s == pytest.approx(2.0 + 3e-6, rel=1e-9)
    assert cost(problem, "milp") == pytest.approx(found.terms.total_s, rel=CLOSE)


def test_no_time_gives_a_plan_with_its_bound_or_says_so():
    costs = make_costs(make_problem(1, n_devices=12, n_layers=40, kinds=4, tightness=3.0, links="direct"))
    outcome = solve_grouped(costs, time_limit_s=0.0)
    assert outcome.assignment is None or costs.fits(outcome.assignment)
    with pytest.raises(OallamaError, match="in time"):
        allocate(make_problem(links="direct"), "milp", time_limit_s=0.0)


def test_bytes_that_floats_do_not_tell_apart():
    """Sixteen layers that are one byte too many for the fast device."""
    size = 2**40 + 1
    quality = LinkQuality(1e-6, 1e12)
    devices = (Device("client", 16 * size - 1, 1e10), Device("slow", 2 * size, 1e9))
    problem = Problem(
        devices,
        Network.uniform(("client", "slow"), quality),
        (Layer(1e6, size, 1), Layer(1.5e6, size, 1)) * 8,
        Layer(0, 0, 1),
        Settings(beta=1.0),
        links="direct",
    )
    for solver in ("milp", "grouped"):
        found = allocate(problem, solver)
        assert found.held_bytes("client") == 15 * size


# ---- what does not fit ---------------------------------------------------------------------------------------------


def test_too_little_memory_says_how_many_bytes():
    devices = (Device("client", 0, 1e9), Device("a", 1000, 1e9), Device("b", 500, 1e9))
    network = Network.uniform([device.name for device in devices], LinkQuality(1e-3, 1e8))
    problem = Problem(devices, network, (Layer(1e6, 400, 4),) * 4, Layer(1e6, 0, 4), Settings(beta=1.0))
    with pytest.raises(
        DoesNotFit, match=r"4 layers need 1600 bytes .*offer 1500 bytes.*: 100 bytes .*too few"
    ) as caught:
        allocate(problem)
    assert caught.value.missing_bytes == 100
    # 1600 bytes now, but 300 of the first and 100 of the second device hold no whole layer.
    whole = replace(problem, devices=(devices[0], replace(devices[1], memory_bytes=1100), devices[2]))
    with pytest.raises(DoesNotFit, match="room for 3 whole layers: 100 bytes too few") as caught:
        allocate(whole)
    assert caught.value.missing_bytes == 100


def test_no_division_into_whole_layers():
    devices = (Device("client", 0, 1e9), Device("a", 900, 1e9), Device("b", 900, 1e9))
    network = Network.uniform([device.name for device in devices], LinkQuality(1e-3, 1e8))
    layers = (Layer(1e6, 500, 4), Layer(1e6, 600, 4), Layer(1e6, 500, 4))
    problem = Problem(devices, network, layers, Layer(1e6, 0, 4), Settings(beta=1.0))
    with pytest.raises(DoesNotFit, match="no division into whole layers"):
        allocate(replace(problem, layers=layers))
    with pytest.raises(DoesNotFit, match="largest layer needs 1000 bytes, the largest device offers 900: 100 bytes"):
        allocate(replace(problem, layers=(Layer(1e6, 1000, 4), Layer(1e6, 500, 4))))


def test_embedding_that_does_not_fit_the_client():
    problem = make_problem(n_devices=2)
    with pytest.raises(OallamaError, match=r"client is 100 bytes .* short of holding"):
        allocate(
            replace(
                problem,
                devices=(replace(problem.client, memory_bytes=1000), problem.devices[1]),
                embedding=replace(problem.embedding, memory_bytes=1100),
                settings=Settings(beta=1.0),
            )
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinkQuality(-1, 1), "latency_s is -1, expected 0 or more"),
        (lambda: LinkQuality(0, 0), "bandwidth is 0, expected more than 0"),
        (lambda: LinkQuality(0, 1, loss=1), "loss is 1, expected a share"),
        (lambda: Device("a", -1, 1), "device a: memory_bytes is -1"),
        (lambda: Device("a", 1, 0), "device a: flops_per_s is 0"),
        (lambda: Layer(-1, 1, 1), "layer flops is -1"),
        (lambda: Layer(1, 1, 1, kv_bytes=2), "kv_bytes is 2, expected at most"),
        (lambda: Settings(e_p=0), "E_p is 0, expected a share"),
        (lambda: Settings(wq1=-1), "wq1 is -1"),
        (lambda: replace(make_problem(), layers=()), "at least a client and a layer"),
        (lambda: replace(make_problem(), devices=(Device("a", 1, 1),) * 2), "name a is used 2 times"),
        (lambda: replace(make_problem(), links="ring"), "link model is 'ring'"),
        (lambda: replace(make_problem(), passes=()), "expected one or more"),
        (lambda: Pass(0), "expected 1 token or more"),
        (lambda: allocate(make_problem(), "magic"), "solver is 'magic'"),
        (lambda: allocate(replace(make_problem(), network=Network({}))), "from client to d1 was not measured"),
        (lambda: allocate(make_problem(), "dynamic", order=["nobody"]), "no device 'nobody'"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(OallamaError, match=message):
        make()


def test_network_file_round_trip():
    network = make_problem().network
    assert Network.from_dict(json.loads(json.dumps(network.to_dict()))) == network
    row = {"from": "a", "to": "b", "latency_s": 1e-3, "bandwidth": 1e8}
    for rows, message in (
        ([row, row], r"links\[1\]: the link from a to b is listed twice"),
        ([{**row, "bandwidth": "fast"}], r"links\[0\]: link bandwidth is 'fast'"),
        ([{"from": "a"}], r"links\[0\] is .*expected from, to"),
        (None, "expected a list"),
    ):
        with pytest.raises(OallamaError, match=message):
            Network.from_dict({"links": rows})


# ---- layers and prediction -----------------------------------------------------------------------------------------


def test_measured_seconds_go_before_flops():
    device = Device("a", 1, flops_per_s=1e9, prefill_flops_per_s=1e10)
    layer = Layer(1e6, 1, 1)
    assert layer.seconds_on(device) == 1e-3
    assert layer.seconds_on(device, 5) == 1e-3 and layer.seconds_on(device, 100) == pytest.approx(1e-2)
    assert layer.seconds_on(replace(device, prefill_flops_per_s=5e8)) == 1e-3  # one token is as fast as measured
    measured = replace(layer, seconds={"a": ((1, 2e-3), (100, 2e-2))})
    assert measured.seconds_on(device) == 2e-3 and measured.seconds_on(device, 10) == pytest.approx(np.sqrt(4e-5))


def test_tcp_begins_slowly_after_a_pause():
    """Ten segments, then twice as many each round trip, until the data or the link's capacity is reached."""
    link, first = LinkQuality(20e-3, 1e7), 14480
    assert link.slow_start_s(first) == 0.0 and LinkQuality(1e-4, 1e7).slow_start_s(1e6) == 0.0
    assert link.slow_start_s(first + 1) == pytest.approx(40e-3 - first / 1e7)
    assert link.slow_start_s(3 * first + 1) == pytest.approx(2 * 40e-3 - 3 * first / 1e7)
    # 14480 * 2^5 bytes a round trip are more than the link carries.
    assert link.slow_start_s(1e9) == pytest.approx(5 * 40e-3 - 31 * first / 1e7)


def test_prediction_adds_up():
    quality = LinkQuality(1e-3, 1e6)
    devices = (Device("client", 0, 1e9), Device("a", 10, 1e9, 4e9), Device("b", 10, 2e9))
    network = Network.uniform([device.name for device in devices], quality)
    problem = Problem(devices, network, (Layer(1e6, 1, 100),) * 3, Layer(5e6, 0, 100))
    found = predict_latency(problem, ("a", "a", "b"), Workload(10, 2), n_ubatch=8, n_ctx=25)
    assert found.tpot_compute_s == pytest.approx(2e-3 + 0.5e-3 + 5e-3)
    # client->a, a->client, client->b, b->client; the servers are sent 50 bytes more.
    assert found.tpot_links_s == pytest.approx(4 * (1e-3 + 1e-4) + 2 * 5e-5)
    assert found.ttft_compute_s == pytest.approx((2 * 2e-3 + 8 * 0.5e-3) + (2 * 1e-3 + 2 * 0.5e-3) + 5e-3)
    rows = 3 * (8 + 2) + 1  # the last leg takes one token's
    assert found.ttft_links_s == pytest.approx((4 + 3) * 1e-3 + rows * 1e-4 + 2 * 10 * 5e-5)
    # b computes eight tokens in 4 ms while the client and a are at the last two.
    assert found.ttft_saved_s == pytest.approx(4e-3)
    assert found.ttft_s == found.ttft_compute_s + found.ttft_links_s - found.ttft_saved_s
    direct = predict_latency(replace(problem, links="direct"), ("a", "a", "b"), Workload(1, 2))
    assert direct.tpot_links_s == pytest.approx(3 * (1e-3 + 1e-4))


def test_the_last_device_computes_while_the_others_go_on():
    quality = LinkQuality(1e-3, 1e12)
    devices = (Device("client", 9, 1e9, 1e9), Device("a", 9, 1e9, 1e9), Device("b", 9, 1e9, 1e9))
    network = Network.uniform([device.name for device in devices], quality)
    problem = Problem(devices, network, (Layer(1e6, 1, 0),) * 4, Layer(0, 0, 0))

    def saved(*layers: str, n_prompt: int = 40, parallel: int = 1, n_batch: int = 99) -> float:
        request = Workload(n_prompt, 2, n_parallel=parallel)
        return predict_latency(problem, layers, request, n_ubatch=10, n_batch=n_batch).ttft_saved_s

    # Four micro-batches of 10 ms a layer: three times both compute at once, for 20 ms and the way there or less.
    assert saved("client", "client", "a", "a") == pytest.approx(3 * 20e-3)
    assert saved("client", "client", "client", "a") == pytest.approx(3 * 10e-3)
    assert saved("client", "client", "a", "a", n_prompt=10) == 0.0
    assert saved("client", "client", "a", "a", n_batch=20) == pytest.approx(2 * 20e-3)
    assert saved("client", "client", "a", "a", parallel=2) == pytest.approx(6 * 20e-3)
    # A device in the middle is waited for.
    assert saved("client", "a", "b", "b") == pytest.approx(3 * 20e-3)
    assert saved("client", "a", "a", "b") == pytest.approx(3 * 10e-3)
    # The client waits for itself; it sends to a device that holds all layers while that computes.
    assert saved("a", "a", "client", "client") == 0.0 and saved("a", "b", "a", "a") == 0.0
    assert saved("a", "a", "a", "a") == pytest.approx(3 * 1e-3)


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_objective_of_a_request_is_its_time(parallel):
    """Links without jitter and loss: what is minimised is TTFT + (G - 1) TPOT without overlap."""
    problem = make_problem(3, n_devices=3)
    quiet = {ends: LinkQuality(link.latency_s, link.bandwidth) for ends, link in problem.network.links.items()}
    request = Workload(20, 5, n_parallel=parallel)
    still = Settings(w_c=0.0, e_p=1.0)
    problem = replace(problem, network=Network(quiet), settings=still, passes=request_passes(request, 8, 64))
    found = allocate(problem)
    times = predict_latency(problem, found.layers, request, n_ubatch=8, n_ctx=64)
    seconds = request_seconds(request, times.ttft_s + times.ttft_saved_s, times.tpot_s)
    assert found.terms.total_s == pytest.approx(seconds)


def test_long_prompts_and_long_answers_want_other_devices():
    """One device is fast at prompts, the other at single tokens: the request decides."""
    network = Network.uniform(("client", "prompts", "tokens"), LinkQuality(1e-4, 1e9))
    devices = (Device("client", 0, 1e9), Device("prompts", 10, 1e9, 100e9), Device("tokens", 10, 4e9, 5e9))
    problem = Problem(devices, network, (Layer(1e7, 1, 100),) * 4, Layer(1e6, 0, 100))
    for request, name in ((Workload(2048, 2), "prompts"), (Workload(16, 200), "tokens")):
        found = allocate(replace(problem, passes=request_passes(request, 512, 4096)))
        assert set(found.layers) == {name}


def test_quality_of_service_decides():
    """Two devices alike but for the jitter: the steady one is taken, without the weights the faster one."""
    steady, shaky = LinkQuality(1e-3, 1e8), LinkQuality(0.9e-3, 1e8, jitter_s=5e-3, loss=0.02)
    links = {}
    for name, quality in (("steady", steady), ("shaky", shaky)):
        links[name, "client"] = links["client", name] = quality
    devices = (Device("client", 0, 1e9), Device("steady", 100, 1e9), Device("shaky", 100, 1e9))
    problem = Problem(devices, Network(links), (Layer(1e6, 10, 4),) * 4, Layer(0, 0, 4))
    found = explain(allocate(problem))
    assert set(found.chosen.layers) == {"steady"} and set(found.time_only.layers) == {"shaky"}
    assert found.moved_by_qos == 4
    assert found.time_only.terms.jitter_s == pytest.approx(2 * 10 * 5e-3)
    assert found.time_only.terms.loss_variance_s == pytest.approx(2 * 10000 * 0.02**2 / 1000)
    assert found.runner_up is not None and set(found.runner_up.layers) == {"shaky"}
    text = shown(found)
    assert "QoS: jitter" in text and "4 layers would be elsewhere" in text and max(map(len, text.splitlines())) <= 80
    assert json.loads(json.dumps(found.to_dict()))["moved_by_qos"] == 4


def test_explanation_of_a_device_that_is_needed():
    problem = make_problem(2, n_devices=3, n_layers=8, tightness=1.2)
    found = explain(allocate(problem))
    needed = [name for name, other in found.without.items() if other is None]
    assert needed and f"without {needed[0]}: does not fit" in shown(found)
    for other in found.without.values():
        assert other is None or other.terms.total_s >= found.chosen.terms.total_s


def shown(found) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(render_explanation(found))
    return console.file.getvalue()


# ---- re-planning ----------------------------------------------------------------------------------------------------


def best_replan(problem: Problem, current, horizon) -> float:
    """Brute force: seconds a token, moves shared by the horizon, of equal layers with bytes present nowhere else."""
    best = float("inf")
    names = [device.name for device in problem.devices]
    for layers in itertools.product(names, repeat=len(current)):
        stages = [name for name, _ in itertools.groupby(layers)]
        held = [layers.count(name) * problem.layers[0].memory_bytes for name in names]
        room = [problem.settings.beta * device.memory_bytes for device in problem.devices]
        if len(set(stages)) < len(stages) or any(h > r for h, r in zip(held, room, strict=True)):
            continue
        if problem.settings.first_layer not in (None, layers[0]):
            continue
        moving, e_p = 0.0, problem.settings.e_p
        for layer, source, target in zip(problem.layers, current, layers, strict=True):
            if source != target:
                if target != "client":
                    weights = layer.memory_bytes - layer.kv_bytes
                    moving += weights / (e_p * problem.network.links["client", target].bandwidth)
                legs = [] if source not in names else [(source, "client"), ("client", target)]
                for a, b in legs:
                    if a != b:
                        moving += layer.kv_bytes / (e_p * problem.network.links[a, b].bandwidth)
        best = min(best, by_the_formula(problem, layers) + moving / horizon)
    return best


@settings(max_examples=25)
@given(st.integers(0, 1000), st.sampled_from([1, 30, 10000]), st.sampled_from([None, "client", "d3"]))
def test_replanning_is_optimal_when_a_device_leaves(seed, horizon, first):
    problem = pinned(make_problem(seed, n_devices=4, n_layers=6, tightness=4.0), first)
    try:
        before = allocate(problem)
    except DoesNotFit:
        assert brute_force(problem) == float("inf")
        return
    gone = next((name for name in before.layers if name not in ("client", first)), "d1")
    now = replace(problem, devices=tuple(device for device in problem.devices if device.name != gone))
    try:
        found = replan(now, before.layers, horizon_tokens=horizon)
    except DoesNotFit:
        assert best_replan(now, before.layers, horizon) == float("inf")
        return
    got = found.allocation.terms.total_s + found.move_s / horizon
    assert got == pytest.approx(best_replan(now, before.layers, horizon), rel=CLOSE)
    lost = {j for j, name in enumerate(before.layers) if name == gone}
    assert set(found.lost_kv) == lost and (found.stay_s is None) == bool(lost)
    assert {m.layer for m in found.moves} == {
        j for j, (a, b) in enumerate(zip(before.layers, found.allocation.layers, strict=True)) if a != b
    }
    assert json.dumps(found.to_dict())


def test_a_short_horizon_moves_nothing_and_a_long_one_does():
    problem = make_problem(7, n_devices=4, n_layers=8, tightness=4.0)
    problem = replace(problem, devices=(replace(problem.client, memory_bytes=0), *problem.devices[1:]))
    before = allocate(problem)
    used = next(name for name in before.layers if name != "client")
    links = {
        ends: replace(link, latency_s=link.latency_s + 0.2) if used in ends else link
        for ends, link in problem.network.links.items()
    }
    now = replace(problem, network=Network(links))
    assert changes(problem, problem) == []
    assert any(f"client -> {used}" in line for line in changes(problem, now))
    assert changes(problem, replace(now, devices=now.devices[:-1]))[0] == "device d3 left"
    stay = replan(now, before.layers, horizon_tokens=1)
    assert stay.moves == () and stay.allocation.layers == before.layers
    assert stay.stay_s == pytest.approx(stay.allocation.terms.total_s)
    go = replan(now, before.layers, horizon_tokens=10**6)
    assert go.allocation.layers == allocate(now).layers and go.moves
    cached = replan(now, before.layers, horizon_tokens=10**6, present={d.name: range(8) for d in now.devices})
    assert cached.move_s < go.move_s and all(move.weight_bytes == 0 for move in cached.moves)
    with pytest.raises(OallamaError, match="current names 3 layers"):
        replan(now, before.layers[:3])


def test_ranges_name_the_devices():
    problem = make_problem(0, n_devices=3, n_layers=8, tightness=1.5)
    found = allocate(problem)
    assert isinstance(found, Allocation)
    assert [name for s in found.ranges for name in [s.device] * (s.end - s.first)] == list(found.layers)
    assert sum(s["layers"] for s in found.to_dict()["segments"]) == 8
