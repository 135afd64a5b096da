"""Whose kernels compute on the devices of a cluster, ggml's or ours: by measured times, for a request."""

from __future__ import annotations

from collections.abc import Collection

from oallama.data.operators import OUTPUT, OperatorGraph, TensorInfo
from oallama.data.plan import HOST
from oallama.data.profile import Profile
from oallama.data.workload import Workload
from oallama.planning.realisation import PLAIN, REPACKED, TILED, Realisations, Weight, choose

from ..allocation.passes import prompt_passes


def kind_of(tensor: TensorInfo) -> str:
    """What decides how fast a weight is multiplied: its type and shape."""
    return f"{tensor.type} {'x'.join(map(str, tensor.ne))}"


def tiled_kinds(graph: OperatorGraph, profile: Profile, device: str, request: Workload, n_ubatch: int) -> set[str]:
    """The kinds of weights that the device multiplies faster by our kernels (docs/products.md)."""
    tokens = [(request.n_parallel, float(max(1, request.n_generate - 1)))]
    prompts = [(each.n_tokens, float(each.count)) for each in prompt_passes(request, n_ubatch, 0)]
    usual = REPACKED if device == HOST else PLAIN
    found = set()
    for op in graph.targets(max(graph.tiers)):
        tensor = graph.tensor[op.weight or ""]
        rows = [*tokens, *([(1, float(request.n_parallel))] if op.weight == OUTPUT else prompts)]
        weight = Weight(op.op, tensor.type, tensor.ne, op.n_used)
        if choose(weight, rows, profile, device, usual=usual).realisation == TILED:
            found.add(kind_of(tensor))
    return found


def tiled_weights(graph: OperatorGraph, kinds: Collection[str]) -> set[str]:
    """The weights of these kinds that are multiplied; those that are looked up are not."""
    multiplied = {op.weight for op in graph.targets(max(graph.tiers)) if op.weight}
    return {name for name in multiplied if kind_of(graph.tensor[name]) in kinds}


def realised(graph: OperatorGraph, kinds: Collection[str]) -> Realisations:
    """For the cost model: weights of these kinds are tiled, the others as llama.cpp has them."""
    names = dict.fromkeys(tiled_weights(graph, kinds), TILED)
    return Realisations(names, names, names)
