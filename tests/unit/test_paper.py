"""oallama.studies.paper: the FlexGen model's equations at both ends, and claims that name what the script predicts."""

from __future__ import annotations

import pytest

from oallama.planning import Workload, make_plans
from oallama.studies.paper import flexgen, reported, study
from support.synthetic import DEVICE, graph, profile, space

MODEL = graph()
PROFILE = profile(MODEL)
LAYER_BYTES = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)  # q, k and v, output, three of the FFN, F16
HEAD_BYTES = 2 * 64 * 256


def test_all_resident_is_what_the_gpu_computes():
    """Per layer 7 targets, attention, 9 small operators (norms 4, rope 2, additions 2, swiglu 1); the head and 2."""
    engine = flexgen.FlexGen(MODEL, PROFILE, DEVICE, share=1.0)
    one = {ne: PROFILE.op_time(DEVICE, "MUL_MAT", "f16", ne, 1).seconds for ne in
           ((64, 64), (64, 32), (64, 128), (128, 64), (64, 256))}  # fmt: skip
    targets = 2 * one[64, 64] + 2 * one[64, 32] + 2 * one[64, 128] + one[128, 64]
    small = PROFILE.other_op_time(DEVICE, 1, 64)
    attention = PROFILE.attention_time(DEVICE, (4, 2, 16, 16), 1, 80).seconds
    expected = 4 * (targets + attention) + one[64, 256] + (4 * 9 + 2) * small
    assert engine.tpot(80) == pytest.approx(expected)


def test_nothing_resident_is_bound_by_the_pinned_link():
    engine = flexgen.FlexGen(MODEL, profile(MODEL, link=1e6), DEVICE, share=0.0)
    copies = 4 * (1e-5 + LAYER_BYTES / 2e6) + 1e-5 + HEAD_BYTES / 2e6
    assert engine.tpot(80) == pytest.approx(copies, rel=1e-6)
    assert engine.ttft(64) == pytest.approx(copies + 1e-5 + LAYER_BYTES / 2e6, rel=1e-6)
    assert engine.request(64, 32) == pytest.approx(engine.ttft(64) + 31 * engine.tpot(80))


def test_more_on_the_gpu_is_never_slower():
    seconds = [flexgen.FlexGen(MODEL, PROFILE, DEVICE, share).tpot(80) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert seconds == sorted(seconds, reverse=True)


def test_claims_are_about_what_is_predicted():
    for claim in reported.CLAIMS:
        assert claim.model in study.MODELS and claim.metric in ("e2e", "ttft", "")
        assert claim.share is None or claim.share in study.SHARES


def row(share: float, engine: str, request_s: float) -> study.Row:
    tpot = dict.fromkeys(study.GENERATED, 0.1)
    ttft = {n: request_s * n for n in study.PROMPTS}
    return study.Row("llama3-8b", share, engine, engine, 10**9, request_s, ttft, tpot, ())


def test_report_puts_the_gain_beside_the_claim():
    rows = [row(0.5, "llama.cpp", 3.0), row(0.5, "FlexGen", 8.0), row(0.5, "oato", 2.0)]
    text = study.report(rows, "box", ["oato", "exact"])
    assert "| llama3-8b | 50% | end to end | llama.cpp | +17.4 % | +50.0 / +33.3 |" in text
    assert "| llama3-8b | 50% | end to end | FlexGen | +46.2 % | +300.0 / +75.0 |" in text
    assert "exact" not in text and "25%" not in text


def test_a_plan_per_prompt_is_read_at_its_own_prompt():
    machine = profile(MODEL, overlap=1.0)
    made = {
        n: make_plans(space(MODEL, "50%", machine=machine, workload=Workload(n, 32)), planner).best
        for n, planner in ((64, "exact"), (512, "layers"))
    }
    row = study.from_plans("llama3-8b", 0.5, made)
    assert row.ttft_s == {n: each.predicted.ttft_s[n] for n, each in made.items()}
    assert (row.engine, row.planner, row.request_s) == (study.EACH, "exact, layers", made[64].predicted.request_s)
