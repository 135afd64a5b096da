"""A new allocation for a model that is running: what moves has a price, and what stays keeps its KV cache."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import OallamaError
from ..allocation.allocation import Allocation, check_room, finish
from ..allocation.costs import make_costs
from ..allocation.grouped import solve_grouped
from ..allocation.problem import Problem
from ..allocation.terms import price, route

# A change of a link by less is the processors', not the link's.
LEAST_S = 0.5e-3


@dataclass(frozen=True)
class Move:
    """A layer that changes its device.

    source: the device it was on, None if that one left. weight_bytes: sent from the client, 0 where they are present.
    kv_bytes: carried over from the source; 0 if it left: then the tokens so far must be computed again.
    """

    layer: int
    source: str | None
    target: str
    weight_bytes: int
    kv_bytes: int
    seconds: float


@dataclass(frozen=True)
class Replan:
    """The new allocation, what moves for it, and what it is worth.

    move_s: seconds of all moves, one after another. stay_s: the objective of the allocation as it was, None when it no
    longer can be. lost_kv: layers whose KV cache went with their device.
    """

    allocation: Allocation
    moves: tuple[Move, ...]
    stay_s: float | None

    @property
    def move_s(self) -> float:
        return sum(move.seconds for move in self.moves)

    @property
    def lost_kv(self) -> tuple[int, ...]:
        return tuple(move.layer for move in self.moves if move.source is None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        moves = [vars(move) for move in self.moves]
        return {"allocation": self.allocation.to_dict(), "moves": moves, "move_s": self.move_s, "stay_s": self.stay_s}


def changes(before: Problem, after: Problem, threshold: float = 1.5) -> list[str]:
    """Why a running plan should be reconsidered, one line each: devices that left, links that became worse.

    A link is worse when a token's output is expected to take `threshold` times as long as before (what jitter and loss
    do to it is measured with it). Links that were not measured again count as they were.
    """
    names = {device.name for device in after.devices}
    found = [f"device {device.name} left" for device in before.devices if device.name not in names]
    for source, target in before.network.links:
        if {source, target} <= names and (source, target) in after.network.links:
            old, new = (p.network.link(source, target).mean_s(p.embedding.output_bytes) for p in (before, after))
            if new > threshold * old and new - old > LEAST_S:
                found.append(f"link {source} -> {target}: {new:.3g} s per token, was {old:.3g} s")
    return found


def replan(
    problem: Problem,
    current: Sequence[str],
    *,
    horizon_tokens: int = 1000,
    present: Mapping[str, Collection[int]] | None = None,
    time_limit_s: float = 60.0,
) -> Replan:
    """The allocation that is cheapest over the next `horizon_tokens`, moves included.

    A layer that stays costs nothing to keep. One that moves costs its weights over the link from the client, unless the
    target has them, and its KV cache over the links from its source; layers are moved one after another.

    Args:
        problem: the cluster as it is now.
        current: the device of every layer so far; it may name devices that are no longer in the problem.
        present: {device: layers whose weights it has besides those it computes}, from a server's tensor cache say.

    Raises:
        DoesNotFit, OallamaError: as `allocate` does.
    """
    if len(current) != len(problem.layers) or horizon_tokens < 1:
        raise OallamaError(
            f"current names {len(current)} layers for {horizon_tokens} tokens; "
            f"expected {len(problem.layers)} layers and 1 token or more"
        )
    names = [device.name for device in problem.devices]
    stored = {name: set((present or {}).get(name, ())) for name in names}
    table = [[_move(problem, current[j], j, name, j in stored[name]) for j in range(len(current))] for name in names]
    began = time.monotonic()
    costs = make_costs(problem)
    check_room(problem, costs)
    moving = np.array([[0.0 if move is None else move.seconds for move in row] for row in table]) / horizon_tokens
    outcome = solve_grouped(replace(costs, compute=costs.compute + moving), time_limit_s=time_limit_s)
    allocation = finish(problem, costs, outcome, "replan", began)
    moves = tuple(m for j, name in enumerate(allocation.layers) if (m := table[names.index(name)][j]) is not None)
    stays = set(current) <= set(names) and costs.fits(tuple(names.index(name) for name in current))
    # The bound is one of cost and moves together: what the moves take of it is not the objective's.
    bound = allocation.bound_s - sum(move.seconds for move in moves) / horizon_tokens
    return Replan(replace(allocation, bound_s=bound), moves, price(problem, current).total_s if stays else None)


def _move(problem: Problem, source: str, at: int, target: str, present: bool) -> Move | None:
    if source == target:
        return None
    layer, share, client = problem.layers[at], problem.settings.e_p, problem.client.name
    alive = any(device.name == source for device in problem.devices)
    # What the client computes it reads from its own file.
    weights = 0 if present or target == client else layer.memory_bytes - layer.kv_bytes
    kv = layer.kv_bytes if alive else 0
    seconds = problem.network.link(client, target).transfer_s(weights, share) if weights else 0.0
    if kv:
        seconds += sum(problem.network.link(a, b).transfer_s(kv, share) for a, b in route(problem, source, target))
    return Move(at, source if alive else None, target, weights, kv, seconds)
