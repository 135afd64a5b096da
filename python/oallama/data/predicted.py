"""Predictions beside measurements: a plan's times at another workload, and how far a prediction is off."""

from __future__ import annotations

from .curves import piecewise_linear
from .plan import PlacementPlan

# Predictions this close are equal: taken is the safer plan, with less traffic or with llama.cpp's own attention.
TIE = 0.02
CAUSES_BETWEEN = ("transfers", "switches")


def predicted_times(
    plan: PlacementPlan, n_prompt: int, n_generate: int, depth: int = 0
) -> tuple[float | None, float | None]:
    """TTFT of an empty cache and TPOT half-way through an answer behind `depth` tokens, in s; None: not predicted.

    Linear between the plan's points; beyond the last one the slope goes on.
    """
    ttft, tpot = sorted(plan.predicted.ttft_s.items()), sorted(plan.predicted.tpot_s.items())
    return (
        piecewise_linear(ttft, n_prompt) if ttft else None,
        piecewise_linear(tpot, depth + n_prompt + n_generate / 2) if tpot else None,
    )


def traffic(plan: PlacementPlan) -> float:
    """Predicted seconds of a request that pass between devices."""
    return sum(parts.get(cause, 0.0) for parts in plan.predicted.parts.values() for cause in CAUSES_BETWEEN)


def unusual_form(plan: PlacementPlan) -> tuple[bool, bool]:
    """Whether attention is unfused, and whether it is not computed by llama.cpp's kernels: its default is (no, no)."""
    return plan.context.flash_attn == "off", plan.context.attention != "ggml"


def describe_request(plan: PlacementPlan) -> str:
    """The request that a plan was made for, in words."""
    (n_prompt, n_generate), params = plan.predicted.workload, plan.planner["params"]
    depth, parallel = params.get("depth", 0), params.get("n_parallel", 1)
    words = f"{n_prompt} + {n_generate} tokens" + (f" behind {depth}" if depth else "")
    return f"{words}, for {parallel} sequences at once" if parallel > 1 else words


def error_percent(predicted: float | None, measured: float | None) -> float | None:
    """How far a prediction is off, in percent of what was measured; positive: predicted too much."""
    if predicted is None or not measured:
        return None
    return 100.0 * (predicted - measured) / measured
