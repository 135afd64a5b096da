"""Policies on routing traces, against simulations of sets of experts, and Belady's against all there is to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.data.expert_hits import (
    POLICIES,
    counts,
    hit_rates,
    uniform_rates,
    uniform_union,
    union_sizes,
    union_widths,
)

Layer = Sequence[Sequence[int]]  # the experts of each token


def rates(tokens: Layer, n_experts: int, policy: str) -> list[float]:
    return [float(r) for r in hit_rates(np.array([tokens], dtype=np.uint16), n_experts, policy)[0]]


# ---- independent forms ---------------------------------------------------------------------------------------------


def simulated(tokens: Layer, n_experts: int, k: int, policy: str) -> float:
    """One k, one layer, sets of experts."""
    half = len(tokens) // 2
    if policy == "static":
        learned = [e for token in tokens[:half] for e in token]
        best = set(sorted(range(n_experts), key=lambda e: (-learned.count(e), e))[:k])
        return share(e in best for token in tokens[half:] for e in token)
    first = 0
    slots: set[int] = set()
    if policy == "belady":
        first = half
        slots = set(sorted(range(n_experts), key=lambda e: next_use(tokens, e, half))[:k])
    hits = []
    for now in range(first, len(tokens)):
        if now >= half:
            hits += [e in slots for e in tokens[now]]
        kept = sorted(slots | set(tokens[now]), key=lambda e: PRIORITY[policy](tokens, e, now), reverse=True)
        slots = set(kept[:k])
    return share(hits)


def share(hits: Any) -> float:
    found = [*hits]
    return sum(found) / len(found)


def next_use(tokens: Layer, expert: int, since: int) -> int:
    return next((t for t in range(since, len(tokens)) if expert in tokens[t]), len(tokens))


def last_use(tokens: Layer, expert: int, now: int) -> tuple[int, int]:
    token = next(t for t in range(now, -1, -1) if expert in tokens[t])
    return token, -list(tokens[token]).index(expert)


def lfru(tokens: Layer, expert: int, now: int) -> tuple[Fraction, tuple[int, int]]:
    last = last_use(tokens, expert, now)
    uses = sum(expert in tokens[t] for t in range(now + 1))
    return Fraction(uses, now - last[0] + 1), last


PRIORITY: dict[str, Callable[[Layer, int, int], Any]] = {
    "lru": last_use,
    "lfru": lfru,
    "belady": lambda tokens, expert, now: -next_use(tokens, expert, now + 1),
}


def best_of_all(tokens: Layer, n_experts: int, k: int) -> int:
    """Hits of the best of all ways to fill k slots, from any beginning."""
    half = len(tokens) // 2
    reached = {frozenset(slots): 0 for slots in combinations(range(n_experts), k)}
    for token in tokens[half:]:
        behind: dict[frozenset[int], int] = {}
        for slots, hits in reached.items():
            now = hits + len(slots & set(token))
            for kept in combinations(sorted(slots | set(token)), k):
                behind[frozenset(kept)] = max(now, behind.get(frozenset(kept), 0))
        reached = behind
    return max(reached.values())


@st.composite
def traces(draw: st.DrawFn, most_experts: int = 9, most_tokens: int = 24) -> tuple[list[list[int]], int]:
    n_experts = draw(st.integers(1, most_experts))
    n_used = draw(st.integers(1, n_experts))
    token = st.permutations(range(n_experts)).map(lambda order: order[:n_used])
    return draw(st.lists(token, min_size=2, max_size=most_tokens)), n_experts


# ---- tests ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(traces())
def test_every_k_is_as_simulated(drawn: tuple[list[list[int]], int]) -> None:
    tokens, n_experts = drawn
    for policy in POLICIES:
        expected = [simulated(tokens, n_experts, k, policy) for k in range(1, n_experts + 1)]
        assert rates(tokens, n_experts, policy) == pytest.approx(expected), policy


@settings(max_examples=60)
@given(traces(most_experts=5, most_tokens=9))
def test_foresight_is_the_best_there_is(drawn: tuple[list[list[int]], int]) -> None:
    tokens, n_experts = drawn
    uses = (len(tokens) - len(tokens) // 2) * len(tokens[0])
    found = rates(tokens, n_experts, "belady")
    assert found == pytest.approx([best_of_all(tokens, n_experts, k) / uses for k in range(1, n_experts + 1)])


@settings(max_examples=150)
@given(traces(most_experts=12, most_tokens=60))
def test_bounds(drawn: tuple[list[list[int]], int]) -> None:
    tokens, n_experts = drawn
    half = len(tokens) // 2
    seen: set[int] = {e for token in tokens[:half] for e in token}
    cold = len({e for token in tokens[half:] for e in token} - seen)
    uses = (len(tokens) - half) * len(tokens[0])
    by_policy = {policy: rates(tokens, n_experts, policy) for policy in POLICIES}
    for policy, found in by_policy.items():
        assert all(0 <= a <= b + 1e-12 for a, b in zip(found, [*found[1:], 1.0], strict=True)), policy
        assert all(a <= b + 1e-12 for a, b in zip(found, by_policy["belady"], strict=True)), policy
        all_of_them = 1 - cold / uses if policy in ("lru", "lfru") else 1.0
        assert found[-1] == pytest.approx(all_of_them), policy


def test_a_hand_made_trace() -> None:
    """Four experts, one used; the second half is 0 1 0 2 0 3."""
    tokens = [[e] for e in (0, 0, 0, 1, 1, 2, 0, 1, 0, 2, 0, 3)]
    assert rates(tokens, 4, "static") == pytest.approx([3 / 6, 4 / 6, 5 / 6, 1])
    assert rates(tokens, 4, "lru") == pytest.approx([0, 2 / 6, 5 / 6, 5 / 6])  # 3 is a cold miss
    assert rates(tokens, 4, "belady") == pytest.approx([3 / 6, 4 / 6, 5 / 6, 1])


def test_a_cycle_defeats_lru_until_it_fits() -> None:
    tokens = [[t % 4] for t in range(40)]
    assert rates(tokens, 4, "lru") == [0, 0, 0, 1]
    assert rates(tokens, 4, "belady")[2] > 0.6 and rates(tokens, 4, "static") == [0.25, 0.5, 0.75, 1]


def test_a_change_of_topic_is_followed_by_caches_alone() -> None:
    """Eight experts take turns, four tokens a round, then eight others: 16 rounds each.

    LRU misses each new expert once. LFRU also misses it until its score is above an old one's: with 4 uses, the last
    one 3 tokens ago, it is 4/4, and that of an old one with 16, 16 tokens ago, is 16/17. So it misses 4 of 16 rounds.
    """
    tokens = [[t % 4, 4 + t % 4] for t in range(64)] + [[8 + t % 4, 12 + t % 4] for t in range(64)]
    assert rates(tokens, 16, "static")[7] == 0
    assert rates(tokens, 16, "lru")[7] == 15 / 16
    assert rates(tokens, 16, "lfru")[7] == 12 / 16


def test_random_choices_hit_as_uniform_routing_says() -> None:
    rng = np.random.default_rng(3)
    ids = np.argsort(rng.random((2, 4000, 16)), axis=2)[:, :, :4].astype(np.uint16)
    for policy in ("static", "lru", "lfru"):
        assert hit_rates(ids, 16, policy) == pytest.approx(np.tile(uniform_rates(16), (2, 1)), abs=0.03), policy
    for n, found in zip(union_widths(4000)[:6], union_sizes(ids, 16).T, strict=False):
        assert found == pytest.approx([uniform_union(16, 4, n)] * 2, abs=0.3)


def test_layers_do_not_meet() -> None:
    rng = np.random.default_rng(4)
    ids = np.argsort(rng.random((3, 50, 8)), axis=2)[:, :, :3].astype(np.uint16)
    for policy in POLICIES:
        alone = np.concatenate([hit_rates(ids[i : i + 1], 8, policy) for i in range(3)])
        assert np.array_equal(hit_rates(ids, 8, policy), alone), policy
        assert hit_rates(ids[:0], 8, policy).shape == (0, 8)


def test_unions_and_counts_are_counted() -> None:
    tokens = [[0, 1], [1, 2], [0, 1], [5, 4], [1, 0]]
    ids = np.array([tokens], dtype=np.uint16)
    assert union_widths(5) == (1, 2, 4)
    assert union_sizes(ids, 6).tolist() == [[2, (3 + 4) / 2, 5]]
    assert counts(ids, 6).tolist() == [[3, 4, 1, 0, 1, 1]]


def test_uniform_unions_are_expected_values() -> None:
    """Of 5 experts two tokens use 2 each: by all pairs of pairs."""
    pairs = [*combinations(range(5), 2)]
    mean = sum(len({*a, *b}) for a in pairs for b in pairs) / comb(5, 2) ** 2
    assert uniform_union(5, 2, 2) == pytest.approx(mean)
