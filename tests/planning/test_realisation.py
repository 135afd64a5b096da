"""Plain, repacked or tiled: chosen from the profile alone, said in the plan, counted, and predicted with."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from oallama.data.entries import OTHER, REALISATIONS, TILED_FROM, OperatorTime
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.plan_difference import describe_difference
from oallama.data.profile import Profile
from oallama.data.tuning import Crossover
from oallama.data.workload import Workload
from oallama.planning import OperatorGraph, make_plans
from oallama.planning.realisation import TWICE, Weight, choose, realise, usual_realisation
from support import synthetic

WEIGHT = Weight("MUL_MAT", "q4_K", (64, 128))
TIERS = (1, 32, 512)
GRAPH = OperatorGraph.from_engine(synthetic.raw_graph(synthetic.Shape(type="q4_K"), TIERS), model={})
# Heavy enough that device changes do not matter.
WIDE = synthetic.Shape(n_embd=2048, n_head=16, n_head_kv=4, head_dim=128, n_ff=8192, n_vocab=32000, type="q4_K")


def times(*points: tuple[str, int, float]) -> Profile:
    base = synthetic.profile(GRAPH)
    made = tuple(OperatorTime(HOST, "MUL_MAT", "q4_K", (64, 128, 1), 1, n, s, realisation=r) for r, n, s in points)
    return replace(base, operators=made)


def machine(decode: float, prefill: float, graph: OperatorGraph = GRAPH, **more: object) -> Profile:
    """A host on which repacked weights take so many times as long as plain ones."""
    base = synthetic.profile(graph, **more)  # type: ignore[arg-type]
    operators: list[OperatorTime] = []
    for e in base.operators:
        if e.device != HOST or e.op == OTHER:
            operators.append(e)
            continue
        ratio = decode if e.n_tokens == 1 else prefill
        operators.append(replace(e, realisation="plain"))
        operators.append(replace(e, realisation="repacked", median_s=e.median_s * ratio))
    return replace(base, operators=tuple(operators))


def planned(profile: Profile, graph: OperatorGraph = GRAPH, **more: object) -> PlacementPlan:
    planner = more.pop("planner", "exact")
    found = make_plans(synthetic.space(graph, "30%", machine=profile, **more), planner)  # type: ignore[arg-type]
    return found.best


def on_host(plan: PlacementPlan) -> list[str]:
    names = {op.weight for op in GRAPH.targets(1)}
    return [t.realisation for name, t in plan.tensors.items() if name in names and t.device == HOST]


def test_the_choice_is_what_the_stages_sum_up_to() -> None:
    profile = times(("plain", 1, 1.0), ("plain", 512, 8.0), ("repacked", 1, 0.9), ("repacked", 512, 10.0))
    assert choose(WEIGHT, [(1, 10.0)], profile).realisation == "repacked"
    both = choose(WEIGHT, [(1, 10.0), (512, 1.0)], profile)
    assert both.realisation == "plain" and both.seconds == pytest.approx({"plain": 18.0, "repacked": 19.0})
    assert str(both) == "q4_K 64x128: plain (plain 1.8e+04 ms, repacked 1.9e+04 ms)"
    even = times(("plain", 1, 1.0), ("repacked", 1, 1.0))
    assert choose(WEIGHT, [(1, 1.0)], even).realisation == "plain"
    assert choose(WEIGHT, [(1, 1.0)], even, usual="repacked").realisation == "repacked"


@pytest.mark.parametrize(("usual", "other"), [("plain", "repacked"), ("repacked", "plain")])
def test_what_llama_cpp_takes_gives_way_to_more_than_noise_only(usual: str, other: str) -> None:
    for seconds, expected in ((0.96, usual), (0.94, other)):
        profile = times((usual, 1, 1.0), (other, 1, seconds))
        assert choose(WEIGHT, [(1, 1.0)], profile, usual=usual).realisation == expected


def test_beside_host_memory_of_an_accelerator_plain_is_usual() -> None:
    base = synthetic.profile(GRAPH)
    host, accelerator, *_ = base.devices
    for backend, expected in (("CUDA", "plain"), ("Vulkan", "plain"), ("RPC[127.0.0.1:5000]", "repacked")):
        profile = replace(base, devices=(host, replace(accelerator, backend=backend)))
        assert usual_realisation(profile, [accelerator.name]) == expected
    assert usual_realisation(base, []) == "repacked"


def test_without_both_times_nothing_is_chosen() -> None:
    for profile in (times(("", 1, 1.0)), times(("plain", 1, 1.0)), times(("repacked", 1, 1.0))):
        assert choose(WEIGHT, [(1, 1.0)], profile).realisation == ""
    other_shape = WEIGHT._replace(ne=(64, 64))
    profile = times(("plain", 1, 1.0), ("repacked", 1, 0.5))
    assert choose(other_shape, [(1, 1.0)], profile).realisation == ""


def test_a_tuned_table_decides_between_measured_token_counts() -> None:
    profile = times(("plain", 1, 1.0), ("plain", 512, 8.0), ("repacked", 1, 0.9), ("repacked", 512, 7.0))
    table = Crossover("repack", "q4_K", (4096, 4096), ((1, 1.0, 0.9), (4, 1.0, 2.0), (512, 8.0, 7.0)))
    assert choose(WEIGHT, [(4, 1.0)], profile).realisation == "repacked"
    assert choose(WEIGHT, [(4, 1.0)], profile, crossover=table).realisation == "plain"
    assert choose(WEIGHT, [(1, 1.0)], profile, crossover=table).realisation == "repacked"  # measured


def test_a_tiled_weight_is_plain_for_few_tokens() -> None:
    points = [("plain", 1, 1.0), ("plain", 512, 8.0), ("repacked", 1, 0.8), ("repacked", 512, 6.0), ("tiled", 512, 4.0)]
    profile = times(*points)
    key = (HOST, "MUL_MAT", "q4_K", (64, 128))
    assert profile.op_time(*key, 1, realisation="tiled").seconds == 1.0
    assert profile.op_time(*key, 4, realisation="tiled") == profile.op_time(*key, 4, realisation="plain")
    assert profile.op_time(*key, 512, realisation="tiled").seconds == 4.0
    assert profile.op_time(*key, 512).seconds == 6.0  # llama.cpp's own choice
    assert choose(WEIGHT, [(1, 1.0), (512, 1.0)], profile, usual="repacked").realisation == "tiled"
    assert choose(WEIGHT, [(1, 20.0), (512, 1.0)], profile, usual="repacked").realisation == "repacked"
    never_repacked = times(*(point for point in points if point[0] != "repacked"))
    assert choose(WEIGHT, [(1, 9.0), (512, 1.0)], never_repacked, usual="repacked").realisation == "tiled"
    assert choose(WEIGHT, [(1, 9.0)], never_repacked, usual="repacked").realisation == "plain"


def tiling(base: Profile, ratio: float) -> Profile:
    """The same machine with our kernels, which take so many times as long as plain ones."""
    plain = [e for e in base.operators if e.realisation == "plain" and e.n_tokens > 1]
    tiled = (replace(e, realisation="tiled", median_s=e.median_s * ratio) for e in plain)
    return replace(base, operators=(*base.operators, *tiled))


def test_a_weight_in_memory_twice_has_the_times_of_both() -> None:
    points = [("plain", 1, 1.0), ("plain", 512, 8.0), ("repacked", 1, 0.5), ("repacked", 512, 6.0), ("tiled", 512, 4.0)]
    profile, key = times(*points), (HOST, "MUL_MAT", "q4_K", (64, 128))
    few, many = TILED_FROM - 1, TILED_FROM
    for n, single in ((1, "repacked"), (few, "repacked"), (many, "tiled"), (512, "tiled")):
        assert profile.op_time(*key, n, realisation=TWICE) == profile.op_time(*key, n, realisation=single)
    chosen = choose(WEIGHT, [(1, 8.0), (512, 1.0)], profile, usual="repacked")
    assert chosen.realisation == "repacked" and chosen.seconds[TWICE] == pytest.approx(8.0)
    assert chosen.gain_twice() == pytest.approx(2.0)
    assert choose(WEIGHT, [(1, 80.0), (512, 1.0)], profile, usual="repacked").gain_twice() == 0.0  # 4.3 %: noise
    assert choose(WEIGHT, [(1, 8.0)], profile).gain_twice() == 0.0
    assert choose(WEIGHT, [(512, 1.0)], profile).gain_twice() == 0.0
    never_repacked = times(*(point for point in points if point[0] != "repacked"))
    assert choose(WEIGHT, [(1, 8.0), (512, 1.0)], never_repacked).gain_twice() == 0.0


@pytest.mark.parametrize("planner", ["exact", "oato", "cpu"])
def test_weights_are_in_memory_twice_where_that_pays_and_fits(planner: str) -> None:
    profile = tiling(machine(0.5, 0.9, op_offload=False), 0.3)
    roomy, short = (
        planned(profile, planner=planner, workload=Workload(512, 4), host_memory=nbytes, streams=False)
        for nbytes in (2**40, 0)
    )
    assert TWICE in set(on_host(roomy)) and TWICE not in set(on_host(short))
    assert roomy.predicted.request_s < short.predicted.request_s
    twice = [t for t in roomy.tensors.values() if t.realisation == TWICE]
    assert roomy.repacked_nbytes >= sum(t.nbytes for t in twice)
    note = next(note for note in roomy.predicted.notes if "in memory twice" in note)
    assert note.startswith(f"{len(twice)} weights on the host")
    assert any("longer" in note for note in roomy.predicted.notes)
    again = PlacementPlan.from_json(roomy.to_json())
    assert again == roomy and any(line.endswith(f"CPU host {TWICE}") for line in again.to_backend_map().splitlines())
    once = planned(profile, planner=planner, workload=Workload(512, 4), host_memory=2**40, repack=False)
    assert set(on_host(once)) == {"plain"}


def test_memory_goes_to_the_kinds_of_weights_that_gain_most() -> None:
    profile = tiling(machine(0.5, 0.9), 0.3)
    decode, prefill = [(1, 3.0)], [(512, 1.0)]

    def twice(spare: int) -> list[str]:
        made = realise(GRAPH, profile, decode, prefill, spare=spare)
        assert TWICE not in {*made.moved.values(), *made.divided.values()}
        return [name for name, form in made.host.items() if form == TWICE]

    nbytes = {t.name: t.nbytes for t in GRAPH.tensors}
    everything = sum(nbytes[name] for name in twice(2**40))
    some = twice(everything - 1)
    assert 0 < sum(nbytes[name] for name in some) < everything and set(some) < set(twice(2**40))
    assert twice(0) == []


def test_divided_weights_are_in_memory_once() -> None:
    wide = OperatorGraph.from_engine(synthetic.raw_graph(WIDE, TIERS), model={})
    profile = tiling(machine(0.5, 0.9, wide, op_offload=False), 0.3)
    space = synthetic.space(wide, "30%", machine=profile, workload=Workload(512, 4), host_memory=2**40)
    costs = space.builder(space.context).costs
    homes = space.builder(space.context).uniform(0)
    split = (np.arange(len(costs.targets)) % 2).astype(np.intp)
    found = [REALISATIONS[i] for i in costs.realised(replace(homes, split=split))]
    assert TWICE in set(found[::2]) and TWICE not in set(found[1::2])


def test_a_tiled_weight_is_ours_for_few_tokens_where_that_was_measured() -> None:
    points = [("plain", 1, 1.0), ("plain", 512, 8.0), ("repacked", 1, 0.8), ("repacked", 512, 6.0)]
    profile = times(*points, ("tiled", 1, 0.5), ("tiled", 512, 4.0))
    key = (HOST, "MUL_MAT", "q4_K", (64, 128))
    assert profile.op_time(*key, 1, realisation="tiled").seconds == 0.5
    assert choose(WEIGHT, [(1, 20.0), (512, 1.0)], profile, usual="repacked").realisation == "tiled"


def test_plans_say_how_many_weights_are_tiled() -> None:
    made = planned(tiling(machine(2.0, 2.0, op_offload=False), 1 / 3), planner="cpu", workload=Workload(512, 4))
    assert "tiled" in set(on_host(made)) and made.repacked_nbytes == 0
    note = next(note for note in made.predicted.notes if "oallama's kernels" in note)
    n_tiled = sum(realisation == "tiled" for realisation in on_host(made))
    assert note.startswith(f"{n_tiled} weights on the host take oallama's kernels; ") and "longer" in note


@pytest.mark.parametrize("planner", ["exact", "oato", "cpu"])
def test_plans_take_what_is_faster_and_say_so(planner: str) -> None:
    fast, slow = machine(0.5, 0.5, op_offload=False), machine(2.0, 2.0, op_offload=False)
    assert set(on_host(planned(fast, planner=planner))) == {"repacked"}
    assert set(on_host(planned(slow, planner=planner))) == {"plain"}
    assert set(on_host(planned(synthetic.profile(GRAPH, op_offload=False), planner=planner))) == {""}
    made = planned(fast, planner=planner)
    host = sum(t.nbytes for n, t in made.tensors.items() if t.realisation == "repacked")
    assert made.repacked_nbytes == host > 0
    note = next(note for note in made.predicted.notes if "repacked" in note)
    assert "of its memory" in note and "longer" in note
    assert not any("repacked" in note for note in planned(slow, planner=planner).predicted.notes)


def test_predictions_use_the_chosen_times() -> None:
    plain = planned(synthetic.profile(GRAPH, op_offload=False), planner="cpu").predicted
    fast = planned(machine(0.5, 0.5, op_offload=False), planner="cpu").predicted
    assert fast.parts["decode"]["targets"] == pytest.approx(0.5 * plain.parts["decode"]["targets"])
    assert fast.parts["prefill"]["targets"] == pytest.approx(0.5 * plain.parts["prefill"]["targets"])


def test_the_switch_makes_everything_plain() -> None:
    made = planned(machine(0.5, 0.5, op_offload=False), repack=False)
    assert set(on_host(made)) == {"plain"} and made.repacked_nbytes == 0


def test_stages_differ_where_a_weight_is_streamed() -> None:
    """Repacking that only decode likes is for weights whose prefill runs elsewhere."""
    wide = OperatorGraph.from_engine(synthetic.raw_graph(WIDE, TIERS), model={})
    profile, workload = machine(0.9, 3.0, wide, op_offload=False, overlap=1.0), Workload(2048, 16)
    streamed = planned(profile, wide, workload=workload)
    assert {t.realisation for t in streamed.tensors.values() if t.mode == "stream"} == {"repacked"}
    note = next(note for note in streamed.predicted.notes if "repacked" in note)
    assert "read from the file as well" in note
    computed = planned(profile, wide, workload=workload, streams=False)
    assert {t.realisation for name, t in computed.tensors.items() if "ffn_up" in name and t.device == HOST} == {"plain"}


def test_what_may_be_uploaded_is_plain() -> None:
    wide = OperatorGraph.from_engine(synthetic.raw_graph(WIDE, TIERS), model={})
    uploads = planned(machine(0.5, 0.9, wide), wide, workload=Workload(2048, 1), streams=False)
    assert {t.realisation for t in uploads.tensors.values() if t.mode == "upload"} == {"plain"}


def test_llama_cpps_own_placements_are_left_as_they_are() -> None:
    """With an accelerator that has pinned memory llama.cpp keeps host weights plain, and that is predicted."""
    layers = planned(machine(0.5, 0.5), planner="layers")
    same = planned(synthetic.profile(GRAPH), planner="layers")
    assert set(on_host(layers)) == {""}
    assert layers.predicted.request_s == pytest.approx(same.predicted.request_s)


def test_the_map_and_the_file_carry_the_realisation() -> None:
    made = planned(machine(0.5, 0.5, op_offload=False))
    lines = made.to_backend_map().splitlines()
    name = next(name for name, t in made.tensors.items() if t.realisation)
    assert f"tensor {name} CPU host repacked" in lines
    again = PlacementPlan.from_json(made.to_json())
    assert again == made and again.hash == made.hash
    plain = planned(machine(0.5, 0.5, op_offload=False), repack=False)
    assert any("CPU (host, plain) -> CPU (host, repacked)" in line for line in describe_difference(plain, made))


def test_an_older_plan_has_no_realisation() -> None:
    content = json.loads(planned(synthetic.profile(GRAPH)).to_json())
    for tensor in content["tensors"].values():
        for segment in tensor["segments"]:
            del segment["realisation"]
    older = PlacementPlan.from_json(json.dumps(content))
    assert {t.realisation for t in older.tensors.values()} == {""}
