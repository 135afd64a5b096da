"""A plan against unpatched llama.cpp at the same device bytes: the engines of one measured comparison."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from oallama import runtime
from oallama.bench import Engine, LoadParams, all_on_device, cpu_only, find_baseline_lib, layer_split
from oallama.bench.planned import planned
from oallama.engine import Settings
from oallama.plan import HOST, PlacementPlan
from oallama.rpc import LocalRpcServer


@dataclass(frozen=True)
class Rivals:
    """A plan and stock llama.cpp's own placement under the same budget (planner "layers"); None: no baselines."""

    plan: PlacementPlan
    layers: PlacementPlan | None
    label: str = ""

    def engines(
        self, settings: Settings, endpoints: tuple[str, ...], local_rpc: bool, stack: ExitStack, everything: bool = True
    ) -> list[Engine]:
        """The layer split, the plan and the CPU alone; with `everything` also all on the device.

        endpoints: RPC servers of the user, shared by all engines. local_rpc: each engine gets a loopback server of its own,
        which lives as long as `stack`.
        """

        def params() -> LoadParams:
            servers = endpoints
            if local_rpc:
                server = stack.enter_context(LocalRpcServer(threads=settings.n_threads, register=False))
                servers = (*endpoints, server.endpoint)
            context = self.plan.context
            return LoadParams(
                n_ctx=context.n_ctx,
                n_batch=context.n_batch,
                n_ubatch=context.n_ubatch,
                n_threads=settings.n_threads,
                flash_attn=context.flash_attn,
                type_k=context.type_k,
                type_v=context.type_v,
                rpc_servers=servers,
                devices=tuple(name for name in self.plan.devices if name != HOST),
            )

        ours = planned(self.plan, runtime.lib_dir(), params(), placement=f"plan {self.label or self.plan.hash[:8]}")
        if self.layers is None:
            return [ours]
        lib = find_baseline_lib()
        n_gpu_layers = int(self.layers.planner["params"].get("n_gpu_layers", 0))
        predicted = {name: m.total for name, m in self.layers.predicted.devices.items() if name != HOST}
        rivals = [layer_split(params(), n_gpu_layers, predicted, lib), ours, cpu_only(params(), lib)]
        return [*rivals, all_on_device(params(), lib)] if everything else rivals


