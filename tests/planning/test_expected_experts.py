"""What a plan says of a mixture's experts: its picture, its file, and the uses it expects, layer by layer."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from oallama.data.layer_experts import MIXED, ExpectedExperts, layer_experts
from oallama.data.plan import HOST, PlacementPlan, TensorPlacement
from oallama.data.routing import RoutingTrace, StageRouting
from oallama.errors import OallamaError
from oallama.planning import make_plans
from oallama.planning.expected_experts import expected_experts
from oallama.planning.expert_use import ExpertUse, SlotRun
from oallama.views.candidates import render_candidates
from oallama.views.experts import render_expected, render_experts
from oallama.views.plan_table import render_plan
from support.mixtures import MACHINE, MODEL, MOE, UNIFORM, WORK, plan, skewed, trace
from support.plans import make
from support.synthetic import DEVICE, Shape, graph, space

N = 128


def shown(*parts) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, no_color=True, legacy_windows=False)
    for part in parts:
        console.print(part)
    return out.getvalue()


def placed(held: list[int | str | None], accelerator: str = "GPU0") -> PlacementPlan:
    """A plan of layers that have so many of N experts on the accelerator; None: a dense layer; "7 slots": slots."""
    tensors = {}
    for layer, k in enumerate(held):
        names = [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("up", "down")]
        for number, name in enumerate(names):
            home = accelerator if k == N or (k == MIXED and number) else HOST
            whole = TensorPlacement.whole("q4_K", N * 10, home, "resident" if home != HOST else "host", 0.5)
            if isinstance(k, int) and 0 < k < N:
                whole = TensorPlacement.by_experts(whole, accelerator, tuple(range(k)), N)
            if isinstance(k, str) and k.endswith(" slots"):
                whole = TensorPlacement.by_slots(whole, accelerator, int(k.split()[0]), N)
            tensors[name if k is not None else name.replace("_exps", "")] = whole
    return make(layers=(accelerator,) * (len(held) + 1), tensors=tensors)


def row(made: PlacementPlan) -> list[str]:
    return [line.rstrip() for line in shown(*render_experts(made)).splitlines()]


# ---- the picture ---------------------------------------------------------------------------------------------------


def test_every_layer_has_a_character() -> None:
    assert row(placed([N, N, 64, 63, 1, 127, 0, MIXED, None, 0])) == [
        "experts, layer by layer",
        "   0 ██5519·+ -·",
        f"1 to 9: so many tenths of a layer's {N} experts are on GPU0, too (1 to 127)",
        "+: the matrices of the layer's experts are on different devices",
        "-: a layer without experts",
    ]


def test_slots_are_letters() -> None:
    assert row(placed([N, "13 slots", "64 slots", "127 slots", 13]))[1:] == [
        "   0 █aei1",
        f"1: so many tenths of a layer's {N} experts are on GPU0, too (13)",
        f"a to i: slots on GPU0 for 1 to 9 tenths of a layer's {N} experts (13 to 127)",
    ]


def test_slots_expect_what_slots_hit() -> None:
    def simulate(ids: np.ndarray, n_experts: int, k: int) -> SlotRun:
        together = np.eye(ids.shape[2] + 1)[[ids.shape[2] // 2] * len(ids)]  # half of each token's choices, always
        return SlotRun(together, np.zeros(len(ids)))

    recorded = different()
    use = ExpertUse.of_trace(recorded, simulate)
    expected = expected_experts(placed(["32 slots", 32]), use)
    assert expected is not None and expected.layers[0].decode == pytest.approx(0.5)
    wanted = recorded.hit_rate("decode", "static", 32)[1]
    assert expected.layers[1].decode == pytest.approx(wanted, abs=1e-6)
    unknown = expected_experts(placed(["32 slots"]), ExpertUse.of_trace(recorded))
    assert unknown is not None and unknown.layers[0].held == 32


def test_94_layers_are_readable_in_80_columns_without_colours_and_in_ascii() -> None:
    rng = np.random.default_rng(0)
    held = [*rng.integers(0, N + 1, 94).tolist()]
    lines = [line.encode("ascii", "oallama").decode() for line in row(placed(held))]
    assert len(lines) == 4 and all(len(line) <= 80 for line in lines) and all(map(str.isascii, lines))
    assert lines[1].startswith("   0 ") and lines[2].startswith("  64 ")
    drawn = "".join(line[4:].replace(" ", "") for line in lines[1:3])
    assert drawn == "".join("#" if k == N else "." if k == 0 else str(min(max(round(k / 12.8), 1), 9)) for k in held)


@pytest.mark.parametrize(("held", "drawn"), [(0, "·"), (32, "2")])
def test_matrices_that_the_host_moves_differently_are_one_layer(held: int, drawn: str) -> None:
    made = placed([held])
    name = "blk.0.ffn_down_exps.weight"
    host, *there = made.tensors[name].segments
    moved = replace(made.tensors[name], segments=(replace(host, mode="stream", stream_from=8), *there))
    made = replace(made, tensors={**made.tensors, name: moved})
    assert row(made)[1] == f"   0 {drawn}"
    every = {n: replace(t, segments=(replace(t.segments[0], mode="upload"),)) for n, t in made.tensors.items()}
    assert row(replace(made, tensors=every))[1] == "   0 ^"


def test_a_dense_model_has_no_such_row() -> None:
    assert render_experts(make()) == [] and layer_experts(make()) == ()
    assert "experts" not in shown(render_plan(make()))


@pytest.mark.parametrize("planner", ["experts", "cpu-moe", "exact"])
def test_the_picture_of_a_mixture_has_the_row(planner: str) -> None:
    text = shown(render_plan(plan("45%", planner)))
    assert "experts, layer by layer" in text and max(map(len, text.splitlines())) <= 80


# ---- what is expected ----------------------------------------------------------------------------------------------


def different() -> RoutingTrace:
    """Layers of different skew, so that no layer is like their mean."""
    rng = np.random.default_rng(3)
    ids = skewed(rng, MOE.n_layer, 400, MOE.n_expert, MOE.n_used)
    ids[::2] = np.array([[rng.permutation(MOE.n_expert)[: MOE.n_used] for _ in range(400)] for _ in ids[::2]])
    made = trace(ids, MOE.n_expert)
    half = StageRouting.judge(ids[:, ::-1][:, :200].astype(np.uint16), MOE.n_expert)
    return replace(made, stages={"prefill": half, "decode": made.stages["decode"]})


def test_every_layer_expects_its_own_share() -> None:
    recorded = different()
    made = plan("40%", "experts", ExpertUse.of_trace(recorded))
    expected = made.predicted.experts
    assert expected is not None and expected.routing == "trace" and expected.n_experts == MOE.n_expert
    divided = expected.divided()
    assert len(divided) > 2
    for layer, hits in divided.items():
        assert hits.decode == pytest.approx(recorded.hit_rate("decode", "static", hits.held)[layer], abs=1e-6)
        assert hits.prefill == pytest.approx(recorded.hit_rate("prefill", "static", hits.held)[layer], abs=1e-6)
    assert len({hits.decode for hits in divided.values()}) > 1
    layers = range(MOE.n_layer)
    assert expected.share("decode", layers) == pytest.approx(
        sum(hits.decode for hits in expected.layers.values()) / MOE.n_layer
    )


def test_whole_layers_expect_all_uses_and_the_host_none() -> None:
    made = plan("45%", "cpu-moe")
    expected = made.predicted.experts
    assert expected is not None and expected.routing == "uniform" and not expected.divided()
    on_device = {place.layer for place in layer_experts(made) if place.home == DEVICE}
    assert set(expected.layers) == on_device and 0 < len(on_device) < MOE.n_layer
    assert {(hits.held, hits.decode, hits.prefill) for hits in expected.layers.values()} == {(MOE.n_expert, 1.0, 1.0)}
    assert expected.share("decode", range(MOE.n_layer)) == pytest.approx(len(on_device) / MOE.n_layer)


def test_without_a_trace_the_share_is_that_of_the_experts() -> None:
    expected = plan("45%", "experts").predicted.experts
    assert expected is not None and expected.routing == "uniform"
    for hits in expected.divided().values():
        assert hits.decode == hits.prefill == pytest.approx(hits.held / MOE.n_expert, abs=1e-6)


def test_a_dense_model_expects_nothing() -> None:
    assert expected_experts(make(), None) is None and make().predicted.experts is None
    assert render_expected(make()) == []


def test_it_is_in_the_plan_file_and_may_be_missing_there(tmp_path) -> None:
    made = plan("40%", "experts")
    made.save(tmp_path / "plan.json")
    assert PlacementPlan.load(tmp_path / "plan.json") == made
    content = json.loads(made.to_json())
    del content["predicted"]["experts"]  # of an older version
    old = PlacementPlan.from_json(json.dumps(content))
    assert old.predicted.experts is None and old.tensors == made.tensors and render_expected(old) == []
    content["predicted"]["experts"] = {"routing": "guessed", "n_experts": 64, "n_used": 8, "layers": {}}
    with pytest.raises(OallamaError, match="routing"):
        PlacementPlan.from_json(json.dumps(content))


# ---- --explain -----------------------------------------------------------------------------------------------------


def test_explain_shows_every_divided_layer() -> None:
    use = ExpertUse.of_trace(different())
    made = plan("40%", "experts", use)
    text = shown(*render_expected(made))
    assert "by the routing trace" in text and max(map(len, text.splitlines())) <= 80
    expected = made.predicted.experts
    assert expected is not None
    for layer, hits in expected.divided().items():
        cells = [str(layer), str(hits.held), f"{hits.decode:.0%}", f"{hits.prefill:.0%}"]
        assert any(" ".join(cells) in " ".join(line.split()) for line in text.splitlines())


def test_explain_says_uniform_without_a_trace() -> None:
    mixture = space(MODEL, "45%", machine=MACHINE, workload=WORK, expert_use=UNIFORM)
    found = make_plans(mixture, "experts")
    text = " ".join(shown(render_candidates(found)).split())
    assert "routing taken as uniform, there is no trace" in text
    whole = make_plans(mixture, "cpu-moe")
    assert "there is no trace" in " ".join(shown(render_candidates(whole)).split())
    dense = make_plans(space(graph(Shape()), "45%"), "layers")
    assert "experts" not in shown(render_candidates(dense))


def test_94_divided_layers_fit_the_table() -> None:
    made = placed([16] * 94)
    use = ExpertUse.uniform(N, 8)
    made = replace(made, predicted=replace(made.predicted, experts=expected_experts(made, use)))
    text = shown(*render_expected(made))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert isinstance(made.predicted.experts, ExpectedExperts) and len(made.predicted.experts.divided()) == 94
    assert any(line.split()[::4] == ["0", "32", "64"] for line in text.splitlines())
