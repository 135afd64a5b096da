"""The measured choice: the candidates a planner thinks best, timed against each other on the machine itself.

A prediction ranks plans to within its error; plans closer than that are told apart only by running them. The timing is
the benchmark's (bench/sweep.py): worker processes, warm-up dropped, rounds interleaved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from oallama.base.host_memory import available_bytes
from oallama.bench.engines import Engine, LoadParams
from oallama.bench.planned import planned
from oallama.bench.results import Result
from oallama.bench.stats import Average, average_for, expected_range, speedup
from oallama.bench.sweep import Progress, Sweep, run_bench
from oallama.data.entries import QUIET_CPUS
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.predicted import TIE, predicted_times
from oallama.data.workload import context_of_each
from oallama.engine import device_list, runtime
from oallama.errors import OallamaError
from oallama.profiling.other_work import OtherWork

MAX_PROMPT = 512
MAX_GENERATE = 32
_LEAST_ROUNDS = 5
_NARROW = 0.05  # width of an interval of a ratio
PATIENCE = 3.0  # times the limit, where rounds are unsteady
MAX_DEPTH = 2048  # filling a deep cache takes long; beyond it the predictions extrapolate
# Drivers and library workspaces take their part beside the buffers.
_SHARE_OF_FREE = 0.9


def verify(
    path: str | os.PathLike[str],
    plans: Sequence[PlacementPlan],
    *,
    rpc_servers: Sequence[str] = (),
    n_threads: int = 0,
    rounds: int = 3,
    workload: tuple[int, int] | None = None,
    progress: Progress | None = None,
    lib_dir: str | os.PathLike[str] | None = None,
    max_depth: int = MAX_DEPTH,
    limit_s: float | None = None,
) -> list[PlacementPlan]:
    """Run every plan and return them fastest first, each with `measured` filled in.

    A plan for several sequences at once generates with as many: tpot_s is of a step of all of them.

    All plans stay loaded and take turns run by run, so that a drift of the machine hits all alike. Where two of them
    use RPC devices (a server serves one client at a time) or a device cannot hold all at once, each plan is loaded,
    warmed up, run and unloaded in every round, the order changing from round to round. Measuring all rounds of one plan
    before the next would save loads, but a drift between them would count for one plan alone.

    Args:
        plans: candidates for one model and workload, with their context settings.
        rpc_servers: HOST:PORT in the order that gave their devices the names the plans use (RPC0, RPC1, ...); none
            given: those registered in this process. Nothing else may use them meanwhile.
        n_threads: CPU threads; 0: all this process may use.
        rounds: measured runs of each plan.
        workload: (prompt tokens, generated tokens) to run; default: that of the plans, at most MAX_PROMPT and
            MAX_GENERATE.
        progress: called with (done, total, what) before every run.
        lib_dir: folder of the engine's libllama; default: the installed one.
        max_depth: tokens in the cache before a run, at most; the plans' own depth if that is less.
        limit_s: no further round begins after that many seconds, nor once it is clear which plan is fastest; `rounds`
            is then the most of them. Where rounds are unsteady (`stats.is_unsteady`) because other work comes and goes,
            it may take PATIENCE times as long. A plan that gives no answer for four times as long fails.

    Returns:
        The plans by measured request time, those that failed last. `measured` holds: ttft_s, tpot_s (medians),
        request_s (TTFT + (n - 1) * TPOT for the plan's own workload, see `request_seconds`: the median, or the mean
        where rounds of a plan are unsteady), steady (whether none is), range_s (what a later request is expected to
        take, `stats.expected_range`), spread ((max - min) / median of the request's seconds), rounds (how many),
        rounds_s (the request's seconds in each, those of one round at the same place in all plans), n_prompt and
        n_generate as run, interleave ("loaded" or "reload"), device_bytes (bytes per accelerator, as llama.cpp logged
        them), depth_run, others_cpus (CPUs that other work kept busy meanwhile) and created; or error in place of all
        but others_cpus, for a plan that could not be loaded or run.

    Raises:
        OallamaError: when all plans fail, for plans of different workloads, no plans, or a bad argument.

    >>> best, *others = verify("model.gguf", candidates)
    """
    if not plans:
        raise OallamaError("no plans to verify; expected at least one")
    if len({plan.predicted.workload for plan in plans}) > 1:
        raise OallamaError("plans made for different workloads cannot be compared; make them with the same one")
    n_prompt, n_generate = workload or _short_workload(plans)
    servers = tuple(rpc_servers) or _registered_servers()
    folder = lib_dir or runtime.lib_dir()
    depth = max(0, min(_depth(plans[0]), max_depth, _room(plans) - n_prompt - n_generate))
    sweep = Sweep(
        prompts=(n_prompt,),
        depths=(depth,),
        gens=(n_generate,),
        repeats=rounds,
        warmup=1,
        interleave="loaded" if fit_together(plans) else "reload",
        limit_s=None if limit_s is None else PATIENCE * limit_s,
        enough=None if limit_s is None else _enough_within(limit_s),
    )
    wait_s = 1800.0 if limit_s is None else 4 * limit_s
    measured: list[dict[str, Any]] = [{} for _ in plans]
    engines: dict[int, Engine] = {}
    for i, plan in enumerate(plans):
        batch = int(plan.planner["params"].get("n_parallel", 1))
        params = LoadParams(n_threads=n_threads, rpc_servers=servers if _uses_rpc(plan) else (), n_seq_max=batch)
        try:
            engines[i] = replace(planned(plan, folder, params, name=_name(i, plan)), optional=True)
        except OallamaError as error:  # a plan that no table can express
            measured[i] = {"error": str(error)}
    if engines:
        with OtherWork() as others:
            results = run_bench(path, [*engines.values()], sweep, progress, load_timeout_s=wait_s, run_timeout_s=wait_s)
        average = _average(results)
        for i, result in zip(engines, results, strict=True):
            entry = {"error": result.error} if result.error else _measured(plans[i], result, average, others.cpus)
            entry |= {} if result.error else {"interleave": sweep.interleave}
            measured[i] = {**entry, "others_cpus": round(others.cpus, 3)}
    done = [plan.with_measured(entry) for plan, entry in zip(plans, measured, strict=True)]
    errors = [entry["error"] for entry in measured if "error" in entry]
    if len(errors) == len(plans):
        raise OallamaError(f"none of {len(plans)} plans could be measured; the first: {errors[0]}")
    return sorted(done, key=_rank)


def request_seconds(
    plan: PlacementPlan, ttft_s: float, tpot_s: float, n_prompt: int, n_generate: int, depth: int = 0
) -> float:
    """Seconds of the plan's own workload, from what was measured at (n_prompt, n_generate) behind `depth` tokens.

    Measured times are scaled by the ratio of the plan's predictions for the two workloads: a longer prompt costs more,
    and so does a deeper cache. Without predictions TTFT is scaled by prompt tokens and TPOT is not. A workload without
    a prompt has no TTFT; a workload measured as it is, is not scaled.
    """
    own_prompt, own_generate = plan.predicted.workload
    ttft, tpot = predicted_times(plan, n_prompt, n_generate, depth)
    own_ttft, own_tpot = predicted_times(plan, own_prompt, own_generate, _depth(plan))
    ttft_s *= own_ttft / ttft if own_prompt and ttft and own_ttft else own_prompt / n_prompt
    tpot_s *= own_tpot / tpot if tpot and own_tpot else 1.0
    return ttft_s + (own_generate - 1) * tpot_s


def _enough_within(limit_s: float) -> Callable[[Sequence[Result]], bool]:
    """Ends a measurement at the limit or when it is clear; with unsteady rounds only after the limit and when clear."""
    end = time.monotonic() + limit_s

    def enough(results: Sequence[Result]) -> bool:
        is_late, is_clear = time.monotonic() >= end, _is_clear(results)
        return is_late and is_clear if _average(results) is np.mean else is_late or is_clear

    return enough


def _average(results: Sequence[Result]) -> Average:
    return average_for([result.values("e2e_s") for result in results if not result.error and result.samples])


def _is_clear(results: Sequence[Result]) -> bool:
    """Whether the fastest engine is told from the others, or is as fast as they are, after five rounds or more."""
    alive = [result.values("e2e_s") for result in results if not result.error]
    if len(alive) < 2 or min(map(len, alive)) < _LEAST_ROUNDS:
        return len(alive) < 2
    average = _average(results)
    first, *others = sorted(alive, key=average)
    ratios = [speedup(other, first, average=average) for other in others]
    return all(ratio and (ratio.low > 1 + TIE or ratio.high - ratio.low < _NARROW) for ratio in ratios)


def _depth(plan: PlacementPlan) -> int:
    """Tokens in the cache before the request that the plan was made for."""
    return int(plan.planner["params"].get("depth", 0))


def _short_workload(plans: Sequence[PlacementPlan]) -> tuple[int, int]:
    """The plans' workload, capped, in the smallest of their contexts; TPOT takes two tokens at least."""
    n_prompt, n_generate = plans[0].predicted.workload
    n_generate = max(2, min(n_generate, MAX_GENERATE))
    return max(1, min(n_prompt, MAX_PROMPT, _room(plans) - n_generate)), n_generate


def _room(plans: Sequence[PlacementPlan]) -> int:
    """Tokens of a sequence in the smallest context."""
    return min(context_of_each(plan.context.n_ctx, plan.context.n_seq_max) for plan in plans)


def _measured(plan: PlacementPlan, result: Result, average: Average, others_cpus: float) -> dict[str, Any]:
    assert result.loaded is not None
    n_prompt, n_generate = result.cell.prompt, result.cell.gen
    ttft, tpot = result.values("ttft_s"), result.values("tpot_s")
    requests = [
        request_seconds(plan, *times, n_prompt, n_generate, result.cell.depth) for times in zip(ttft, tpot, strict=True)
    ]
    return {
        "ttft_s": float(np.median(ttft)),
        "tpot_s": float(np.median(tpot)),
        "request_s": float(average(requests)),
        "steady": average is np.median,
        "range_s": [*expected_range(requests, others_cpus > QUIET_CPUS)],
        "spread": (max(requests) - min(requests)) / float(np.median(requests)),
        "rounds": len(requests),
        "rounds_s": [round(seconds, 6) for seconds in requests],
        "n_prompt": n_prompt,
        "n_generate": n_generate,
        "depth_run": result.cell.depth,
        "device_bytes": result.loaded.device_bytes(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _rank(plan: PlacementPlan) -> tuple[bool, float]:
    assert plan.measured is not None
    return "error" in plan.measured, plan.measured.get("request_s", 0.0)


def _name(i: int, plan: PlacementPlan) -> str:
    return f"plan {i + 1} ({plan.planner['name']} {plan.hash[:8]})"


def _uses_rpc(plan: PlacementPlan) -> bool:
    return any(name.startswith("RPC") for name in plan.devices)


def _registered_servers() -> tuple[str, ...]:
    """Endpoints of this process's RPC devices, in the order of their names; ggml describes such a device by its own."""
    found = [d.description for d in device_list.devices() if d.backend.startswith("RPC")]
    return tuple(dict.fromkeys(found))


def fit_together(plans: Sequence[PlacementPlan]) -> bool:
    """Whether all plans can be loaded at the same time."""
    if sum(map(_uses_rpc, plans)) > 1:
        return False
    free = {d.name: d.memory_free for d in device_list.devices()}
    if (on_host := available_bytes()) is not None:  # ggml calls all of the host's memory free
        free[HOST] = on_host
    needed: dict[str, int] = {}
    for plan in plans:
        for name, memory in plan.predicted.devices.items():
            needed[name] = needed.get(name, 0) + memory.total
    return all(needed[name] <= free[name] * _SHARE_OF_FREE for name in needed if name in free)
