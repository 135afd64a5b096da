"""Algorithm 1: equal to the literal reference, ends on every input, never over the limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.errors import OallamaError
from oallama.planning.oato import Anchor, Edge, OatoResult, schedule
from support.reference_oato import reference_oato

# Whole numbers of seconds: sums are exact whatever their order, so both implementations must agree to the last bit.
SECONDS = st.integers(0, 60).map(float)


@st.composite
def instances(draw):
    n = draw(st.integers(1, 12))
    at = st.integers(0, n - 1)
    return {
        "t_host": draw(st.lists(SECONDS, min_size=n, max_size=n)),
        "t_device": draw(st.lists(SECONDS, min_size=n, max_size=n)),
        "nbytes": draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)),
        "capacity": draw(st.integers(-5, 60)),
        "edges": draw(st.lists(st.tuples(at, at, SECONDS), max_size=2 * n)),
        "anchors": draw(st.lists(st.tuples(at, st.booleans(), SECONDS), max_size=n)),
    }


OPTIONS = st.fixed_dictionaries(
    {
        "fraction": st.sampled_from([0.90, 0.5, 1.0]),
        "fill": st.sampled_from(["prefix", "skip"]),
        "skip_negative": st.booleans(),
        "transfer": st.sampled_from(["current", "marginal"]),
    }
)


def run(instance, **options) -> OatoResult:
    return schedule(
        instance["t_host"],
        instance["t_device"],
        instance["nbytes"],
        instance["capacity"],
        edges=[Edge(*e) for e in instance["edges"]],
        anchors=[Anchor(*a) for a in instance["anchors"]],
        **options,
    )


@settings(max_examples=300)
@given(instances(), OPTIONS)
def test_equals_reference(instance, options):
    ours, literal = run(instance, **options), reference_oato(**instance, **options)
    assert ours.on_device.tolist() == literal.on_device
    assert ours.affinity.tolist() == literal.affinity
    assert ours.order.tolist() == literal.order
    assert (ours.iterations, ours.reason) == (literal.iterations, literal.reason)
    assert ours.predicted_seconds == literal.predicted_seconds


@settings(max_examples=200)
@given(instances(), OPTIONS)
def test_budget_is_respected(instance, options):
    result = run(instance, **options)
    used = int(np.array(instance["nbytes"])[result.on_device].sum())
    assert used <= max(0.0, options["fraction"] * instance["capacity"])
    if options["skip_negative"]:
        # Without transfers nothing may be placed that the device does not speed up.
        alone = run({**instance, "edges": [], "anchors": []}, **options)
        gain = np.array(instance["t_host"]) - np.array(instance["t_device"])
        assert (gain[alone.on_device] > 0).all()


@settings(max_examples=200)
@given(instances(), OPTIONS)
def test_affinity_and_order(instance, options):
    result = run(instance, **options)
    assert ((result.affinity >= 0) & (result.affinity <= 1)).all()
    assert sorted(result.order.tolist()) == list(range(len(result.affinity)))
    assert (np.diff(result.affinity[result.order]) <= 0).all()


def oscillating() -> dict:
    """Room for one of two equal operators; the one on the device pays for its host neighbour and loses its place."""
    return {
        "t_host": [20.0, 20.0],
        "t_device": [0.0, 0.0],
        "nbytes": [4, 4],
        "capacity": 4,
        "edges": [],
        "anchors": [(0, False, 5.0), (1, False, 5.0)],
    }


def test_oscillation_is_a_cycle():
    result = run(oscillating(), fraction=1.0)
    assert result.reason == "cycle"
    assert result.iterations == 2  # place 0, then 1, then 0 again
    assert result.on_device.sum() == 1


@pytest.mark.parametrize("transfer", ["current", "marginal"])
@pytest.mark.parametrize("n", [6, 20, 60])
def test_terminates_on_rings_of_host_neighbours(n, transfer):
    """Many coupled oscillators of different size: long transients, no fixed point guaranteed."""
    rng = np.random.default_rng(n)
    for _ in range(20):
        result = schedule(
            rng.uniform(1, 2, n),
            rng.uniform(0, 1, n),
            rng.integers(1, 6, n),
            1.5 * n,
            edges=[Edge(i, (i + 1) % n, float(c)) for i, c in enumerate(rng.uniform(0, 5, n))],
            anchors=[Anchor(i, bool(i % 2), float(c)) for i, c in enumerate(rng.uniform(0, 5, n))],
            transfer=transfer,
            max_iterations=500,
        )
        assert result.reason in ("converged", "cycle", "bound")
        assert result.iterations <= 500


def test_some_instances_cycle_with_several_placements():
    """The cycle detector is needed: random rings do come back to an earlier placement that is not the last one."""
    rng = np.random.default_rng(7)
    reasons = set()
    for _ in range(200):
        n = 10
        reasons.add(
            schedule(
                rng.uniform(1, 2, n),
                rng.uniform(0, 1, n),
                rng.integers(1, 6, n),
                15,
                anchors=[Anchor(i, False, float(c)) for i, c in enumerate(rng.uniform(0, 2, n))],
            ).reason
        )
    assert reasons == {"cycle"} or reasons == {"cycle", "converged"}


def test_bound_stops_the_loop():
    result = run(oscillating(), fraction=1.0, max_iterations=1)
    assert (result.reason, result.iterations) == ("bound", 1)


def test_best_placement_seen_wins():
    """The corrected placement can be worse than the first; the better one is returned."""
    seen = []

    def predict(plan):
        seen.append(plan.copy())
        return 1.0 if plan[1] else 2.0

    result = schedule(
        [20.0, 20.0], [0.0, 0.0], [4, 4], 4, fraction=1.0, anchors=[Anchor(0, False, 5.0), Anchor(1, False, 5.0)],
        predict=predict,
    )  # fmt: skip
    assert result.predicted_seconds == 1.0
    assert result.on_device.tolist() == [False, True]
    assert len(seen) == result.iterations + 1


def test_paper_numbers():
    """SPEC: B = saved seconds per byte, G normalised to [0, 1], order by G, 90 % of the memory."""
    result = schedule([10.0, 8.0, 3.0], [2.0, 2.0, 1.0], [4, 2, 2], 5)
    assert result.affinity.tolist() == [0.5, 1.0, 0.0]  # B = 2, 3, 1
    assert result.order.tolist() == [1, 0, 2]
    assert result.on_device.tolist() == [False, True, False]  # 2 bytes of 4.5; 4 more do not fit, the paper stops there
    assert schedule([10.0, 8.0, 3.0], [2.0, 2.0, 1.0], [4, 2, 2], 5, fill="skip").on_device.tolist() == [
        False, True, True,
    ]  # fmt: skip


def test_losers_fill_memory_only_in_the_paper():
    assert schedule([1.0], [2.0], [1], 10).on_device.tolist() == [True]
    assert schedule([1.0], [2.0], [1], 10, skip_negative=True).on_device.tolist() == [False]


def test_marginal_draws_in_what_current_pushes_away():
    """An operator on the host between device neighbours causes transfers; moving it would save them."""
    kwargs = dict(capacity=2, fraction=1.0, anchors=[Anchor(1, True, 4.0)], skip_negative=True)
    args = ([5.0, 4.5], [1.0, 1.0], [2, 2])
    assert schedule(*args, **kwargs).on_device.tolist() == [True, False]
    assert schedule(*args, **kwargs, transfer="marginal").on_device.tolist() == [False, True]


def test_equal_benefits_keep_the_given_order():
    result = schedule([2.0] * 4, [1.0] * 4, [1] * 4, 2, fraction=1.0)
    assert result.affinity.tolist() == [1.0] * 4
    assert result.on_device.tolist() == [True, True, False, False]


def test_no_operators():
    result = schedule([], [], [], 100)
    assert result.on_device.tolist() == []
    assert result.reason == "converged"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (([1.0], [1.0, 2.0], [1]), "one time per side"),
        (([1.0], [1.0], [0]), "at least one byte"),
        (([float("nan")], [1.0], [1]), "finite"),
        (([1.0], [float("inf")], [1]), "finite"),
    ],
)
def test_bad_input(args, words):
    with pytest.raises(OallamaError, match=words):
        schedule(*args, 10)
