"""Whose kernels compute on the devices of a cluster: chosen by measured times, and really used there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oallama.cluster.pipeline.client import pipeline_plan
from oallama.cluster.pipeline.kernels import kind_of, tiled_kinds, tiled_weights
from oallama.cluster.pipeline.measure import read_model
from oallama.data.entries import DeviceInfo, OperatorTime
from oallama.data.operators import OUTPUT
from oallama.data.plan import HOST
from oallama.data.profile import Profile
from oallama.data.workload import Workload
from oallama.engine.load_settings import Settings
from oallama.engine.rpc import LocalRpcServer
from oallama.llama import Llama
from oallama.loading import autoplan

REQUEST = Workload(32, 9)


def profile_of(graph, device: str, gain: dict[int, float]) -> Profile:
    """Every product takes a second plain, and `gain` of it tiled, by tokens."""
    found = {}
    for tier in graph.tiers:
        for op in graph.targets(tier):
            tensor = graph.tensor[op.weight]
            for n in {1, op.n_tokens, tier}:
                for realisation, seconds in (("plain", 1.0), ("tiled", gain[n])):
                    key = (device, op.op, tensor.type, tensor.ne, op.n_used, n, realisation)
                    found[key] = OperatorTime(
                        device, op.op, tensor.type, tensor.ne, op.n_used, n, seconds, realisation=realisation
                    )
    info = DeviceInfo(device, "", "", 0, "")
    return Profile(created="", fingerprint={}, devices=(info,), operators=tuple(found.values()), attention=())


@pytest.mark.parametrize(
    ("gain", "layers", "head"),
    [
        ({1: 0.5, 32: 0.5, 512: 0.5}, True, True),
        ({1: 1.0, 32: 0.97, 512: 0.97}, False, False),
        # Eight tokens of answer and a prompt of one micro-batch: the prompt alone is too little, for the head nothing.
        ({1: 1.0, 32: 0.1, 512: 0.1}, True, False),
    ],
)
def test_a_kind_of_weights_is_tiled_where_the_request_gains(
    gain: dict[int, float], layers: bool, head: bool, tiny: Callable[..., Path]
) -> None:
    graph = read_model(tiny("llama"), Settings(n_ctx=512), REQUEST).graph
    kinds = tiled_kinds(graph, profile_of(graph, "RPC0", gain), "RPC0", REQUEST, 512)
    weights = tiled_weights(graph, kinds)
    assert ("blk.0.ffn_up.weight" in weights) == layers
    assert (OUTPUT in weights) == head
    # The embedding has the output matrix's kind, and its rows are looked up.
    assert kind_of(graph.tensor["token_embd.weight"]) == kind_of(graph.tensor[OUTPUT])
    assert "token_embd.weight" not in weights


def logits(model: Path, layers_on: str, devices: list[str], tiled: bool) -> np.ndarray:
    """Of the last row of a prompt, and of a token behind it."""
    settings = Settings(n_ctx=256, flash_attn="on")
    graph = autoplan.read_graph(model, settings)
    context = autoplan.context_of(autoplan.resolve(settings, graph.n_ctx_train))
    kinds = {kind_of(t) for t in graph.tensors if t.layer is not None}
    on = {layers_on: kinds} if tiled else {}
    plan = pipeline_plan(graph, context, [layers_on] * graph.n_layer, devices, on)
    llm = Llama(str(model), plan=plan, verbose=False, n_threads=1, n_threads_batch=1)
    found = []
    for tokens in (list(range(1, 41)), [7]):
        llm.eval(tokens)
        found.append(np.array(llm._ctx.get_logits_ith(-1)[: llm.n_vocab()]))
    llm.close()
    return np.array(found)


@pytest.mark.parametrize("file_type", ["Q8_0", "Q4_0"])
def test_an_rpc_server_multiplies_tiled_weights_by_our_kernels(file_type: str, tiny: Callable[..., Path]) -> None:
    """The same bits as tiled weights of this host, and not those of plain ones."""
    model = tiny("llama", file_type)
    with LocalRpcServer(1) as server:
        (name,) = server.devices
        there = logits(model, name, [name], tiled=True)
        plain = logits(model, name, [name], tiled=False)
    here = logits(model, HOST, [], tiled=True)
    assert np.array_equal(there, here)
    assert not np.array_equal(there, plain) and np.abs(there - plain).max() < 0.05 * np.abs(plain).max()
