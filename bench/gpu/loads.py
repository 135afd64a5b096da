"""Devices, plans and loads of the GPU suite's programs.

A device is a name of ggml's ("CUDA0"), or "RPC": a loopback RPC server, which stands for the GPU in a rehearsal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from common import Log

from oallama.bench import Engine, LoadParams
from oallama.bench.engines import Worker
from oallama.bench.planned import planned
from oallama.bench.results import Sample
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine import runtime
from oallama.engine.rpc import LocalRpcServer

# Threads of the engine before spin for about half a second after its last token (ggml's polling).
SETTLE_S = 0.7


@cache
def planning_device(device: str) -> str:
    """The device's name in this process, for planning; "RPC" is started once."""
    if device != "RPC":
        return device
    _server.append(LocalRpcServer())
    return _server[0].devices[0]


_server: list[Any] = []  # lives as long as the process


def on_device(device: str, params: LoadParams, stack: ExitStack) -> LoadParams:
    """For an engine in a process of its own: on the device alone, which for "RPC" is a new server."""
    if device != "RPC":
        return replace(params, devices=(device,))
    server = stack.enter_context(LocalRpcServer(register=False))
    return replace(params, devices=("RPC0",), rpc_servers=(server.endpoint,))


def engine_of(plan: PlacementPlan, device: str, params: LoadParams, stack: ExitStack) -> Engine:
    """The patched engine obeying a plan, or without a map in llama.cpp's own placement for a stock plan."""
    name = plan.planner["name"]
    used = any(d != HOST for d in plan.devices)
    there = on_device(device, params, stack) if used else replace(params, devices=())
    if name not in ("layers", "fewer-layers", "fit"):
        return planned(plan, runtime.lib_dir(), there, name)
    chosen, context = plan.planner["params"], plan.context
    overrides = tuple((pattern, HOST) for pattern, _ in chosen.get("overrides", ()))
    flags = replace(
        there, n_ctx=context.n_ctx, flash_attn=context.flash_attn, n_gpu_layers=int(chosen["n_gpu_layers"]),
        override_tensor=overrides,
    )  # fmt: skip
    return Engine(name, runtime.lib_dir(), flags)


