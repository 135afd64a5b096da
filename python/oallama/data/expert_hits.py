"""How often a device that has k of a layer's experts has the one that a token wants. Pure functions on traces.

A trace is `ids` [layers, tokens, used]: the experts that each layer's router chose for each token. A *use* is one of
them. All policies are judged on the second half of the tokens, and all k at once:

* static: the k experts used most in the first half; nothing moves.
* lru, lfru: k slots. A use hits if its expert is in a slot before the token; a token's uses are simultaneous. Behind
  the token the slots keep the best k of what they had and what was used. LRU keeps what was used last, LFRU what has
  the highest score: uses so far / (tokens since the last one + 1) (arXiv 2608.07911). What is not kept was computed
  elsewhere, so slots need not take it. They start empty, before the first half. A *cold miss*, the first use of an
  expert in the trace, is a miss at every k, so that k = all is 1 less the cold misses of the second half.
* belady: the best that k slots can do, by foresight (Belady 1966), when they may begin the second half with any k
  experts. Behind each token they keep the k that are used next. It bounds the others at every k.

All slots' contents are nested: k slots hold what k - 1 hold, and one more (Mattson et al. 1970). So one list of experts
in order, in which a use has a position, gives every k.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint16]  # [layers, tokens, used]
Rates = NDArray[np.float64]
Ints = NDArray[np.int64]

POLICIES = ("static", "lru", "lfru", "belady")


def hit_rates(ids: Ids, n_experts: int, policy: str) -> Rates:
    """[layers, n_experts]: the share of the second half's uses that k experts hit, for k = 1, 2, .., n_experts.

    ids: at least 2 tokens, the router's first choice first. Zero layers give zero rows.
    """
    whole = ids.astype(np.int64)
    half = whole.shape[1] // 2
    positions = _POSITIONS[policy](whole, n_experts, half)
    # A position that no k reaches counts as n_experts.
    counted = np.array([np.bincount(row.ravel(), minlength=n_experts + 1)[:n_experts] for row in positions])
    uses = max(1, (whole.shape[1] - half) * whole.shape[2])
    return counted.reshape(len(whole), n_experts).cumsum(axis=1) / uses


def uniform_rates(n_experts: int) -> Rates:
    """[n_experts]: what any policy but foresight hits where every expert is as likely as the others, each time."""
    return np.arange(1, n_experts + 1) / n_experts


def counts(ids: Ids, n_experts: int) -> Ints:
    """[layers, n_experts]: uses of each expert."""
    found = [np.bincount(layer.ravel(), minlength=n_experts) for layer in ids.astype(np.int64)]
    return np.array(found, dtype=np.int64).reshape(len(ids), n_experts)


def union_widths(n_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, .., as far as the tokens go."""
    return tuple(1 << power for power in range(n_tokens.bit_length()))


def union_sizes(ids: Ids, n_experts: int) -> Rates:
    """[layers, widths]: distinct experts that batches of n tokens use, n as `union_widths`.

    The mean over the trace's consecutive batches of n tokens; what is left at its end does not count.
    """
    rows = []
    for layer in ids.astype(np.int64):
        used = np.zeros((len(layer), n_experts), dtype=bool)
        np.put_along_axis(used, layer, True, axis=1)
        row = []
        while len(used):
            row.append(used.sum(axis=1).mean())
            whole = len(used) // 2 * 2
            used = used[0:whole:2] | used[1:whole:2]
        rows.append(row)
    return np.array(rows, dtype=np.float64).reshape(len(ids), len(union_widths(ids.shape[1])))


def uniform_union(n_experts: int, n_used: int, n_tokens: int) -> float:
    """Distinct experts that n tokens use where each chooses `n_used` of `n_experts` at random."""
    return n_experts * (1 - (1 - n_used / n_experts) ** n_tokens)


# ---- positions of uses, [layers, tokens of the second half, used]; n_experts for those that no k hits --------------


def _static(ids: Ints, n_experts: int, half: int) -> Ints:
    learned = np.array([np.bincount(layer.ravel(), minlength=n_experts) for layer in ids[:, :half]])
    ranked = np.argsort(-learned.reshape(len(ids), n_experts), axis=1, kind="stable")
    return _looked_up(_inverse(ranked), ids[:, half:])


def _lru(ids: Ints, n_experts: int, half: int) -> Ints:
    """LRU's k slots hold the k experts used last, so a position is the number of experts used since."""
    uses, found = _Uses(ids, n_experts), []
    for token in range(ids.shape[1]):
        if token >= half:
            last = _looked_up(uses.last, ids[:, token])
            later = (uses.last[:, None, :] > last[:, :, None]).sum(axis=2)
            found.append(np.where(last < 0, n_experts, later))
        uses.add(token)
    return _stacked(found, ids)


