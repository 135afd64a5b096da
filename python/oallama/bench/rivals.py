"""A plan against llama.cpp at the same device bytes: the engines of one measured comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ..base.printing import say
from ..data.budget import format_bytes
from ..data.plan import HOST, PlacementPlan
from ..engine import device_list, runtime
from ..engine.load_settings import LOAD_MODES, Settings
from ..engine.rpc import LocalRpcServer
from .baselines import all_on_device, cpu_forms, cpu_only, fitted, layer_split
from .engines import Engine, LoadParams
from .planned import planned

# Drivers and library workspaces take their part beside the buffers.
_SHARE_OF_FREE = 0.9


@dataclass(frozen=True)
class Rivals:
    """A plan, and stock llama.cpp's own placements in the same device bytes: "layers", perhaps "fit"; or none.

    on_cpu: for a plan without devices, llama.cpp's CPU in both forms of attention in their place.
    """

    plan: PlacementPlan
    stock: Mapping[str, PlacementPlan]
    label: str = ""
    on_cpu: bool = False

    def engines(
        self, settings: Settings, endpoints: tuple[str, ...], local_rpc: bool, stack: ExitStack, everything: bool = True
    ) -> list[Engine]:
        """The layer split, --fit, the plan and the CPU alone; with `everything` also all on the device.

        Stock engines have llama.cpp's own kernels of attention. They run in the context that was asked for, the plan
        in its own; all read the file as the plan's does.
        endpoints: RPC servers of the user,
        shared by all engines. local_rpc: each engine gets a loopback server of its own, which lives as long as `stack`.
        """

        def params(plan: PlacementPlan) -> LoadParams:
            servers = endpoints
            if local_rpc:
                servers = (*endpoints, stack.enter_context(LocalRpcServer(register=False)).endpoint)
            return LoadParams(
                n_ctx=plan.context.n_ctx,
                n_batch=plan.context.n_batch,
                n_ubatch=plan.context.n_ubatch,
                n_threads=settings.n_threads,
                flash_attn=plan.context.flash_attn,
                type_k=plan.context.type_k,
                type_v=plan.context.type_v,
                rpc_servers=servers,
                devices=_accelerators(plan),
                load_mode=LOAD_MODES[self.plan.context.use_mmap],
            )

        label = f"plan {self.label or self.plan.hash[:8]}"
        ours = planned(self.plan, runtime.lib_dir(), params(self.plan), placement=label)
        if self.on_cpu:
            return [*cpu_forms(_asked(settings, LOAD_MODES[self.plan.context.use_mmap])), ours]
        if not self.stock:
            return [ours]
        layers = self.stock["layers"]
        engines = [layer_split(params(layers), _n_gpu_layers(layers), _device_bytes(layers))]
        if fit := self.stock.get("fit"):
            overrides = fit.planner["params"]["overrides"]
            engines.append(fitted(params(fit), _n_gpu_layers(fit), overrides, _device_bytes(fit)))
        engines += [ours, cpu_only(params(layers))]
        return [*engines, all_on_device(params(layers))] if everything else engines


def _asked(settings: Settings, load_mode: str) -> LoadParams:
    return LoadParams(
        n_ctx=settings.n_ctx,
        n_batch=settings.n_batch,
        n_ubatch=settings.n_ubatch,
        n_threads=settings.n_threads,
        type_k=settings.type_k,
        type_v=settings.type_v,
        load_mode=load_mode,
    )


def _accelerators(plan: PlacementPlan) -> tuple[str, ...]:
    return tuple(name for name in plan.devices if name != HOST)


def _n_gpu_layers(plan: PlacementPlan) -> int:
    return int(plan.planner["params"]["n_gpu_layers"])


def _device_bytes(plan: PlacementPlan) -> dict[str, int]:
    return {name: plan.predicted.devices[name].buffers for name in _accelerators(plan)}


def interleave_for(asked: str, engines: Sequence[Engine], plan: PlacementPlan) -> str:
    """The way to interleave: "reload" instead of "loaded" where the device cannot hold all engines at once."""
    name = plan.devices[0]
    if asked != "loaded" or name == HOST:
        return asked
    whole = sum(tensor.nbytes for tensor in plan.tensors.values())
    used = [e.predicted_bytes.get(name, 0) if e.predicted_bytes else whole for e in engines if e.params.devices]
    free = device_list.device(name).memory_free
    if sum(used) <= free * _SHARE_OF_FREE:
        return asked
    say(f"{name} cannot hold {len(used)} engines at once ({format_bytes(free)} are free): they take turns")
    return "reload"
