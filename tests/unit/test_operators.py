"""The operator parser's data: views seen through, targets, tied output, attention shapes, JSON."""

from __future__ import annotations

from typing import Any

import pytest

from oallama.data.operators import AttentionShape, OperatorGraph, TensorInfo, kind_of, layer_of
from oallama.errors import OallamaError
from support.synthetic import SMALL, Shape, graph, raw_graph


def by_name(model: OperatorGraph, tier: int = 1):
    return {op.name: op for op in model.operators(tier)}


def test_names():
    assert (layer_of("blk.12.ffn_up.weight"), kind_of("blk.12.ffn_up.weight")) == (12, "ffn_up")
    assert (layer_of("output.weight"), kind_of("output.weight")) == (None, "output")
    assert kind_of("blk.0.attn_q.bias") == "attn_q.bias"
    assert TensorInfo.make("blk.1.ffn_up.weight", "f16", [4, 2], 16).ne == (4, 2)


def test_views_are_seen_through():
    model = graph()
    ops = model.operators(1)
    assert not {"VIEW", "RESHAPE", "PERMUTE"} & {op.op for op in ops}
    assert [op.index for op in ops] == list(range(len(ops)))
    named = by_name(model)
    query = named["blk.0.attn_q.weight"]
    (rope,) = (ops[c] for c in query.consumers)
    assert rope.op == "ROPE" and rope.producers == (query.index,)
    attention = named["fa-0"]
    assert attention.producers == (rope.index,)
    assert attention.leaves == ("cache_k_l0", "cache_v_l0") and attention.touches_cache
    assert [ops[c].name for c in attention.consumers] == ["blk.0.attn_output.weight"]
    for op in ops:
        assert all(op.index in ops[p].consumers for p in op.producers)


def test_targets_and_weights():
    model = graph()
    targets = model.targets(1)
    assert len(targets) == 7 * SMALL.n_layer + 1
    assert targets[-1].weight == "output.weight"
    named = by_name(model, 512)
    assert named["blk.1.ffn_up.weight"].n_tokens == 512
    norm = named["blk.0.attn_norm.weight-0"]
    assert norm.weight == "blk.0.attn_norm.weight" and not norm.is_target and norm.layer == 0
    assert named["inp_embd"].weight == "token_embd.weight" and not named["inp_embd"].is_target


def test_tied_output_is_a_tensor_of_its_own():
    model = graph(Shape(tied=True))
    assert model.tied_output
    assert model.targets(1)[-1].weight == "output.weight"
    assert model.tensor["output.weight"].nbytes == model.tensor["token_embd.weight"].nbytes
    assert model.weights_bytes == sum(t.nbytes for t in model.tensors) - model.tensor["output.weight"].nbytes
    assert not graph().tied_output


@pytest.mark.parametrize("fused", [True, False])
def test_attention_shapes(fused):
    model = graph(Shape(fused=fused))
    assert model.attention == (AttentionShape(4, 2, 16, 16),) * SMALL.n_layer


def test_experts():
    model = graph(Shape(n_expert=8, n_used=2))
    up = by_name(model, 512)["ffn_up_exps.weight"]
    assert (up.op, up.n_tokens, up.n_used, up.is_target) == ("MUL_MAT_ID", 512, 2, True)


def test_json_round_trip():
    model = graph(Shape(tied=True, n_expert=4))
    assert OperatorGraph.from_json(model.to_json()) == model


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "oallama.graph/0"}', '{"schema": "oallama.graph/1"}'])
def test_bad_json(text):
    with pytest.raises(OallamaError, match="delete it") as error:
        OperatorGraph.from_json(text)
    assert "\n" not in str(error.value)


def test_missing_tier():
    with pytest.raises(OallamaError, match="no tier of 7 tokens, only 1, 512"):
        graph().targets(7)


def test_unknown_leaf_order_does_not_matter():
    raw = raw_graph()
    raw["graphs"] = dict(reversed(raw["graphs"].items()))
    assert OperatorGraph.from_engine(raw).to_json() == graph().to_json()


@pytest.mark.parametrize("read_before", [False, True])
def test_a_state_is_made_ready_where_its_layer_begins(read_before: bool) -> None:
    """llama.cpp makes the next layer's recurrent state ready before a layer has ended."""

    def leaf(name: str, is_weight: bool) -> dict[str, Any]:
        ne = [4, 4 if is_weight else 1, 1, 1]
        return {"kind": "leaf", "is_weight": is_weight, "name": name, "type": "f32", "ne": ne, "nbytes": 64}

    def node(op: str, name: str, layer: int, *src: dict[str, Any] | int) -> dict[str, Any]:
        sources = [{"kind": "node", "index": s} if isinstance(s, int) else s for s in src]
        return {"op": op, "name": name, "type": "f32", "ne": [4, 1, 1, 1], "nbytes": 16, "layer": layer, "src": sources}

    nodes = [
        node("GET_ROWS", "embd", -1, leaf("token_embd.weight", True), leaf("inp_tokens", False)),
        node("MUL_MAT", "node_1", -1, leaf("blk.0.a.weight", True), 0),
        node("SCALE", "cache_s_l1 (view)", 1, leaf("cache_s_l1", False)),
        node("GET_ROWS", "node_3", 1, 2),
        node("ADD", "l_out-0", 0, 1, 3 if read_before else 0),
        node("MUL_MAT", "node_5", -1, leaf("blk.1.a.weight", True), 4),
        node("ADD", "l_out-1", 1, 5, 3),
    ]
    tensors = [{"name": n, "type": "f32", "ne": [4, 4], "nbytes": 64} for n in ("token_embd.weight", "output.weight")]
    raw = {"arch": "x", "n_layer": 2, "tensors": tensors, "graphs": {"1": nodes}}
    ops = OperatorGraph.from_engine(raw).operators(1)
    order = ["embd", "node_1", "l_out-0", "cache_s_l1 (view)", "node_3", "node_5", "l_out-1"]
    assert [op.name for op in ops] == ([n["name"] for n in nodes] if read_before else order)
    assert all(p < op.index for op in ops for p in op.producers)
    assert all(op.index in ops[p].consumers for op in ops for p in op.producers)
