"""MTP heads in a plan: all of them on one device, with their KV cache, beside the weights of the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..data.operators import OperatorGraph
from ..data.plan import HOST, ContextSettings, DeviceMemory, PlacementPlan, TensorPlacement

CACHE_TYPE = "f16"  # llama-server's default for all that guesses
_GUESSES = "guesses"


def heads_context(context: ContextSettings) -> ContextSettings:
    """The context that llama-server makes for the heads beside the model's own."""
    return replace(context, type_k=CACHE_TYPE, type_v=CACHE_TYPE, n_outputs_max=context.n_seq_max)


def with_heads(plan: PlacementPlan, heads: OperatorGraph, device: str) -> PlacementPlan:
    """The plan of a model, with its heads on a device. Bytes are as before.

    An embedding of their own is on the CPU, and so are matrices that no operator reads: heads of models with sparse
    attention have an indexer's, and llama.cpp computes their attention over the whole cache.

    heads: graph of the heads' context, which lists the weights of model and heads.
    """
    ops = heads.operators(min(heads.tiers))
    rows, read = {op.weight for op in ops if op.op == "GET_ROWS"}, {op.weight for op in ops}
    more = {}
    for t in heads.tensors:
        # Of some architectures llama.cpp loads parts of the heads with the model, whether they guess or not.
        if t.name not in plan.tensors or (t.layer is not None and t.layer >= heads.n_layer):
            unread = t.name not in read and sum(n > 1 for n in t.ne) > 1
            home = HOST if t.name in rows or unread else device
            more[t.name] = TensorPlacement.whole(t.type, t.nbytes, home, "host" if home == HOST else "resident")
    layers = [*plan.layers]
    layers[heads.n_layer : heads.n_layer_all] = [device] * heads.n_heads
    return replace(
        plan,
        model=dict(heads.model),
        devices=plan.devices if device in plan.devices else (device, *plan.devices),
        layers=tuple(layers),
        tensors={**plan.tensors, **more},
    )


def with_guesses(plan: PlacementPlan, n: int) -> PlacementPlan:
    """The plan with the number of tokens that its heads guess at a time."""
    return replace(plan, planner={**plan.planner, "params": {**plan.planner["params"], _GUESSES: n}})


def guesses_of(plan: PlacementPlan) -> int:
    """Tokens that the plan's heads guess at a time; 0 for a plan without heads."""
    return int(plan.planner["params"].get(_GUESSES, 0))


def counted(plan: PlacementPlan, held: Mapping[str, DeviceMemory], reserved: Mapping[str, int]) -> PlacementPlan:
    """The plan with the bytes of its heads in its prediction, and in its budgets what was reserved for them."""
    devices = dict(plan.predicted.devices)
    for name, m in held.items():
        own = devices.get(name, DeviceMemory(0, 0, 0))
        devices[name] = DeviceMemory(own.weights + m.weights, own.kv + m.kv, own.compute + m.compute, own.pool + m.pool)
    budgets = {name: plan.budgets.get(name, 0) + reserved.get(name, 0) for name in {**plan.budgets, **reserved}}
    return replace(plan, predicted=replace(plan.predicted, devices=devices), budgets=budgets)
