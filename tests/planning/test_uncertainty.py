"""How far predictions may be off, and which plan is taken where it matters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cells_tables import nine_of_ten, off

from oallama.data.entries import AttentionTime, ChainTime, DeviceInfo, LinkTime, OperatorTime, ShapeTime
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.predicted import TIE
from oallama.data.profile import Profile
from oallama.planning.uncertainty import (
    EXTRAPOLATED_FROM,
    OFF_ON_HOST,
    OFF_WITH_DEVICE,
    RECORDED_IN,
    doubt,
    extrapolation_doubt,
    noise_of,
    ranked,
    ratio_range,
    request_range,
)
from support.paths import ROOT
from support.plans import make as a_plan

BASE = a_plan()


def timed(computing: float, between: float = 0.0) -> PlacementPlan:
    """A plan that computes so many seconds and waits for the other device as many."""
    parts = {"prefill": {"targets": computing / 2}, "decode": {"targets": computing / 2, "switches": between}}
    return replace(BASE, predicted=replace(BASE.predicted, request_s=computing + between, parts=parts))


def test_noise_widens_the_range_upwards_and_most_for_what_passes_between_devices() -> None:
    alone, split = timed(10.0), timed(5.0, between=5.0)
    for plan in (alone, split):
        least, most = request_range(plan)
        assert least < 10.0 < most
    quiet, noisy = request_range(split), request_range(split, noise=0.5)
    assert noisy[0] == quiet[0] and noisy[1] > 3 * quiet[1]
    assert request_range(alone, 0.5)[1] < 2 * 10.0


def test_ranges_hold_nine_of_ten_recorded_cells() -> None:
    files = sorted((ROOT / RECORDED_IN).parent.glob(Path(RECORDED_IN).name))
    shares = off([json.loads(line) for file in files for line in file.read_text().splitlines()])
    for words, found in (("the host alone", OFF_ON_HOST), ("with a device", OFF_WITH_DEVICE)):
        worst = max(nine_of_ten(shares[f"{kind}, {words}"]) for kind in ("chosen request", "ratio of requests"))
        assert found == pytest.approx(worst, abs=0.01), words


def test_a_ratio_is_expected_in_a_range_that_noise_widens() -> None:
    fast, slow = timed(5.0, between=5.0), timed(20.0)
    least, most = ratio_range(fast, slow)
    assert least < 2.0 < most and most - 2.0 == pytest.approx(2.0 - least)
    wider = ratio_range(fast, slow, noise=0.5)
    assert wider[0] < least and most < wider[1]
    alone = [replace(plan, devices=(HOST,)) for plan in (timed(10.0), timed(20.0))]
    assert ratio_range(*alone)[0] > ratio_range(timed(10.0), timed(20.0))[0]
    assert ratio_range(*alone, noise=0.5) == ratio_range(*alone)


def test_what_two_plans_do_alike_is_no_doubt_between_them() -> None:
    assert doubt(timed(10.0, 1.0), timed(10.0, 1.0), noise=2.0) == 0.0
    assert doubt(timed(8.0, 1.0), timed(10.0, 0.0)) == pytest.approx(2.0 * 0.04 + 1.0 * 0.25)


def test_times_of_more_tokens_than_were_timed_are_off_as_far_as_was_measured() -> None:
    lines = [json.loads(line) for line in (ROOT / EXTRAPOLATED_FROM).read_text().splitlines()]
    cells = [line for line in lines if line["what"] == "matrix"]
    assert extrapolation_doubt(512, 512) == 0.0
    for n in (1024, 2048):
        worst = max(1 / (1 + cell["error"]["share"]) - 1 for cell in cells if cell["n_tokens"] == n)
        assert extrapolation_doubt(n, 512) == pytest.approx(worst, abs=5e-4)
    assert extrapolation_doubt(600, 512) == extrapolation_doubt(1024, 512)
    assert extrapolation_doubt(4096, 512) == extrapolation_doubt(2048, 512)


def test_a_gain_below_its_uncertainty_is_not_taken() -> None:
    plans = {"split": timed(80.0, between=5.0), "cpu": timed(100.0)}
    assert ranked(plans) == ["split", "cpu"]
    assert ranked(plans, noise=0.5) == ["cpu", "split"]  # five seconds of waiting may become thirty
    assert ranked({"split": timed(90.0, 9.0), "cpu": timed(100.0)}) == ["cpu", "split"]


def test_noise_leaves_plans_without_traffic_in_order() -> None:
    plans = {"slow": timed(100.0), "fast": timed(100.0 / (1 + 4 * TIE))}
    assert ranked(plans)[0] == "fast"


def test_noise_is_no_doubt_between_kernels_of_the_host_alone() -> None:
    """Other work slows both down by the same factor; a device that it does not slow down is another matter."""
    stock, ours = (replace(timed(seconds), devices=(HOST,)) for seconds in (100.0, 60.0))
    assert ranked({"stock": stock, "ours": ours}, noise=1.5)[0] == "ours"
    assert doubt(stock, ours, noise=1.5) == doubt(stock, ours)
    assert doubt(stock, timed(60.0), noise=1.5) > doubt(stock, timed(60.0))


def test_the_noise_of_a_profile_is_what_its_doubtful_times_are_too_long_by() -> None:
    def operator(median_s: float, clean: float, n_tokens: int) -> OperatorTime:
        return OperatorTime("CPU", "MUL_MAT", "q8_0", (64, 64, 1), 1, n_tokens, median_s, best_s=1.0, clean=clean)

    heads = ("CPU", 1, 1, 64, 64, "f16", "f16", 1, 256)
    profile = Profile(
        created="2026-11-24",
        fingerprint={},
        devices=(DeviceInfo("CPU", "", "cpu", 0, "CPU"),),
        operators=(operator(1.5, 1.0, 1), operator(3.0, 0.2, 32)),
        attention=(AttentionTime(*heads, 2.0, best_s=1.0, clean=0.0), AttentionTime(*heads[:-1], 512, 1.0)),
        chains=(ChainTime("CPU", "norm+mul", "f32", (64, 1), 1, 1.0, best_s=0.5),),
        shapes=(ShapeTime("CPU", "an operator", 1.0),),
        links=(LinkTime("CPU", "h2d", "pageable", 64, 3.0, best_s=1.0, clean=0.0),),
    )
    assert noise_of(profile, ["CPU"]) == pytest.approx((2.0 + 1.0 + 2.0) / 7)
    assert noise_of(profile, ["RPC0"]) == 0.0
