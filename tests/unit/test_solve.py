"""The exact solver: the optimum of brute force, bounds that hold, promises kept at the sizes of real models."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.errors import OallamaError
from oallama.solving.deadline import PATIENCE, Deadline
from oallama.solving.dominance import nondominated
from oallama.solving.layered import Infeasible, Instance, LayerClass
from oallama.solving.solve import solve
from oallama.solving.solve_dp import search
from oallama.solving.solve_dual import maximise
from oallama.solving.solve_milp import _Walks, solve_milp
from oallama.solving.trellis import Trellis
from support.layered_instances import assert_honest, brute_force, layer_like, model_like, random_instance

CLOSE = 1e-9
GENEROUS = 30.0  # seconds: a limit no test comes near


def assert_optimal(instance: Instance, method: str) -> str:
    """Solves to the optimum and compares with brute force; returns which of the three outcomes it was."""
    optimum = brute_force(instance)
    if optimum is None or np.isinf(optimum):
        with pytest.raises(OallamaError) as error:
            solve(instance, gap=0, time_limit_s=GENEROUS, method=method)
        assert isinstance(error.value, Infeasible) == (optimum is not None)
        return "infeasible" if optimum is not None else "no path"
    solution = solve(instance, gap=0, time_limit_s=GENEROUS, method=method)
    assert_honest(instance, solution)
    assert solution.status == "optimal"
    assert solution.seconds == pytest.approx(optimum, rel=CLOSE, abs=1e-15)
    assert solution.bound <= optimum * (1 + CLOSE)
    assert solution.gap <= 2 * CLOSE
    return "optimal"


@pytest.mark.parametrize(
    ("method", "instances", "optima"),
    [pytest.param("auto", 1000, 500, marks=pytest.mark.slow), ("auto", 200, 90), ("dp", 200, 90), ("milp", 200, 90)],
)
def test_equals_brute_force(method, instances, optima):
    outcomes = [assert_optimal(random_instance(seed), method) for seed in range(instances)]
    assert outcomes.count("optimal") >= optima
    assert outcomes.count("infeasible") >= 5 and outcomes.count("no path") >= 5


@settings(max_examples=100)
@given(st.integers(10_000, 2**32), st.sampled_from(["auto", "dp", "milp"]), st.integers(0, 3))
def test_equals_brute_force_anywhere(seed, method, accelerators):
    assert_optimal(random_instance(seed, accelerators), method)


def test_labels_and_program_agree_where_brute_force_cannot_go():
    compared = 0
    for seed in range(30):
        instance = replace(random_instance(seed, 1), layers=(0,) * 12)
        instance = replace(instance, capacity=instance.classes[0].nbytes.max(axis=0) * 6)
        try:
            by_labels = solve(instance, gap=0, time_limit_s=GENEROUS, method="dp")
        except OallamaError as error:
            with pytest.raises(type(error)):
                solve(instance, gap=0, time_limit_s=GENEROUS, method="milp")
            continue
        by_program = solve(instance, gap=0, time_limit_s=GENEROUS, method="milp")
        assert by_labels.seconds == pytest.approx(by_program.seconds, rel=CLOSE)
        compared += 1
    assert compared >= 10


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 0.1, 1e-2]), st.sampled_from(["auto", "dp", "milp"]))
def test_gap_promise(seed, gap, method):
    instance = random_instance(seed)
    optimum = brute_force(instance)
    if optimum is None or np.isinf(optimum):
        return
    solution = solve(instance, gap=gap, time_limit_s=GENEROUS, method=method)
    assert_honest(instance, solution)
    assert solution.status in ("optimal", "within gap")
    assert solution.seconds <= solution.bound * (1 + gap) * (1 + CLOSE)
    assert solution.bound <= optimum * (1 + CLOSE) <= solution.seconds * (1 + 2 * CLOSE)


@pytest.mark.parametrize("labels", [1, 2, 3])
def test_few_labels_never_overstate_the_bound(labels):
    cut = 0
    for seed in range(120):
        instance = random_instance(seed, 1 + seed % 2)
        optimum = brute_force(instance)
        if optimum is None or np.isinf(optimum):
            continue
        trellis = Trellis.of(instance)
        least, smallest = trellis.least_bytes()
        dual = maximise(trellis, smallest, deadline=Deadline(np.inf))
        found = search(trellis, dual, least, gap=0.0, labels=labels, deadline=Deadline(np.inf))
        assert found.bound <= optimum * (1 + CLOSE)
        assert all(path.seconds >= optimum * (1 - CLOSE) for path in found.paths)
        if not found.cut:
            assert found.paths[0].seconds == pytest.approx(optimum, rel=CLOSE, abs=1e-15)
        cut += found.cut
    assert cut > 0


@pytest.mark.parametrize("seed", range(40))
def test_no_time_gives_something_that_fits(seed):
    instance = random_instance(seed)
    optimum = brute_force(instance)
    if optimum is None or np.isinf(optimum):
        return
    solution = solve(instance, gap=0, time_limit_s=0)
    assert_honest(instance, solution)
    assert solution.status in ("optimal", "time limit")
    assert solution.bound <= optimum * (1 + CLOSE)
    if solution.status == "optimal":
        assert solution.seconds == pytest.approx(optimum, rel=CLOSE)


def test_no_time_says_so():
    solution = solve(model_like([200.0, 200.0], 2, 20, 0.5), gap=0, time_limit_s=0)
    assert solution.status == "time limit"
    assert 0 < solution.gap < 1


def test_a_deadline_counts_what_the_thread_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other programs it takes longer on the clock, at most PATIENCE times."""
    clock = {"thread_time": 100.0, "monotonic": 0.0}
    fake = SimpleNamespace(thread_time=lambda: clock["thread_time"], monotonic=lambda: clock["monotonic"])
    monkeypatch.setattr("oallama.solving.deadline.time", fake)
    deadline = Deadline(2.0)
    assert deadline.left_s == 2.0 and not deadline.is_passed
    clock.update(thread_time=101.0, monotonic=2.0)
    assert deadline.left_s == 2.0, "half of a CPU: what is left takes twice as long"
    clock.update(thread_time=102.0, monotonic=4.0)
    assert deadline.is_passed
    waits = Deadline(2.0)
    clock.update(monotonic=clock["monotonic"] + PATIENCE * 2.0 - 1.0)
    assert waits.left_s == 1.0 and not waits.is_passed
    clock["monotonic"] += 1.0
    assert waits.is_passed


