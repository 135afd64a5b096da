"""What the profiler times is built as llama.cpp builds it: equal parameters, types and layouts of every operator."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from oallama.data.entries import FEED_FORWARD, NORM, ROPE_STORE
from oallama.data.fusion import chains
from oallama.engine import native, skeleton
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from support.archs import write_models
from support.logits import ARCHITECTURES

N_CTX, TIERS = 512, (1, 64)
Node = Mapping[str, Any]
# Parameters that models choose and that change no kernel: a norm's epsilon; RoPE's frequencies and factors, its
# dimensions and its mode (neighbours or halves).
FREE = {"RMS_NORM": {0}, "ROPE": set(range(1, 15))}


def settings(flash_attn: str = "on") -> Settings:
    return Settings(n_ctx=N_CTX, n_batch=N_CTX, n_ubatch=N_CTX, flash_attn=flash_attn)


def raw_graph(path: Path, n: int, flash_attn: str = "on") -> list[Node]:
    nodes: list[Node] = skeleton.read_graphs(path, settings(flash_attn), [n])["graphs"][str(n)]
    return nodes


def params(node: Node) -> list[int]:
    free = FREE.get(node["op"], set())
    return [0 if i in free else value for i, value in enumerate(node["op_params"])]


def types(nodes: Iterable[Node], node: Node) -> list[str]:
    """Of what it reads."""
    every = list(nodes)
    return [every[s["index"]]["type"] if s["kind"] == "node" else s["type"] for s in node["src"]]


def of(nodes: Iterable[Node], op: str) -> Node:
    """The first repeat's operator."""
    return next(node for node in nodes if node["op"] == op)


def assert_alike(real: list[Node], node: Node, made: list[Node], profiled: Node) -> None:
    assert profiled["op"] == node["op"] and profiled["type"] == node["type"]
    assert params(profiled) == params(node), node["name"]
    assert types(made, profiled) == types(real, node), node["name"]


