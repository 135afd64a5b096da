"""Operators that are timed by kind and shape: which, and what their times do to predictions and plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oallama.data.entries import ShapeTime
from oallama.data.op_shapes import MAX_ROWS, NEGLIGIBLE, OpShape, Part, values_nbytes, worth_timing
from oallama.data.operators import OperatorGraph
from oallama.data.plan import HOST
from oallama.data.profile import Profile
from oallama.planning.cost import CostModel
from oallama.planning.predict import Predictor
from oallama.planning.stage import Homes
from oallama.profiling.workload import tasks_for
from support.planned import plan
from support.synthetic import CONTEXT, DEVICE, QWQ_32B, Shape, profile, raw_graph

SMALL_FFN = Shape(n_ff=4096)
MIXTURE = Shape(n_expert=8)


def tensor(type: str, *ne: int, **more: Any) -> dict[str, Any]:
    """A contiguous raw tensor."""
    shape = [*ne, 1, 1, 1][:4]
    first = {"f32": 4, "f16": 2, "i32": 4, "i64": 8, "q8_0": 34, "q4_K": 144}[type]
    nb = [first, int(values_nbytes(type, shape[:1]))]
    for n in shape[1:3]:
        nb.append(nb[-1] * n)
    return {"type": type, "ne": shape, "nb": nb, **more}


def with_strides(raw: dict[str, Any]) -> OperatorGraph:
    """The graph of a synthetic model whose tensors are contiguous."""
    for nodes in raw["graphs"].values():
        for node in nodes:
            node |= tensor(node["type"], *node["ne"])
            for source in node["src"]:
                if source["kind"] == "leaf":
                    source |= tensor(source["type"], *source["ne"])
    return OperatorGraph.from_engine(raw)


def shape_of(op: str, out: Mapping[str, Any], *reads: Mapping[str, Any], **more: Any) -> OpShape:
    made = OpShape.make({"op": op, **out, **more}, reads, [False] * len(reads))
    assert made is not None
    return made


def timed(graph: OperatorGraph, tier: int) -> dict[str, str]:
    """Kinds of operators that are timed, and their keys."""
    return {op.op: op.shape.key for op in graph.operators(tier) if op.shape is not None}


def test_keys_say_kind_shapes_and_what_is_not_contiguous() -> None:
    wide = tensor("f32", 8, 2)
    across = {**wide, "nb": [8, 4, 64, 64]}
    assert shape_of("MUL", wide, wide, across).key == "MUL f32[8x2] f32[8x2] f32[8x2~]"
    gelu, silu = (shape_of("UNARY", wide, wide, op_params=[kind, 7]).key for kind in (8, 10))
    assert (gelu, silu) == ("UNARY/8 f32[8x2] f32[8x2]", "UNARY/10 f32[8x2] f32[8x2]")
    # Other parameters change no time: a scale, an offset.
    assert shape_of("SCALE", wide, wide, op_params=[1]).key == shape_of("SCALE", wide, wide, op_params=[2]).key


def test_tables_and_caches_count_by_the_rows_that_are_read() -> None:
    rows, ids, table = tensor("f32", 64, 3), tensor("i32", 3), tensor("q8_0", 64, 10**7)
    found = shape_of("GET_ROWS", rows, table, ids)
    assert found.nbytes == 2 * 64 * 3 * 4 and found.sources[0].ne[1] == MAX_ROWS
    cache, places = tensor("f16", 64, 10**6), tensor("i64", 3)
    stored = shape_of("SET_ROWS", cache, rows, places, cache, view_of=2)
    assert stored.nbytes == 2 * 64 * 3 * 4 and stored.ne == stored.sources[2].ne == (64, MAX_ROWS, 1, 1)


def test_only_what_may_take_more_than_a_hundredth_of_a_pass_is_timed() -> None:
    wide, narrow = (shape_of("ADD", *[tensor("f32", n, 1)] * 3) for n in (1000, 10))
    scan = shape_of("SSM_SCAN", *[tensor("f32", 2, 1)] * 2)
    rest = Part(None, wide.nbytes / NEGLIGIBLE)
    assert worth_timing([Part(wide, wide.nbytes), rest]) == set()
    assert worth_timing([Part(s, s.nbytes) for s in (wide, wide, narrow, scan)] + [rest]) == {wide.key, scan.key}


def test_a_large_dense_model_has_none_in_decode() -> None:
    assert timed(with_strides(raw_graph(QWQ_32B, (1,))), 1) == {}
    assert "GLU" in timed(with_strides(raw_graph(SMALL_FFN)), 512)
    assert "ARGSORT" in timed(with_strides(raw_graph(MIXTURE, (1,))), 1)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_no_shape_of_its_own(fused: bool) -> None:
    kinds = timed(with_strides(raw_graph(Shape(fused=fused))), 512)
    assert not {"FLASH_ATTN_EXT", "SOFT_MAX", "MUL_MAT"} & set(kinds)


def test_the_graph_keeps_them_as_text() -> None:
    graph = with_strides(raw_graph(MIXTURE))
    assert OperatorGraph.from_json(graph.to_json()) == graph


def test_the_profiler_has_one_task_for_each() -> None:
    graph = with_strides(raw_graph(MIXTURE))
    tasks = tasks_for(graph, depths=[256], type_k="f16", type_v="f16", accelerator=False)
    named = [task.describe() for task in tasks if task.kind == "shape"]
    keys = {op.shape.key for tier in (1, 512) for op in graph.operators(tier) if op.shape is not None}
    assert sorted(named) == sorted(keys)


def model_and_times(seconds: Mapping[str, float], op: str = "GLU") -> tuple[OperatorGraph, Profile, Profile]:
    graph = with_strides(raw_graph(SMALL_FFN))
    machine = profile(graph)
    shapes = tuple(
        ShapeTime(device, timed(graph, tier)[op], s * tier) for tier in (1, 512) for device, s in seconds.items()
    )
    return graph, machine, replace(machine, shapes=shapes)


def test_predictions_take_the_measured_time() -> None:
    graph, before, after = model_and_times({DEVICE: 2e-5, HOST: 1e-4})
    small, whole = (CostModel(graph, machine, [DEVICE], CONTEXT) for machine in (before, after))
    at = [op.index for op in graph.operators(512) if op.op == "GLU"]
    rest = [i for i in range(len(graph.operators(512))) if i not in at]
    for n in (512, 100):
        assert np.allclose(whole.stage(n).other[:, at].T, [1e-4 * n, 2e-5 * n])
        assert (whole.stage(n).other[:, rest] == small.stage(n).other[:, rest]).all()
        small_twice = CostModel(graph, after.corrected({f"{DEVICE} small": 2.0}), [DEVICE], CONTEXT)
        assert np.allclose(small_twice.stage(n).other[1], 2 * whole.stage(n).other[1])
    # Few tokens take a small operator's time at least.
    assert whole.stage(1).other[1, at[0]] == max(2e-5, small.stage(1).other[1, at[0]])

    def tpot(costs: CostModel) -> float:
        n = len(costs.targets), len(costs.small)
        off = [np.zeros(count, dtype=bool) for count in n]
        on = [np.ones(count, dtype=np.int8) for count in (*n, graph.n_layer + 1)]
        return Predictor(costs).tpot(Homes(on[0], off[0], on[1], off[1], on[2]), 0)

    step = whole.stage(1, decode=True).other[1] - small.stage(1, decode=True).other[1]
    assert tpot(whole) - tpot(small) == pytest.approx(step.sum())


def test_plans_put_matrices_where_such_an_operator_is_fast() -> None:
    """A GLU that takes long on the accelerator is left to the host, with what surrounds it."""
    graph, before, after = model_and_times({DEVICE: 1e-2, HOST: 1e-6})

    def on_host(machine: Profile) -> set[str]:
        made = plan(graph, machine=machine, planner="exact")
        return {t.split(".")[2] for t, place in made.tensors.items() if place.device == HOST and t.startswith("blk.")}

    assert on_host(before) == set()
    assert {"ffn_up", "ffn_gate", "ffn_down"} & on_host(after)
