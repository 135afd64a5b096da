"""Repacked weights on the engine: the same numbers but for rounding, where the plan says, beside an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from oallama import Llama
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine import native
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan, start
from support.hand_plan import hand_plan, realised
from support.logits import nmse
from support.made_profile import made_profile

TOKENS = [int(t) for t in np.random.default_rng(5).integers(300, 1000, size=40)]


def logits(path: Path, plan: PlacementPlan) -> tuple[np.ndarray, np.ndarray]:
    """Of the last row of a prompt, and of a token after it."""
    llm = Llama(str(path), plan=plan, verbose=False)
    rows = []
    for tokens in (TOKENS, [7]):
        llm.eval(tokens)
        rows.append(np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy())
    llm.close()
    return rows[0], rows[1]


@pytest.fixture(autouse=True)
def _repacks() -> None:
    if not native.core().repacks("CPU", "q4_0", 256, 256, 0):
        pytest.skip("this CPU does not repack q4_0")


def test_repacked_weights_give_the_same_logits_but_for_rounding(tiny: Callable[..., Path], rpc) -> None:
    path = tiny("llama", "Q4_0")
    plan = hand_plan(path, rpc.devices[0])
    assert any(t.realisation for t in realised(plan, "repacked").tensors.values())
    plain, repacked = (logits(path, realised(plan, r)) for r in ("plain", "repacked"))
    assert all(nmse(a, b) < 1e-4 for a, b in zip(plain, repacked, strict=True))
    again = logits(path, realised(plan, "plain"))
    assert all(np.array_equal(a, b) for a, b in zip(plain, again, strict=True))


def test_what_is_left_of_the_mapped_file_is_counted_alone(tiny: Callable[..., Path]) -> None:
    """The mapping spans the repacked weights too, whose pages nobody reads."""
    path = tiny("llama", "Q4_0")
    nbytes = sum(t.nbytes for t in autoplan.read_graph(path, Settings(n_ctx=64)).tensors)
    for realisation in ("plain", "repacked"):
        llm = Llama(str(path), plan=realised(hand_plan(path, HOST), realisation), verbose=False)
        assert llm.placement()[HOST].measured.weights == pytest.approx(nbytes, rel=0.01)
        llm.close()


def test_a_streamed_weight_may_be_repacked(tiny: Callable[..., Path], rpc) -> None:
    """Prefill computes on the device with the file's bytes, decode on the CPU with the repacked ones."""
    path = tiny("llama", "Q4_0")
    plan = hand_plan(path, rpc.devices[0])
    plain, repacked = (logits(path, realised(plan, r, "stream", 32)) for r in ("plain", "repacked"))
    # The last layer's feed-forward sees one row, and that on the CPU.
    assert nmse(plain[0], repacked[0]) < 1e-6
    assert nmse(plain[1], repacked[1]) < 1e-4


def test_a_type_without_a_faster_layout_is_refused(tiny: Callable[..., Path]) -> None:
    plan = hand_plan(tiny("llama", "F16"), HOST)
    name = "blk.0.ffn_up.weight"
    tensor = plan.tensors[name]
    tensor = replace(tensor, segments=(replace(tensor.segments[0], realisation="repacked"),))
    with pytest.raises(OallamaError, match=f"'{name}' cannot be repacked"):
        Llama(str(tiny("llama", "F16")), plan=replace(plan, tensors={**plan.tensors, name: tensor}), verbose=False)


def test_a_plan_realises_counts_and_loads(tiny: Callable[..., Path], rpc) -> None:
    path, settings = tiny("llama", "Q4_0"), Settings(n_ctx=256, n_threads=2)
    made = made_profile(path, rpc.devices[0], settings)
    host = [e for e in made.operators if (e.device, e.type) == (HOST, "q4_0")]
    profile = replace(
        made,
        operators=(
            *(e for e in made.operators if e not in host),
            *(replace(e, realisation="plain") for e in host),
            *(replace(e, realisation="repacked", median_s=e.median_s / 2) for e in host),
        ),
    )
    choices = autoplan.Choices(device=rpc.devices[0], planner="exact", profile=profile)
    plan = start.plan_model(path, "50%", settings, choices)
    matrices = {name: t for name, t in plan.tensors.items() if t.type == "q4_0" and name != "token_embd.weight"}
    assert {t.realisation for t in matrices.values() if t.device == HOST} == {"repacked"}
    llm = Llama(str(path), plan=plan, verbose=False, n_threads=2, use_mmap=False)
    assert llm.placement()[HOST].measured.weights == plan.predicted.devices[HOST].weights >= plan.repacked_nbytes > 0
    llm.close()
    assert start.plan_model(path, "50%", settings, replace(choices, repack=False)).repacked_nbytes == 0
