"""Uses of experts that hit, by the engine's counters, beside what a plan expects of them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from oallama.base import printing
from oallama.data.layer_experts import ExpectedExperts, ExpectedHits
from oallama.data.plan import PlacementPlan
from oallama.engine.expert_counts import ExpertCounts
from oallama.loading.expert_hits import LEAST_TOKENS, HitsWatch, expert_hits
from oallama.loading.placement import Placement
from oallama.serving.served_runs import counters_of, hits_remark
from oallama.views.experts import render_hits
from support.plans import make

USED = 8
ENOUGH = LEAST_TOKENS * USED
EXPECTED = ExpectedExperts("trace", 64, USED, {0: ExpectedHits(64, 1.0, 1.0), 3: ExpectedHits(16, 0.8, 0.6)})


def planned(expected: ExpectedExperts | None = EXPECTED) -> PlacementPlan:
    plan = make()
    return replace(plan, predicted=replace(plan.predicted, experts=expected))


def counted(share: float, uses: int = ENOUGH, layer: int = 3) -> ExpertCounts:
    return ExpertCounts(layer, uses, round(share * uses), uploads=2, uploaded_bytes=3 << 20)


def shown(*parts) -> str:
    out = io.StringIO()
    for part in parts:
        Console(file=out, width=80, no_color=True, legacy_windows=False).print(part)
    return out.getvalue()


@pytest.fixture(autouse=True)
def said_anew() -> Iterator[None]:
    """What other tests said may be said again."""
    printing.say_once.cache_clear()
    yield
    printing.say_once.cache_clear()


def test_hits_stand_beside_those_expected() -> None:
    hits = expert_hits([counted(0.75)], planned())
    assert hits is not None and hits.expected_share == pytest.approx(0.8)
    assert hits.describe() == f"experts: 75% of {ENOUGH} uses hit those on GPU0, 80% were expected; 2 uploads, 3.0 MiB"
    assert hits.fewer() is None
    (layer,) = hits.to_dict()["layers"]
    assert layer["expected"] == 0.8 and layer["hits"] / layer["uses"] == pytest.approx(0.75)
    text = shown(*render_hits(hits))
    assert any(line.split()[:4] == ["3", "75%", "80%", "2"] for line in text.splitlines())
    assert max(map(len, text.splitlines())) <= 80


def test_94_layers_fit_80_columns() -> None:
    hits = expert_hits([counted(0.1, layer=il) for il in range(94)], planned())
    assert hits is not None
    text = shown(*render_hits(hits))
    assert max(map(len, text.splitlines())) <= 80 and len(text.splitlines()) < 45 and "…" not in text


@pytest.mark.parametrize(
    ("share", "uses", "expected", "is_said"),
    [
        (0.65, ENOUGH, EXPECTED, False),  # above four fifths of 0.8
        (0.63, ENOUGH, EXPECTED, True),
        (0.63, ENOUGH - USED, EXPECTED, False),  # too few tokens
        (0.99, ENOUGH, EXPECTED, False),
        (0.0, ENOUGH, None, False),  # a plan of an older version
        (0.0, ENOUGH, replace(EXPECTED, layers={}), False),
    ],
)
def test_only_clearly_fewer_hits_are_a_matter(
    share: float, uses: int, expected: ExpectedExperts, is_said: bool
) -> None:
    hits = expert_hits([counted(share, uses)], planned(expected))
    assert hits is not None and bool(hits.fewer()) == is_said
    if is_said:
        assert "record a trace of such text" in str(hits.fewer()) and "80% were expected by the plan's" in str(
            hits.fewer()
        )


def test_without_a_trace_the_remark_says_what_was_assumed() -> None:
    hits = expert_hits([counted(0.1)], planned(replace(EXPECTED, routing="uniform")))
    assert hits is not None and "by uniform routing, which the plan assumes" in str(hits.fewer())


def test_nothing_counted_is_nothing_shown() -> None:
    assert expert_hits([], planned()) is None and expert_hits([counted(0.0, 0)], planned()) is None
    unplanned = expert_hits([counted(0.5)], None)
    assert unplanned is not None and unplanned.fewer() is None
    assert "hit those on the accelerator" in unplanned.describe()
    assert Placement(()).to_dict()["experts"] is None


def test_a_placement_shows_them() -> None:
    hits = expert_hits([counted(0.2)], planned())
    placement = Placement((), experts=hits)
    assert placement.to_dict()["experts"]["fewer"] == hits.fewer()  # type: ignore[union-attr]
    assert "experts: 20% of" in shown(placement)


def test_it_is_said_once_while_the_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def counts() -> Sequence[ExpertCounts]:
        asked.append(1)
        return [counted(0.3, len(asked) * 64 * USED)]

    watch = HitsWatch(planned(), counts)
    for _ in range(64 * 8):
        watch.step()
    said = capsys.readouterr().err
    assert said.count("record a trace of such text") == 1 and len(asked) == LEAST_TOKENS / 64


def test_plans_without_divided_layers_are_not_watched() -> None:
    def counts() -> Sequence[ExpertCounts]:
        raise AssertionError

    for expected in (None, replace(EXPECTED, layers={0: EXPECTED.layers[0]})):
        watch = HitsWatch(planned(expected), counts)
        for _ in range(200):
            watch.step()


def test_a_served_model_is_judged_by_its_counters() -> None:
    def metrics(hits: int) -> dict[str, float]:
        found = [
            f'llamacpp:expert_{what}_total{{device="{device}"}} {n}'
            for device in ("CUDA0", "CUDA1")
            for what, n in (("uses", ENOUGH // 2), ("hits", hits // 2))
        ]
        return counters_of("\n".join(["# TYPE llamacpp:expert_uses_total counter", *found, "llamacpp:n_tokens_max 7"]))

    assert metrics(10)["expert_uses_total"] == ENOUGH and metrics(10)["n_tokens_max"] == 7
    assert hits_remark(metrics(ENOUGH * 7 // 10), planned()) is None
    assert "record a trace" in str(hits_remark(metrics(ENOUGH // 2), planned()))
    assert hits_remark(metrics(0), planned(None)) is None and hits_remark({}, planned()) is None