# ---- connectivity --------------------------------------------------------------------------------------------------


def trap() -> Instance:
    """Runs of state 2 alone are nearly free, but there is no way there that is worth it."""
    ways = [(0, 0, 5.0, 0), (0, 0, 1.0, 2), (2, 2, 0.1, 0), (0, 2, 100.0, 0), (2, 0, 100.0, 0), (1, 1, 0.0, 0)]
    enter, leave, seconds, nbytes = zip(*ways, strict=True)
    one = LayerClass(
        np.array(enter, np.int16), np.array(leave, np.int16), np.array(seconds), np.array(nbytes, np.int64)[:, None]
    )
    return Instance((one,), (0,) * 5, np.array([5]), (0,))


def test_a_cycle_apart_from_the_walk_is_cut_off():
    trellis = Trellis.of(trap())
    program = _Walks(trellis, 0.0)
    values = program.model.solve(Deadline(GENEROUS)).values
    assert values is not None
    assert list(program.disconnected(values)), "without cuts the cheap cycle is used: the trap works"
    found = solve_milp(trellis, None, gap=0.0, deadline=Deadline(GENEROUS))
    assert found.path is not None
    assert found.path.seconds == pytest.approx(brute_force(trap()))
    assert found.bound == pytest.approx(found.path.seconds)


@pytest.mark.parametrize("method", ["auto", "dp", "milp"])
def test_trap(method):
    assert solve(trap(), gap=0, method=method).seconds == pytest.approx(3 * 5 + 2 * 1)


# ---- dominance -----------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(0, 80), st.integers(0, 3))
def test_dominance_equals_comparing_all_pairs(seed, n, columns):
    rng = np.random.default_rng(seed)
    group, seconds = rng.integers(0, 3, n), rng.integers(0, 8, n).astype(float)
    nbytes = rng.integers(0, 8, (n, columns))
    kept = nondominated(group, seconds, nbytes)

    def dominates(i, j):
        return group[i] == group[j] and seconds[i] <= seconds[j] and (nbytes[i] <= nbytes[j]).all()

    assert (np.diff(group[kept]) >= 0).all()
    assert not any(dominates(i, j) for i in kept for j in kept if i != j)
    assert all(any(dominates(i, j) for i in kept) for j in range(n))