def _lfru(ids: Ints, n_experts: int, half: int) -> Ints:
    order = _Order(np.broadcast_to(np.arange(n_experts), (len(ids), n_experts)))
    uses, found = _Uses(ids, n_experts), []
    for token in range(ids.shape[1]):
        now = ids[:, token]
        if token >= half:
            found.append(np.where(_looked_up(uses.last, now) < 0, n_experts, order.positions(now)))
        uses.add(token)
        order.keep(now, uses.scores(token))
    return _stacked(found, ids)


def _belady(ids: Ints, n_experts: int, half: int) -> Ints:
    judged = ids[:, half:]
    following, upcoming = _following(judged, n_experts)
    order = _Order(np.argsort(upcoming, axis=1, kind="stable"))
    found = []
    for token in range(judged.shape[1]):
        now = judged[:, token]
        found.append(order.positions(now))
        np.put_along_axis(upcoming, now, following[:, token], axis=1)
        order.keep(now, -upcoming)
    return _stacked(found, ids)


_POSITIONS: dict[str, Callable[[Ints, int, int], Ints]] = {
    "static": _static,
    "lru": _lru,
    "lfru": _lfru,
    "belady": _belady,
}


class _Uses:
    """What was used so far: each expert's last use and number of uses, [layers, experts].

    last: token * used + rank from behind, so that no two are equal; -1: never.
    """

    def __init__(self, ids: Ints, n_experts: int) -> None:
        self._ids = ids
        self.last = np.full((len(ids), n_experts), -1, dtype=np.int64)
        self.number = np.zeros((len(ids), n_experts), dtype=np.int64)

    def add(self, token: int) -> None:
        now, n_used = self._ids[:, token], self._ids.shape[2]
        latest = np.broadcast_to(token * n_used + np.arange(n_used)[::-1], now.shape)
        np.put_along_axis(self.last, now, latest, axis=1)
        np.put_along_axis(self.number, now, _looked_up(self.number, now) + 1, axis=1)

    def scores(self, token: int) -> Rates:
        """LFRU's behind the token; of equal ones the last used is higher. 0: never used.

        Two quotients of whole numbers below 2^14 that differ do so by more than 2^-28 of themselves, so the tie-break
        of at most 2^-29 does not change their order, and its own steps are far above a double's.
        """
        n_used = self._ids.shape[2]
        age = token - self.last // n_used
        recent = (self.last + 1) / ((token + 1) * n_used)
        scores: Rates = self.number / (age + 1) * (1 + recent * 2.0**-29)
        return scores


class _Order:
    """Every layer's experts in an order of which the first k are those in k slots, for every k."""

    def __init__(self, first: Ints) -> None:
        self._order = np.array(first)
        self._columns = np.arange(self._order.shape[1])
        self._rows = np.arange(len(self._order))

    def positions(self, experts: Ints) -> Ints:
        """[layers, used] of experts [layers, used]."""
        return _looked_up(_inverse(self._order), experts)

    def keep(self, experts: Ints, priority: Rates | Ints) -> None:
        """Keep the best k, by priority [layers, experts], of what k slots have and of `experts` [layers, used]."""
        for rank in range(experts.shape[1]):
            self._insert(experts[:, rank], priority)

    def _insert(self, expert: Ints, priority: Rates | Ints) -> None:
        """Down the order the better of two stays and the other one is carried on, to the place that `expert` leaves."""
        order, rows = self._order, self._rows
        if not len(rows):
            return
        held = np.take_along_axis(priority, order, axis=1)
        worst = np.empty_like(held)  # of what was met so far: what is carried to each place
        worst[:, 0] = priority[rows, expert]
        worst[:, 1:] = held[:, :-1]
        np.minimum.accumulate(worst, axis=1, out=worst)
        place = (order == expert[:, None]).argmax(axis=1)
        swapped = (held < worst) & (self._columns < place[:, None])
        swapped[rows, place] = True
        ends = np.cumsum(swapped.sum(axis=1))
        carried = np.roll(order[swapped], 1)
        carried[np.concatenate([[0], ends[:-1]])] = expert
        order[swapped] = carried


def _following(ids: Ints, n_experts: int) -> tuple[Ints, Ints]:
    """The token at which each use's expert is used next [layers, tokens, used], and each expert's first [layers, ..].

    Never is the number of tokens.
    """
    upcoming = np.full((len(ids), n_experts), ids.shape[1], dtype=np.int64)
    following = np.empty_like(ids)
    for token in reversed(range(ids.shape[1])):
        following[:, token] = _looked_up(upcoming, ids[:, token])
        np.put_along_axis(upcoming, ids[:, token], token, axis=1)
    return following, upcoming


def _looked_up(table: Ints, ids: Ints) -> Ints:
    """table [layers, experts] at ids [layers, ..]."""
    return np.take_along_axis(table, ids.reshape(len(ids), prod(ids.shape[1:])), axis=1).reshape(ids.shape)


def _inverse(order: Ints) -> Ints:
    """The position of each expert."""
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(order.shape[1]), order.shape), axis=1)
    return places


def _stacked(found: list[Ints], ids: Ints) -> Ints:
    return np.stack(found, axis=1) if found else np.empty((len(ids), 0, ids.shape[2]), dtype=np.int64)
