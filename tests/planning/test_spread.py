"""Stay or spread: baselines, how long ranks take, and which of all ways is chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oallama.cluster.allocation.allocation import DoesNotFit, allocate
from oallama.cluster.allocation.baselines import baselines
from oallama.cluster.allocation.candidates import LEAST_GAIN, Candidate, RankHost, RankPlan, choose
from oallama.cluster.allocation.cluster_plan import ClusterPlan
from oallama.cluster.allocation.devices import ClientEntry, DeviceEntry
from oallama.cluster.allocation.network import LinkQuality, Network
from oallama.cluster.allocation.passes import prompt_passes, request_passes
from oallama.cluster.allocation.problem import Device, Layer, Problem, Settings
from oallama.cluster.pipeline.pipeline import Options, Pipeline
from oallama.cluster.pipeline.watch import Lost
from oallama.cluster.ranks.parts import Part
from oallama.cluster.spread.choose import decided, pipeline_candidates, plan_of
from oallama.cluster.spread.rank_times import RankTimes, predict_ranks
from oallama.data.plan import ContextSettings
from oallama.data.workload import Workload
from oallama.errors import OallamaError

REQUEST = Workload(100, 11)
NAMES = ("client", "a", "b")


def a_problem(memory=(0, 4, 8), n_layers=6, flops=(1e9, 1e9, 1e9)) -> Problem:
    """Layers of one byte each; memory in layers."""
    devices = tuple(Device(name, size, rate) for name, size, rate in zip(NAMES, memory, flops, strict=True))
    network = Network.uniform(NAMES, LinkQuality(1e-3, 1e8))
    layers = (Layer(1e6, 1, 400),) * n_layers
    passes = request_passes(REQUEST, 512, 1024)
    return Problem(devices, network, layers, Layer(2e6, 0, 400), Settings(beta=1.0), passes=passes)


def a_plan(problem: Problem) -> ClusterPlan:
    entries = tuple(DeviceEntry(d.name, "local", ("127.0.0.1", 1), d.memory_bytes) for d in problem.devices[1:])
    layers = allocate(problem).layers
    return ClusterPlan({}, ContextSettings(1024), ClientEntry(), entries, problem, layers, 0.0, request=REQUEST)


def test_baselines_deal_out_layers_in_order():
    found = baselines(a_problem())
    assert found == {
        "a alone": None,
        "b alone": ("b",) * 6,
        "equal parts": ("a",) * 3 + ("b",) * 3,
        "parts by memory": ("a",) * 2 + ("b",) * 4,
    }
    assert baselines(a_problem(memory=(6, 6, 6)))["equal parts"] == ("client",) * 2 + ("a",) * 2 + ("b",) * 2
    assert baselines(a_problem(memory=(0, 1, 5)))["parts by memory"] == ("a",) + ("b",) * 5
    assert set(baselines(a_problem(memory=(0, 0, 0))).values()) == {None}
    assert baselines(a_problem(memory=(0, 2, 9)))["equal parts"] is None


def test_equal_allocations_are_one_candidate():
    problem = a_problem(flops=(1e9, 1e8, 1e9))
    plan = a_plan(problem)
    found = {c.name: c for c in pipeline_candidates(problem, allocate(problem), plan)}
    assert list(found) == ["pipeline, b alone", "equal parts", "parts by memory", "a alone"]
    assert found["a alone"].why_not == "the layers do not fit" and found["a alone"].predicted_s(REQUEST) is None
    best = found["pipeline, b alone"]
    assert best.layers == ("b",) * 6 and best.n_hosts == 2
    assert best.solved is not None and best.solved.is_proven and found["equal parts"].solved is None
    times = plan.predict(REQUEST)
    assert best.predicted_s(REQUEST) == pytest.approx(times.ttft_s + 10 * times.tpot_s)
    assert all(best.predicted_s(REQUEST) <= (c.predicted_s(REQUEST) or 99) for c in found.values())


def test_two_parts_of_a_model_compute_a_long_prompt_at_once():
    """Two devices alike: each has half of the layers, and prompts go through in small micro-batches."""
    request = Workload(2048, 11)
    problem = a_problem(memory=(9, 9, 9))
    problem = replace(problem, passes=request_passes(request, 512, 4096))
    plan = replace(a_plan(problem), request=request, context=ContextSettings(4096))
    found = {c.name: c for c in pipeline_candidates(problem, allocate(problem), plan)}
    best = found["two parts at once"]
    assert set(best.layers[:3]) != set(best.layers[3:]) and len(set(best.layers[:3])) == len(set(best.layers[3:])) == 1
    assert best.n_ubatch == 128 and best.ttft_s < 0.6 * found["a alone"].ttft_s
    assert plan_of(plan, best).context.n_ubatch == 128
    assert plan_of(plan, best).predict(request).ttft_s == best.ttft_s
    # Too little memory for a half.
    tight = replace(plan, problem=replace(problem, devices=tuple(replace(d, memory_bytes=2) for d in problem.devices)))
    found = {c.name: c for c in pipeline_candidates(tight.problem, allocate(tight.problem), tight)}
    assert found["two parts at once"].why_not == "the layers do not fit"


def test_pipelines_without_the_first_layer_where_it_must_be_are_refused():
    problem = a_problem(memory=(0, 6, 8))
    problem = replace(problem, settings=replace(problem.settings, first_layer="a"))
    plan = a_plan(problem)
    found = {c.name: c for c in pipeline_candidates(problem, allocate(problem), plan)}
    assert found["b alone"].why_not == "the first layer must be on a (first_layer)"
    assert all(c.layers[0] == "a" for c in found.values() if c.name != "b alone") and len(found) > 1


def test_the_first_layer_stays_in_a_plan_file(tmp_path):
    problem = a_problem()
    plan = a_plan(replace(problem, settings=replace(problem.settings, first_layer="b")))
    plan.save(tmp_path / "plan.json")
    assert plan.layers[0] == "b" and ClusterPlan.load(tmp_path / "plan.json").problem.settings.first_layer == "b"


def test_a_running_pipeline_keeps_the_first_layer_where_it_must_be():
    """Another device that fails hands its layers over; without the pinned one there is no plan."""
    problem = a_problem(memory=(0, 6, 6), n_layers=8)
    plan = a_plan(replace(problem, settings=replace(problem.settings, first_layer="b")))
    assert set(plan.layers) == {"a", "b"}
    running = Pipeline(Path("model.gguf"), plan, [], Options(), lambda line: None)
    roomy = replace(plan.problem, devices=(replace(problem.client, memory_bytes=8), *problem.devices[1:]))
    running.plan = plan.allocated(roomy, plan.layers, 0.0)
    running.lose(Lost("a", "the host of a has gone"), 10)
    assert running.plan.layers[0] == "b" and "client" in running.plan.layers
    with pytest.raises(OallamaError, match=r"^b has gone, and without it the first layer must be on b .*of client$"):
        running.lose(Lost("b", "b has gone"), 10)


def test_a_pipeline_that_does_not_fit_is_said():
    problem = a_problem(memory=(0, 2, 2))
    with pytest.raises(DoesNotFit) as error:
        allocate(problem)
    found = pipeline_candidates(problem, error.value, a_plan(a_problem()))
    assert "2 bytes" in next(c.why_not for c in found if c.name == "pipeline")
    assert all(c.predicted_s(REQUEST) is None for c in found)


def test_the_fastest_is_chosen_and_few_hosts_where_others_gain_little():
    here, spread = Candidate("here", "here", 1, 1.0, 0.1), Candidate("spread", "ranks", 2, 1.0, 0.06)
    assert choose([here, spread], REQUEST).name == "spread"
    near = replace(spread, tpot_s=0.1 - 1.7 * LEAST_GAIN / 10)
    assert near.predicted_s(REQUEST) < here.predicted_s(REQUEST)
    assert choose([near, here], REQUEST).name == "here"
    # What was measured counts, also where little is gained.
    measured = [
        replace(near, measured_ttft_s=0.9, measured_tpot_s=0.1),
        replace(here, measured_ttft_s=0.91, measured_tpot_s=0.1),
    ]
    assert choose(measured, REQUEST).name == "spread"
    # A way that was not tried is not taken while others were.
    assert choose([measured[1], spread], REQUEST).name == "here"
    with pytest.raises(OallamaError, match=r"cannot be run on this cluster: x: too small; y: too far"):
        choose([Candidate("x", "here", why_not="too small"), Candidate("y", "ranks", why_not="too far")], REQUEST)


def test_ranks_share_the_matrices_and_wait_for_sums():
    problem = a_problem(flops=(1e9, 3e9, 1e9))
    half = RankTimes({"client": 0.25, "a": 0.75}, ((400, 1e-4), (40000, 1e-3)), {}, 100)
    ttft, tpot = predict_ranks(problem, half, REQUEST, 512)
    call_and_gather = 1e-3 + 1e-3 + 0.75 * 400 / 1e8
    assert tpot == pytest.approx(0.25 * (6 * 1e-3 + 2e-3) + 12 * 1e-4 + call_and_gather)
    assert ttft == pytest.approx(0.25 * (6 * 0.1 + 2e-3) + 12 * 1e-3 + call_and_gather)
    # Who computes longest is waited for.
    slow = replace(half, slower={"a": 2.0})
    twice = 0.5 * (6 * 1e-3 + 2e-3) + 12 * 1e-4 + call_and_gather
    assert predict_ranks(problem, slow, REQUEST, 512)[1] == pytest.approx(twice)
    # Four sequences: four rows a sum, four rows of logits. The last three prompts are computed together.
    several = Workload(100, 11, n_parallel=4)
    more = predict_ranks(problem, half, several, 512)
    assert 3.5 * ttft < more[0] < 4 * ttft and tpot < more[1] < 4 * tpot


def test_ranks_wait_in_each_part_of_a_layer():
    problem = a_problem(flops=(1e9, 3e9, 1e9))
    even = RankTimes({"client": 0.25, "a": 0.75}, ((400, 1e-4), (40000, 1e-3)), {}, 100)
    parts = (Part(0.4, (0.5, 0.5)), Part(0.6, (0.25, 0.75)))
    _, tpot = predict_ranks(problem, replace(even, parts=parts), REQUEST, 512)
    more = (0.4 * 0.5 + 0.6 * 0.25) / 0.25
    assert tpot - predict_ranks(problem, even, REQUEST, 512)[1] == pytest.approx(0.25 * 6e-3 * (more - 1))


def test_short_prompts_that_wait_are_joined():
    def sizes(n_prompt: int, n_parallel: int) -> list[tuple[int, int, int]]:
        passes = prompt_passes(Workload(n_prompt, 2, n_parallel=n_parallel), 512, 0)
        assert sum(each.n_tokens * each.count for each in passes) == n_prompt * n_parallel
        return [(each.n_tokens, each.n_returned, each.count) for each in passes]

    assert sizes(64, 1) == [(64, 1, 1)]
    assert sizes(64, 8) == [(64, 1, 1), (448, 7, 1)]
    assert sizes(64, 32) == [(64, 1, 1), (512, 8, 3), (448, 7, 1)]
    assert sizes(300, 2) == [(300, 1, 1), (300, 1, 1)]
    assert sizes(600, 3) == [(512, 0, 3), (88, 1, 3)]
    assert sizes(0, 3) == []


def test_a_plan_with_candidates_is_read_as_it_was_written(tmp_path):
    problem = a_problem()
    plan = a_plan(problem)
    ranks = RankPlan((RankHost("client", "localhost", 2, 0.25), RankHost("a", "me@a", 4, 0.75)), network="10.0.0.0/24")
    candidates = [
        *pipeline_candidates(problem, allocate(problem), plan),
        Candidate("ranks on client, a", "ranks", 2, 0.01, 0.001, ranks=ranks),
        Candidate("this host alone", "here", why_not="no memory"),
    ]
    made = decided(plan, candidates)
    assert made.chosen is not None and made.chosen.ranks == ranks
    made.save(tmp_path / "plan.json")
    assert ClusterPlan.load(tmp_path / "plan.json") == made
    content = json.loads((tmp_path / "plan.json").read_text())
    how = content["candidates"][0]["solved"]
    assert how["solver"] == "grouped" and how["method"] == "dynamic programming" and how["is_proven"] is True
    content["chosen"]["ranks"] = None
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(OallamaError, match="is no way to run a model"):
        ClusterPlan.load(tmp_path / "plan.json")
