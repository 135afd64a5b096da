"""How fast a loaded model ran, by llama.cpp's own counters, beside what its plan predicted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from oallama.data.curves import piecewise_linear
from oallama.data.plan import PlacementPlan
from oallama.engine import runtime
from oallama.profiling.drift import ADVICE, TOLERANCE, describe_change
from oallama.views.placement import render_run_times

if TYPE_CHECKING:
    from rich.console import RenderableType

# Fewer tokens than this are mostly the first ones, which touch memory for the first time.
MIN_TOKENS = 16


@dataclass(frozen=True)
class RunTimes:
    """What a context computed so far, in seconds; print it with rich for a table.

    llama.cpp counts a decode call of one token as generation, any other as prompt; sampling is in neither. Predictions
    are for the depth the cache has now: exact for a single request, an estimate after several. None: nothing of the
    kind was computed, or nothing was planned.

    Attributes:
        prefill_s: of all n_prompt tokens together.
        tpot_s: mean of the n_generate tokens.
    """

    n_prompt: int
    prefill_s: float | None
    predicted_prefill_s: float | None
    n_generate: int
    tpot_s: float | None
    predicted_tpot_s: float | None

    def drift(self, tolerance: float = TOLERANCE) -> str | None:
        """What to do when TPOT differs from the prediction by more than `tolerance` (a share) either way, else None.

        A few tokens say nothing: None below MIN_TOKENS.
        """
        if not self.tpot_s or not self.predicted_tpot_s or self.n_generate < MIN_TOKENS:
            return None
        change = describe_change(self.tpot_s / self.predicted_tpot_s, tolerance)
        if change is None:
            return None
        return (
            f"generation is {change} than predicted. Unless other programs are busy or the number of threads is not "
            f"the profile's, the profile has drifted: {ADVICE}, and plan again"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values; "drift" is the text or None."""
        return {**asdict(self), "drift": self.drift()}

    def __rich__(self) -> RenderableType:
        return render_run_times(self)


def times_of(context: int, plan: PlacementPlan | None) -> RunTimes | None:
    """Read the counters of a live context (its llama_context's address); None before any run or with no_perf=True.

    They count from the load, or from the last reset; nothing is reset here.
    """
    llama_cpp = runtime.llama_cpp()
    counted = llama_cpp.llama_perf_context(context)
    # llama.cpp shows one token where there was none.
    n_prompt = counted.n_p_eval if counted.t_p_eval_ms > 0 else 0
    n_generate = counted.n_eval if counted.t_eval_ms > 0 else 0
    if not n_prompt and not n_generate:
        return None
    used = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(context), 0) + 1
    return RunTimes(
        n_prompt=n_prompt,
        prefill_s=counted.t_p_eval_ms / 1e3 if n_prompt else None,
        predicted_prefill_s=_predicted_prefill(plan, n_prompt, used) if plan and n_prompt else None,
        n_generate=n_generate,
        tpot_s=counted.t_eval_ms / 1e3 / n_generate if n_generate else None,
        predicted_tpot_s=_predicted_tpot(plan, n_generate, used) if plan and n_generate else None,
    )


def _predicted_prefill(plan: PlacementPlan, n_prompt: int, used: int) -> float | None:
    """Of `n_prompt` tokens at the speed of one prompt that fills the cache no further than it is filled now.

    None below the shortest prompt the plan predicts: a few tokens are faster than any of its points.
    """
    longest = min(n_prompt, used)
    if longest < min(plan.predicted.ttft_s, default=longest + 1):
        return None
    return piecewise_linear(sorted(plan.predicted.ttft_s.items()), longest) * n_prompt / longest


def _predicted_tpot(plan: PlacementPlan, n_generate: int, used: int) -> float | None:
    """At the depth half-way through the tokens that may be in the cache now."""
    if not plan.predicted.tpot_s:
        return None
    return piecewise_linear(sorted(plan.predicted.tpot_s.items()), used - min(n_generate, used) / 2)
