"""In-place timing: per-node times of a real forward pass, from the hook in the CPU loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oallama import Llama
from oallama.engine import native
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.planning.cost import CostModel
from oallama.planning.in_place import compare_in_place
from oallama.tracing.operator_times import time_operators
from support import synthetic


def test_every_target_operator_of_a_pass_is_timed(tiny: Callable[..., Path]) -> None:
    path = tiny("llama")
    graph = autoplan.read_graph(path, Settings(n_ctx=64))
    llm = Llama(str(path), n_ctx=64, verbose=False)
    llm.eval([1])
    core = native.core()
    core.op_timer_take()
    core.op_timer_enable(True)
    try:
        llm.eval([2])
        records = core.op_timer_take()
        llm.eval([3])
        again = core.op_timer_take()
    finally:
        core.op_timer_enable(False)
    timed = {weight for _, _, op, weight, *_ in records if op.startswith("MUL_MAT")}
    assert {op.weight for op in graph.targets(1)} <= timed
    assert all(device == "CPU" and seconds >= 0 for device, _, _, _, seconds, _ in records)
    assert [r[1] for r in again] == [r[1] for r in records]

    llm.eval([4])
    assert core.op_timer_take() == []
    llm.close()


@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "minicpm3"])
def test_every_kind_of_weight_is_met_in_place(tiny: Callable[..., Path], arch: str) -> None:
    """As often as the graph has it, in prefill and in decode, beside attention and small operators."""
    path, settings = tiny(arch), Settings(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1)
    graph = autoplan.read_graph(path, settings)
    llm = Llama(str(path), n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1, verbose=False)
    prefill, decode = time_operators(llm, 64, depth=32, repeats=3)
    with pytest.raises(OallamaError, match="needs a context of 262 tokens, it has 256"):
        time_operators(llm, 64, depth=256, repeats=4)
    llm.close()
    costs = CostModel(graph, synthetic.profile(graph), (), autoplan.context_of(settings))
    for timed, n_tokens, depth in ((prefill, 64, 64), (decode, 1, 36)):
        rows = compare_in_place(costs, timed, n_tokens, depth, decode=n_tokens == 1)
        wanted: dict[str, int] = {}
        for op in graph.targets(n_tokens):
            kind = graph.tensor[op.weight or ""].kind
            wanted[kind] = wanted.get(kind, 0) + 1
        found: dict[str, int] = {}
        for row in rows:
            if row.type:
                found[row.kind] = found.get(row.kind, 0) + row.number
                assert row.error_percent is not None and row.measured_s > 0 and row.device == "CPU"
        assert found == wanted
        others = {row.kind for row in rows if not row.type}
        assert "small operators" in others and any(kind.startswith("attention") for kind in others)