@pytest.mark.parametrize("n", TIERS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_products_are_those_of_the_graph(arch: str, n: int, tiny: Callable[..., Path]) -> None:
    path = tiny(arch)
    graph, real = autoplan.read_graph(path, settings(), TIERS), raw_graph(path, n)
    by_name = {(node["name"], node["op"]): node for node in real}
    seen = set()
    for op in graph.targets(n):
        tensor = graph.tensor[op.weight or ""]
        k, m, n_expert = (*tensor.ne, 1, 1)[:3]
        moe = op.op == "MUL_MAT_ID"
        made = native.core().built_mul_mat(
            type=tensor.type, k=k, m=m, n_tokens=op.n_tokens, n_expert=n_expert if moe else 0, n_used=op.n_used
        )["nodes"]
        assert_alike(real, by_name[op.name, op.op], made, of(made, op.op))
        seen.add(op.op)
    assert "MUL_MAT" in seen and ("MUL_MAT_ID" in seen) == (arch == "qwen3moe")


@pytest.mark.parametrize("n", TIERS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("flash", [True, False])
def test_attention_is_that_of_the_graph(arch: str, n: int, flash: bool, tiny: Callable[..., Path]) -> None:
    """Without F32 sums CUDA takes other kernels, and those of a device's other form are another operator."""
    path = tiny(arch)
    real = raw_graph(path, n, "on" if flash else "off")
    shape = autoplan.read_graph(path, settings(), TIERS).attention[0]
    assert shape is not None
    made = native.core().built_attention(
        type_k="f16", type_v="f16", n_tokens=n, depth=N_CTX, flash=flash, **shape._asdict()
    )["nodes"]
    if flash:
        assert_alike(real, of(real, "FLASH_ATTN_EXT"), made, of(made, "FLASH_ATTN_EXT"))
        assert of(made, "FLASH_ATTN_EXT")["op_params"][3] != 0  # sums in F32
        return
    softmax = next(i for i, node in enumerate(real) if node["op"] == "SOFT_MAX")
    keys = real[real[softmax]["src"][0]["index"]]
    values = next(node for node in real[softmax:] if node["op"] == "MUL_MAT")
    ops = [node for node in made if node["op"] in ("MUL_MAT", "SOFT_MAX")]
    for node, profiled in zip((keys, real[softmax], values), ops[:3], strict=True):
        assert_alike(real, node, made, profiled)
        assert profiled["ne"] == node["ne"]
    assert ops[0]["op_params"][0] != 0  # sums in F32
    scale = struct.unpack("f", struct.pack("i", ops[1]["op_params"][0]))[0]
    assert scale == pytest.approx(shape.head_dim_k**-0.5)


@pytest.mark.parametrize("n", TIERS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_small_operators_and_chains_are_those_of_the_graph(arch: str, n: int, tiny: Callable[..., Path]) -> None:
    path = tiny(arch)
    graph, real = autoplan.read_graph(path, settings(), TIERS), raw_graph(path, n)
    core, seen = native.core(), set()
    made = core.built_small(n_embd=graph.tensor["token_embd.weight"].ne[0], n_tokens=n)["nodes"]
    for op in ("RMS_NORM", "ADD"):
        assert_alike(real, of(real, op), made, of(made, op))
    by_name = {(node["name"], node["op"]): node for node in real}
    for chain in chains(graph, n, "f16"):
        nodes = [by_name[op.name, op.op] for op in (graph.operators(n)[i] for i in chain.ops)]
        made = core.built_chain(chain=chain.kind, type=chain.type, ne0=chain.ne[0], ne1=chain.ne[1], n_tokens=n)[
            "nodes"
        ]
        half = [node for node in made if node["op"] in {other["op"] for other in nodes}][: len(nodes)]
        for node, profiled in zip(nodes, half, strict=True):
            if node["op"] != "SET_ROWS":  # a view of the cache, which is of another size here
                assert_alike(real, node, made, profiled)
        assert [node["op"] for node in half] == [node["op"] for node in nodes]
        seen.add(chain.kind)
    assert seen >= {NORM, ROPE_STORE if arch != "minicpm3" else NORM, FEED_FORWARD if arch != "qwen3moe" else NORM}


def test_other_operators_are_rebuilt_as_they_are(tmp_path: Path) -> None:
    """Scans, convolutions, wide activations: the same node, its sources with the same strides, and it can be timed."""
    core, kinds = native.core(), set()
    bench = core.OpBench("CPU", 1, True, 1 << 16)
    for path in write_models(tmp_path, "^(mamba2|lfm2|qwen3next|gemma3n)$"):
        graph = autoplan.read_graph(path, settings(), TIERS)
        for n in TIERS:
            real = raw_graph(path, n)
            for shape, op in {op.shape: op for op in graph.operators(n) if op.shape is not None}.items():
                named = [node for node in real if (node["name"], node["op"]) == (op.name, op.op)]
                node = next(node for node in named if tuple(node["ne"]) == op.ne)  # a name may be that of several
                made = core.built_node(shape.as_node(), n_tokens=n)["nodes"]
                found = made[0]
                assert (found["op"], found["type"], found["op_params"]) == (node["op"], node["type"], node["op_params"])
                assert (found["ne"], found["nb"], found["view_of"]) == (node["ne"], node["nb"], node["view_of"]), (
                    op.name
                )
                for mine, source in zip(found["src"], node["src"], strict=True):
                    tensor = real[source["index"]] if source["kind"] == "node" else source
                    assert [mine[key] for key in ("type", "ne", "nb")] == [tensor[key] for key in ("type", "ne", "nb")]
                assert bench.node(shape.as_node(), n_tokens=n, max_s=0.001)["median_s"] > 0
                kinds.add(shape.op)
    assert kinds >= {"SSM_SCAN", "SSM_CONV", "GATED_DELTA_NET", "GLU"}


def test_nodes_that_nobody_can_build_are_refused() -> None:
    core = native.core()
    source = {"type": "f32", "ne": [4, 1, 1, 1], "nb": [4, 16, 16, 16], "cold": False}
    node = {"op": "SCALE", "op_params": [0, 0], "type": "f32", "ne": [4, 1, 1, 1], "sources": [source], "view_of": -1}
    assert core.built_node(node, n_tokens=1)["nodes"]
    for wrong in ({"op": "CONJURE"}, {"type": "f3"}, {"view_of": 1}, {"ne": [4]}, {"sources": [source] * 99}):
        with pytest.raises(ValueError, match=r"CONJURE|f3|no room"):
            core.built_node({**node, **wrong}, n_tokens=1)


def test_graphs_have_a_number_of_their_own() -> None:
    """ggml-cuda compares all nodes of a graph without one at every launch."""
    core = native.core()
    made = [
        core.built_small(n_embd=64, n_tokens=1),
        core.built_small(n_embd=64, n_tokens=1),
        core.built_mul_mat(type="q8_0", k=64, m=64, n_tokens=1, n_expert=0, n_used=0),
        core.built_attention(
            type_k="f16", type_v="f16", head_dim_k=64, head_dim_v=64, n_head=2, n_head_kv=1, n_tokens=1, depth=256,
            flash=True,
        ),
        core.built_chain(chain=NORM, type="f32", ne0=64, ne1=1, n_tokens=1),
    ]  # fmt: skip
    numbers = [graph["uid"] for graph in made]
    assert all(numbers) and len(set(numbers)) == len(numbers)