# ---- sizes of real models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.25, 0.75])
@pytest.mark.parametrize(
    ("megabytes", "devices", "layers", "scales"),
    [
        ([14, 3, 14, 70, 70, 70], 2, 64, (1.0,)),
        ([14, 3, 14, 70, 70, 70], 2, 64, (0.8, 0.9, 1.0, 1.1, 1.2)),
        ([14, 14, 3, 3, 800, 800, 800], 2, 94, (1.0,)),
        ([14, 3, 14, 80, 80, 80], 3, 64, (1.0,)),
        ([14, 14, 70, 70, 90], 3, 64, (0.8, 1.0, 1.2)),
    ],
    ids=["dense", "mixed", "moe", "dense-two", "mixed-two"],
)
def test_real_sizes_reach_a_thousandth(megabytes, devices, layers, scales, fraction):
    instance = model_like(megabytes, devices, layers, fraction, scales=scales)
    solution = solve(instance, gap=1e-3, time_limit_s=GENEROUS)
    assert_honest(instance, solution)
    assert solution.gap <= 1e-3
    assert solution.status in ("optimal", "within gap")


def test_same_instance_same_answer():
    instance = model_like([14, 14, 70, 70, 90], 3, 64, 0.5, scales=(0.8, 1.2))
    first, second = (solve(instance, time_limit_s=GENEROUS) for _ in range(2))
    assert first.ways.tolist() == second.ways.tolist()


# ---- bad input -----------------------------------------------------------------------------------------------------


def test_infeasible_names_the_shortage():
    one = replace(layer_like([10.0], 2), nbytes=layer_like([10.0], 2).nbytes + 7)
    with pytest.raises(Infeasible, match=r"accelerator 0: at least 21 bytes are needed and 20 are there \(1 short\)"):
        solve(Instance((one,), (0, 0, 0), np.array([20]), (0,)))


def test_infeasible_together():
    """Each accelerator could hold what the other one holds, but one of them must hold it."""
    one = LayerClass(np.zeros(2, np.int16), np.zeros(2, np.int16), np.ones(2), np.array([[5, 0], [0, 5]]))
    with pytest.raises(Infeasible, match="together"):
        solve(Instance((one,), (0,) * 3, np.array([5, 5]), (0,)))
    assert solve(Instance((one,), (0,) * 3, np.array([5, 10]), (0,))).nbytes.tolist() == [5, 10]


GOOD = LayerClass(np.zeros(2, np.int16), np.zeros(2, np.int16), np.array([1.0, 2.0]), np.array([[1], [0]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": np.array([1.0, np.nan])}, "class 0, way 1: seconds must be finite, not nan"),
        ({"seconds": np.array([1.0, np.inf])}, "not inf"),
        ({"seconds": np.array([-1.0, 1.0])}, "a way through the 2 layers takes -2.0 s: less than nothing"),
        ({"nbytes": np.array([[1], [-2]])}, "way 1: nbytes"),
        ({"nbytes": np.array([[1.5], [2]])}, "nbytes must be whole numbers, not float64"),
        ({"nbytes": np.array([1, 2])}, r"nbytes must have the shape \(2, 1\), not \(2,\)"),
        ({"enter": np.zeros(3, np.int16)}, r"enter must have the shape \(2,\), not \(3,\)"),
        ({"leave": np.array([0, -1], np.int16)}, "way 1: leave"),
        ({"seconds": np.empty(0)}, "at least one way"),
        ({"leave": np.ones(2, np.int16)}, "states left and entered never match"),
    ],
)
def test_bad_class(change, message):
    with pytest.raises(OallamaError, match=message):
        solve(Instance((replace(GOOD, **change),), (0, 0), np.array([5]), (0,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": ()}, "at least one layer"),
        ({"layers": (0, 1)}, "layer 1: expected a class 0..0, not 1"),
        ({"capacity": np.array([1.5])}, "capacity: expected whole bytes"),
        ({"capacity": np.array(5)}, "capacity"),
        ({"start": ()}, "start"),
        ({"start": (-1,)}, "start"),
        ({"start": (3,)}, "never match"),
    ],
)
def test_bad_instance(change, message):
    with pytest.raises(OallamaError, match=message):
        solve(replace(Instance((GOOD,), (0, 0), np.array([5]), (0,)), **change))


@pytest.mark.parametrize("options", [{"gap": -1.0}, {"gap": float("nan")}, {"time_limit_s": -1.0}, {"method": "cp"}])
def test_bad_options(options):
    with pytest.raises(OallamaError, match=next(iter(options))):
        solve(Instance((GOOD,), (0,), np.array([5]), (0,)), **options)


def test_the_solver_prints_nothing() -> None:
    """What `--json` prints goes to programs; highspy 1.16.0 wrote a banner to standard output."""
    program = (
        "import numpy as np; from oallama.solving.deadline import Deadline; from oallama.solving.highs import Program\n"
        "Program(np.ones(2), np.ones(2), np.ones(2, bool), 1.0).solve(Deadline(60.0))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == ""