def prompt_of(n: int) -> list[int]:
    """Token ids that every vocabulary has; no two neighbours alike."""
    return [300 + (i * 137 + i // 700) % 700 for i in range(n)]


def one_load(engine: Engine, model: Path, prompts: Sequence[int], n_generate: int, **load: Any) -> dict[str, Any]:
    """Load an engine, run a first prompt, then every prompt once. `load` is for Running.

    Returns load_s, first_ttft_s (of the first prompt after the load, `at` tokens), ttft_s by prompt, tpot_s, tokens
    (of that run), device_bytes, gpu_process_bytes. Raises OallamaError.
    """
    with Running(engine, model, prompts, n_generate, **load) as running:
        return running.sample() | running.end()


class Running:
    """An engine that is loaded and has run a first prompt, for samples. TPOT is taken behind the prompt of `at` tokens.

    at: default the middle one of `prompts`; depth: tokens in the cache before a prompt; states: folder of filled
    caches. Raises OallamaError.
    """

    def __init__(
        self,
        engine: Engine,
        model: Path,
        prompts: Sequence[int],
        n_generate: int,
        *,
        depth: int = 0,
        at: int | None = None,
        states: Path | None = None,
    ) -> None:
        self._engine, self._prompts, self._n_generate, self._depth = engine, prompts, n_generate, depth
        self._at = at if at is not None else sorted(prompts)[len(prompts) // 2]
        self._folder = None if states is None else str(states)
        self._worker = Worker(engine, 300, 300)
        try:
            n_ctx = context_of(depth + max(prompts) + n_generate)
            self._loaded = self._worker.load(model, engine.params.resolved(n_ctx))
            self._first_ttft_s = self._run(self._at, 2).ttft_s
        except BaseException:
            self._worker.stop()
            raise

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.stop()

    def _run(self, n_prompt: int, n_generate: int) -> Sample:
        return self._worker.run(0, prompt_of(self._depth), prompt_of(n_prompt), n_generate, self._folder)

    def sample(self) -> dict[str, Any]:
        """Every prompt once."""
        ttft: dict[int, float] = {}
        for n in self._prompts:
            run = self._run(n, self._n_generate if n == self._at else 2)
            ttft[n] = run.ttft_s
            if n == self._at:
                behind = run
        return {
            "load_s": self._loaded.load_s[0], "first_ttft_s": self._first_ttft_s, "ttft_s": ttft,
            "tpot_s": behind.tpot_s, "prompt": self._at, "n_generate": self._n_generate, "depth": self._depth,
            "token_times_s": list(behind.token_times_s), "tokens": list(behind.tokens),
            "flash_attn": self._engine.params.flash_attn,
        }  # fmt: skip

    def end(self) -> dict[str, Any]:
        """The process's memory at its end."""
        self._worker.observe(self._loaded)
        self._loaded.memory = self._worker.unload()
        return {
            "device_bytes": self._loaded.device_bytes(),
            "gpu_process_bytes": self._loaded.gpu_process_bytes,
        }


def predicted(plan: PlacementPlan) -> dict[str, Any]:
    """What a plan promises, and its bytes.

    predicted_ttft_s is of an empty cache; predicted_parts_s of the request that the plan is made for, at its depth.
    """
    return {
        "plan": plan.hash[:8], "planner": plan.planner["name"], "predicted_ttft_s": dict(plan.predicted.ttft_s),
        "predicted_tpot_s": dict(plan.predicted.tpot_s), "predicted_request_s": plan.predicted.request_s,
        "predicted_parts_s": plan.predicted.parts,
        "predicted_bytes": {name: memory.buffers for name, memory in plan.predicted.devices.items()},
        "predicted_pool_bytes": {name: memory.pool for name, memory in plan.predicted.devices.items()},
        "params": {k: v for k, v in plan.planner["params"].items() if isinstance(v, (int, float, str, bool))},
    }  # fmt: skip


def distinct(plans: Mapping[str, PlacementPlan], stock: Iterable[str] = ("layers", "fit")) -> dict[str, str]:
    """For every name the first one with the same table and engine: equal plans are measured once."""
    seen: dict[tuple[str, str, bool], str] = {}
    return {
        name: seen.setdefault((plan.to_backend_map(), str(plan.context), name in stock), name)
        for name, plan in plans.items()
    }


def context_of(n_tokens: int) -> int:
    """The smallest context for so many tokens; llama.cpp rounds up to 256."""
    return -(-n_tokens // 256) * 256


def measured(plan: PlacementPlan, model: Path, options: Any, prompts: Sequence[int], **load: Any) -> dict[str, Any]:
    """One load of a plan's engine on --device; `load` is for one_load."""
    with ExitStack() as stack:
        engine = placed(plan, options, stack)
        return one_load(engine, model, prompts, options.n_generate, **load)


def jobs(
    plans: Mapping[str, PlacementPlan],
    model: Path,
    options: Any,
    prompts: Sequence[int],
    stack: ExitStack,
    **load: Any,
) -> dict[str, Callable[[], dict[str, Any]]]:
    """For Log.rounds, one per plan: a load each; with --keep the first one's engine stays until the stack is closed."""
    if not options.keep:
        return {name: partial(measured, plan, model, options, prompts, **load) for name, plan in plans.items()}
    running: dict[str, Running] = {}

    def sample(name: str) -> dict[str, Any]:
        if name not in running:
            engine = placed(plans[name], options, stack)
            running[name] = stack.enter_context(Running(engine, model, prompts, options.n_generate, **load))
        time.sleep(SETTLE_S)
        return running[name].sample()

    return {name: partial(sample, name) for name in plans}


def placed(plan: PlacementPlan, options: Any, stack: ExitStack) -> Engine:
    """A plan's engine on --device."""
    return engine_of(plan, options.device, LoadParams(load_mode="none", n_threads=options.threads), stack)


def add_plans(
    log: Log, plans: Mapping[str, PlacementPlan], failed: Mapping[str, str], **same: Any
) -> dict[str, PlacementPlan]:
    """A line for each plan and for each that was not made; returns those that differ."""
    alike = distinct(plans)
    for name, plan in plans.items():
        log.add("plan", **same, name=name, same_as=alike[name], **predicted(plan))
    for name, error in failed.items():
        log.add("plan", **same, name=name, error=error)
    return {name: plan for name, plan in plans.items() if alike[name] == name}
