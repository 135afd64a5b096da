"""In-place timing: per-node times of a real forward pass, from the hook in the CPU loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from oallama import Llama
from oallama.engine import native
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan


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
    timed = {weight for _, _, op, weight, _ in records if op.startswith("MUL_MAT")}
    assert {op.weight for op in graph.targets(1)} <= timed
    assert all(device == "CPU" and seconds >= 0 for device, _, _, _, seconds in records)
    assert [r[1] for r in again] == [r[1] for r in records]

    llm.eval([4])
    assert core.op_timer_take() == []
    llm.close()
