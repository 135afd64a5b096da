"""Plans in the terminal: 80 columns, no colour needed."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from oallama.cli.profile import profile_table
from oallama.data.plan import HOST, PlacementPlan, TensorPlacement
from oallama.data.workload import Workload
from oallama.planning.planner import Candidates
from oallama.views.candidates import reason, render_candidates
from oallama.views.plan_table import (
    render_layers,
    render_plan,
    render_request,
    render_summary,
    render_times,
)
from support import synthetic
from support.planned import plan, smallest
from support.plans import make
from support.synthetic import DEVICE, QWQ_32B, Shape, graph


def show(renderable, width=80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, legacy_windows=False).print(renderable)
    return out.getvalue()


def picture(result: PlacementPlan) -> list[str]:
    return [line.rstrip() for line in show(render_layers(result)).splitlines()]


def test_whole_model_on_the_device_is_one_row():
    assert picture(plan()) == [
        "layers KV q k v o gate up down",
        "   0-3 █  █ █ █ █  █   █   █",
        "token_embd ·",
        "output █",
        f"█ {DEVICE}   · CPU",
    ]


def test_runs_of_layers_and_ascii():
    plan = make(on_host=["blk.3.ffn_up.weight", "blk.4.ffn_up.weight"], upload=["blk.11.ffn_up.weight"])
    lines = [line.encode("ascii", "oallama").decode() for line in picture(plan)]
    assert lines[0] == "layers KV gate up down"
    assert [line.split() for line in lines[1:5]] == [
        ["0-2", "#", "#", "#", "#"],
        ["3-4", "#", "#", ".", "#"],
        ["5-10", "#", "#", "#", "#"],
        ["11", "#", "#", "^", "#"],
    ]
    assert lines[-1] == "# GPU0   . CPU   ^ CPU, uploaded for large batches"


def test_a_profile_shows_the_faster_realisation():
    plain = synthetic.profile(graph())
    faster = tuple(replace(t, median_s=t.median_s / 2, realisation="repacked") for t in plain.operators)
    slower = tuple(replace(t, median_s=t.median_s * 2, realisation="repacked") for t in plain.operators)

    def decode(operators) -> float:
        line = show(profile_table(replace(plain, operators=operators), graph()), 100).splitlines()
        return float(next(row for row in line if row.split()[:1] == [HOST]).split()[2])

    assert decode(plain.operators + faster) == pytest.approx(2 * decode(plain.operators), rel=0.1)
    assert decode(plain.operators + slower) == decode(plain.operators)


def test_split_tensor_and_absent_kind():
    tensors = dict(make().tensors)
    del tensors["blk.0.ffn_up.weight"]
    whole = TensorPlacement.whole("f16", 10, HOST, "host", 0.5)
    tensors["blk.1.ffn_up.weight"] = TensorPlacement.divided(whole, "GPU0", 5, 10)
    lines = picture(make(tensors=tensors))
    assert "/" in lines[2] and lines[-1].endswith("/ split: GPU0 computes 50% of each while CPU computes the rest")
    assert lines[1].split() == ["0", "█", "█", "█"]


def test_baselines_without_affinity_draw_matrices_only():
    lines = picture(plan(planner="layers", budget=smallest() + 150_000))
    assert lines[0] == "layers KV q k v o gate up down"
    assert "norm" not in "".join(lines) and len(lines) == 6


@pytest.mark.parametrize("shape", [Shape(), Shape(n_expert=8), QWQ_32B])
@pytest.mark.parametrize("planner", ["oato", "layers", "cpu"])
def test_fits_80_columns(shape, planner):
    model = graph(shape)
    text = show(render_plan(plan(model, smallest(model) + model.weights_bytes // 2, planner=planner)))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "\x1b" not in text


def test_summary_numbers():
    text = show(render_summary(plan(budget="64MiB")))
    row = next(line for line in text.splitlines() if DEVICE in line)
    assert "64.0 MiB" in row
    assert "synthetic, planner oato, n_ctx 4096, plan " in text


def test_times():
    text = show(render_times(make()))
    assert "333.3 ms" in text and "100.0" in text and "10.0 ms" in text


@pytest.mark.parametrize("planner", ["exact", "minimal", "cpu"])
def test_every_plan_says_how_fast_its_request_is(planner):
    made = plan(planner=planner, workload=Workload(64, 17, depth=100))
    (line,) = render_request(made)
    prefill, decode = (sum(made.predicted.parts[stage].values()) for stage in ("prefill", "decode"))
    assert line.plain.startswith("predicted for 64 + 17 tokens behind 100: TTFT ")
    assert line.plain.endswith(f", then {16 / decode:.1f} tokens/s") and line.plain in show(render_plan(made))
    assert made.predicted.request_s == pytest.approx(prefill + decode)
    assert render_request(replace(made, predicted=replace(made.predicted, parts={}))) == []


def test_a_plan_without_a_prompt_or_an_answer_says_what_it_knows():
    (only,) = render_request(plan(workload=Workload(0, 17)))
    assert "TTFT" not in only.plain and only.plain.endswith(" tokens/s")
    (one,) = render_request(plan(workload=Workload(64, 1)))
    assert "tokens/s" not in one.plain and "TTFT " in one.plain


def test_the_reason_says_what_the_next_plan_has_more_of() -> None:
    made = plan()

    def why(**changes: Any) -> str:
        timed = replace(made.predicted, request_s=changes.pop("request_s"), parts=changes.pop("parts"))
        other = replace(made, predicted=timed, budgets={}, **changes)
        return reason(Candidates({"first": made, "next": other}, {}))

    same, faster = made.predicted.parts, made.predicted.request_s * 0.9
    more = {stage: causes | {"transfers": causes.get("transfers", 0.0) + 1.0} for stage, causes in same.items()}
    assert why(request_s=faster, parts=more).endswith("less than that may be off, and has more traffic between devices")
    assert why(request_s=made.predicted.request_s, parts=more).startswith("first: next is within 2%, but has more")
    assert why(request_s=faster, parts=same, devices=("GPU9", *made.devices)).endswith("needs more devices")
    own = replace(made.context, attention="oallama")
    assert why(request_s=faster, parts=same, context=own).endswith(
        "and does not have llama.cpp's own form of attention"
    )
    assert why(request_s=made.predicted.request_s, parts=same).endswith("is within 2%, but is no safer")
    assert "1.50x faster than next" in why(request_s=made.predicted.request_s * 1.5, parts=more)
    params = made.planner["params"] | {"gave_way": 3 << 20, "streams_later": 128}
    made = replace(made, planner={"name": "exact", "params": params})
    assert why(request_s=made.predicted.request_s * 1.5, parts=more).endswith(
        "; 3.0 MiB of weights give way to slots for prompts from 128 tokens on"
    )


@pytest.mark.parametrize("width", [60, 70, 80, 100])
def test_narrow_terminals_get_fewer_columns_and_no_cut_numbers(width: int) -> None:
    made = plan()
    found = Candidates({"exact": made, "layers": replace(made, budgets={})}, {})
    lines = [*show(render_summary(made), width).splitlines(), *show(render_candidates(found), width).splitlines()]
    assert all(len(line) <= width for line in lines) and not any("…" in line for line in lines)
    heads = " ".join(lines)
    assert "total" in heads and "request" in heads
    assert width < 80 or ("tensors" in heads and "micro-batch" in heads)
    assert width > 60 or ("tensors" not in heads and "micro-batch" not in heads)
