"""Mixtures for tests of plans: made-up graphs, traces of skewed routing."""

from __future__ import annotations

import numpy as np

from oallama.data.plan import PlacementPlan
from oallama.data.routing import Routers, RoutingTrace, StageRouting
from oallama.planning import Candidates, Workload, make_plans
from oallama.planning.expert_use import ExpertUse
from support.synthetic import Shape, Speed, graph, profile, space

MOE = Shape(6, 2048, 32, 4, 128, 768, 32000, "q4_K", n_expert=64, n_used=8)
MODEL = graph(MOE)
WORK = Workload(64, 256)
MACHINE = profile(MODEL, cpu=Speed(5e10, 1e12), concurrency=1.0)
UNIFORM = ExpertUse.uniform(MOE.n_expert, MOE.n_used)


def candidates(use: ExpertUse = UNIFORM, budget: str = "40%", planner: str = "auto", machine=MACHINE) -> Candidates:
    return make_plans(space(MODEL, budget, machine=machine, workload=WORK, expert_use=use), planner)


def plan(budget: str, planner: str, use: ExpertUse = UNIFORM) -> PlacementPlan:
    return candidates(use, budget, planner).best


def trace(ids: np.ndarray, n_experts: int) -> RoutingTrace:
    stage = StageRouting.judge(ids.astype(np.uint16), n_experts)
    routers = Routers("qwen3moe", n_experts, "0" * 64)
    return RoutingTrace(
        "now", "m.gguf", "text", routers, tuple(range(len(ids))), 64, {"prefill": stage, "decode": stage}
    )


def skewed(rng: np.random.Generator, n_layers: int, n_tokens: int, n_experts: int, n_used: int) -> np.ndarray:
    """[layers, tokens, used] distinct experts, low ones often, in another order in each layer."""
    scores = rng.gumbel(size=(n_layers, n_tokens, n_experts)) - 1.5 * np.log(np.arange(1, n_experts + 1))
    best = np.argsort(-scores, axis=2)[:, :, :n_used]
    orders = np.array([rng.permutation(n_experts) for _ in range(n_layers)])
    return np.take_along_axis(orders[:, None, :].repeat(n_tokens, 1), best, axis=2)
