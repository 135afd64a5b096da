"""The first use of a model: the plan that is predicted to be fastest is measured beside its strongest rivals.

It takes seconds, so it is done where it is cheap: where loading the plans and running them a few times fits the time
limit. The plan that wins is kept for later starts (plan_cache.py), and what all of them took is learned from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from oallama.base.environment import VERIFY
from oallama.bench.stats import speedup
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.predicted import TIE, describe_request, predicted_times
from oallama.errors import OallamaError
from oallama.loading.autoplan import Considered, PathOrText, Progress
from oallama.loading.learning import keep_runs, trial_of
from oallama.loading.verify import fit_together, verify
from oallama.planning.realisation import TILED
from oallama.planning.uncertainty import risk

DEFAULT_LIMIT_S = 5.0
LOADING_SHARE = 0.05  # of the seconds that loading takes, where that is more
_MOST_ROUNDS = 45
_RIVALS = 2
_HOPELESS = 3.0  # times the plan's request
_STOCK = ("fit", "layers", "fewer-layers", "cpu-moe", "cpu-ffn")
_ALONE = ("cpu", "stock-cpu")
_NAMES = {
    "cpu": "the CPU alone",
    "stock-cpu": "llama.cpp's CPU alone",
    "fit": "llama.cpp's --fit",
    "layers": "llama.cpp's layer split",
}
# What is run, the most telling first: prompt, answer, and tokens in the cache before, at most. No more than the plan's
# own request, which leaves time for more rounds.
_REQUESTS = ((128, 16, 2048), (128, 16, 512), (64, 16, 0), (32, 8, 0))
# A worker's start, and bytes per second of a load from memory: both slow, so that the limit holds.
_START_S, _LOAD_BYTES_S = 0.5, 1.0e9
_LEAST_RUNS = 2  # of each plan: a warm-up and one round
# Another plan wins when it is faster by _CLEAR, or by TIE with an interval that says so, after more than _FEW rounds.
_CLEAR, _FEW = 0.10, 3


@dataclass(frozen=True)
class Trial:
    """How the first use is measured.

    limit_s: seconds that all of it may take, `verify.PATIENCE` times as many beside other work that comes and goes;
    None: DEFAULT_LIMIT_S or LOADING_SHARE of loading, or what OALLAMA_VERIFY says. say: takes what `choose` tells.
    """

    limit_s: float | None = None
    say: Callable[[str], None] = lambda text: None

    def choose(
        self, path: PathOrText, considered: Considered, n_threads: int, progress: Progress | None = None
    ) -> tuple[PlacementPlan, str]:
        """The fastest plan by measurement, with `measured` filled in; the predicted one where that takes too long.

        The second is a line that tells what was measured, or why nothing was; "" where nothing was to be.
        """
        best = considered.with_terms(considered.found.best)
        weights = sum(tensor.nbytes for tensor in best.tensors.values())
        limit_s = _limit(self.limit_s, weights)
        if limit_s <= 0:
            return best, ""
        # Times of a noisy profile are too long by about as much, and there a measurement is needed most.
        rivals = _rivals(considered)
        if not rivals:
            return best, ""
        entrants, request = _affordable(best, rivals, limit_s * (1 + min(considered.space.noise, 1.0)))
        if not entrants:
            seconds = _estimate([best, *rivals[:1]], _REQUESTS[-1])
            return best, (
                f"not measured beside llama.cpp's own placement: about {seconds:.0f} s, of {limit_s:.0f} s allowed; "
                "`oallama plan --verify 3` measures"
            )
        plans = [best, *(considered.with_terms(plan) for plan in entrants[1:])]
        n_prompt, n_generate, max_depth = request
        try:
            done = verify(
                path,
                plans,
                n_threads=n_threads,
                rounds=_MOST_ROUNDS,
                workload=(n_prompt, n_generate),
                max_depth=max_depth,
                limit_s=limit_s,
                progress=progress,
            )
        except OallamaError as error:
            return best, f"not measured: {error}"
        keep_runs(n_threads, [trial_of(plan) for plan in done])
        winner = choose_measured(best.hash, done)
        return winner, describe(winner, done)


def choose_measured(predicted: str, done: Sequence[PlacementPlan]) -> PlacementPlan:
    """The plan to keep of those measured, with the others' request times in `measured["rivals"]`.

    predicted: hash of the plan that was chosen by prediction. Another takes its place only where it is faster by more
    than noise is. Where the rounds were unsteady, the safest of the plans has that first place (`uncertainty.risk`).
    """
    ran = [plan for plan in done if plan.measured and "error" not in plan.measured]
    times = {plan.hash: plan.measured["request_s"] for plan in ran if plan.measured}
    fastest = min(ran, key=lambda plan: times[plan.hash])
    steady = (fastest.measured or {})["steady"]
    first = [plan for plan in ran if plan.hash == predicted] if steady else [min(ran, key=risk)]
    winner = next((plan for plan in first if not _is_faster(fastest, plan)), fastest)
    rivals = {_name(plan): times[plan.hash] for plan in ran if plan is not winner}
    return winner.with_measured({**(winner.measured or {}), "rivals": rivals})


def _is_faster(plan: PlacementPlan, other: PlacementPlan) -> bool:
    """Whether a measured plan is faster than another by more than noise is."""
    measured, slower = plan.measured or {}, other.measured or {}
    if slower["request_s"] > measured["request_s"] * (1 + _CLEAR):
        return True
    if min(measured["rounds"], slower["rounds"]) <= _FEW:
        return False
    ratio = speedup(slower["rounds_s"], measured["rounds_s"], average=np.median if measured["steady"] else np.mean)
    return ratio is not None and ratio.value > 1 + TIE and ratio.low > 1


def describe(winner: PlacementPlan, done: Sequence[PlacementPlan]) -> str:
    """One line: what was measured at first use, and what won."""
    measured = winner.measured or {}
    others = [f"{name} {seconds / measured['request_s']:.2f}x of that" for name, seconds in measured["rivals"].items()]
    least, most = measured["range_s"]
    failed = [f"{_name(plan)} failed" for plan in done if plan.measured and "error" in plan.measured]
    rounds = f"{measured['rounds']} round{'s' * (measured['rounds'] > 1)}"
    rounds += "" if measured["steady"] else " beside work that comes and goes"
    found = f"{_name(winner)} {measured['request_s']:.3g} s ({least:.3g} to {most:.3g})"
    beside = "; ".join([*others, *failed])
    return (
        f"measured at first use, {rounds}: {found} for {describe_request(winner)}; {beside}. {_name(winner)} is taken"
    )


def _rivals(considered: Considered) -> list[PlacementPlan]:
    """llama.cpp's own placements that differ from the plan, the fastest prediction first.

    The CPU alone is the second: it needs no device, so noise harms it least. It is left out where it is hopeless. It is
    taken as a plan has it, perhaps with our kernels. When the plan is the CPU alone itself, its rivals are all plans
    with a device; with our kernels llama.cpp's CPU is the first.
    """
    best, plans = considered.found.best, considered.found.plans
    if _is_alone(best):
        with_device = sorted((p for p in plans.values() if not _is_alone(p)), key=_seconds)
        stock = [plans[n] for n in ("stock-cpu",) if n in plans and _own_kernels(best)]
        return [*stock, *with_device]
    seen, found = {_same(best)}, []
    for plan in sorted((plans[n] for n in _STOCK if n in plans and not _is_alone(plans[n])), key=_seconds):
        if _same(plan) not in seen:
            seen.add(_same(plan))
            found.append(plan)
    alone = sorted((plans[n] for n in _ALONE if n in plans), key=_seconds)[:1]
    alone = [plan for plan in alone if _seconds(plan) < _HOPELESS * _seconds(best)]
    return [*found[:1], *alone, *found[1:]]


def _seconds(plan: PlacementPlan) -> float:
    return plan.predicted.request_s


def _is_alone(plan: PlacementPlan) -> bool:
    """Whether a plan uses no accelerator."""
    return all(tensor.device == HOST for tensor in plan.tensors.values()) and {*plan.layers} == {HOST}


def _same(plan: PlacementPlan) -> tuple[object, ...]:
    return plan.to_backend_map(), plan.context.n_ubatch, plan.context.flash_attn


def _affordable(
    best: PlacementPlan, rivals: Sequence[PlacementPlan], limit_s: float
) -> tuple[list[PlacementPlan], tuple[int, int, int]]:
    """The rivals and the request that fit the limit: a telling request before many rivals.

    Plans that fit into memory together take turns many times; others are loaded anew for every round. So two rivals are
    measured only where all fit together, else the CPU alone before others. Without plans where nothing fits.
    """
    alone = [plan for plan in rivals if _is_alone(plan)][:1]
    sets = [[*rivals[:_RIVALS]]] if fit_together([best, *rivals[:_RIVALS]]) else []
    sets += [alone, [*rivals[:1]]]
    prompt, answer = best.predicted.workload
    for n_prompt, n_generate, depth in _REQUESTS:
        request = min(n_prompt, prompt or n_prompt), max(2, min(n_generate, answer)), depth
        for others in sets:
            if others and _estimate([best, *others], request) <= limit_s:
                return [best, *others], request
    return [], _REQUESTS[-1]


def _estimate(plans: Sequence[PlacementPlan], request: tuple[int, int, int]) -> float:
    """Seconds of loading these plans and running each a few times."""
    n_prompt, n_generate, max_depth = request
    loads = runs = 0.0
    for plan in plans:
        loads += _START_S + sum(tensor.nbytes for tensor in plan.tensors.values()) / _LOAD_BYTES_S
        depth = min(max_depth, int(plan.planner["params"].get("depth", 0)))
        ttft, tpot = predicted_times(plan, n_prompt, n_generate, depth)
        fill, _ = predicted_times(plan, depth, 2) if depth else (0.0, None)
        runs += _LEAST_RUNS * ((ttft or 0.0) + n_generate * (tpot or 0.0)) + (fill or 0.0)
    return (loads if fit_together(plans) else _LEAST_RUNS * loads) + runs


def _limit(given: float | None, weights: int) -> float:
    """Seconds that measuring may take. Raises OallamaError for a variable that is no number."""
    if given is not None:
        return given
    if (text := VERIFY.get()) is not None:
        try:
            return float(text)
        except ValueError:
            raise OallamaError(f"{VERIFY.name} is {text!r}; expected seconds, 0 for no measurement") from None
    return max(DEFAULT_LIMIT_S, LOADING_SHARE * weights / _LOAD_BYTES_S)


def _name(plan: PlacementPlan) -> str:
    name = str(plan.planner["name"])
    own = _own_kernels(plan) if name == "cpu" else []
    return _NAMES.get(name, name) + (f" with oallama's {' and '.join(own)}" if own else "")


def _own_kernels(plan: PlacementPlan) -> list[str]:
    """What our kernels compute of a plan, by a person's words."""
    attention = ["attention"] if plan.context.attention != "ggml" else []
    tiled = any(tensor.realisation == TILED for tensor in plan.tensors.values())
    return attention + ["products"] * tiled
