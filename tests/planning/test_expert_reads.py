"""What a batch reads of a mixture's weights, by a trace or by chance, and what that does to seconds and uploads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.data.expert_hits import uniform_union
from oallama.data.routing import NONE
from oallama.planning.cost import CostModel
from oallama.planning.expert_reads import Unions, reading
from oallama.planning.expert_use import ExpertUse
from oallama.planning.stage import STREAMER
from support.mixtures import MACHINE, MODEL, MOE, UNIFORM, plan, skewed, trace
from support.synthetic import CONTEXT, DEVICE

N, USED = MOE.n_expert, MOE.n_used
SKEWED = ExpertUse.of_trace(trace(skewed(np.random.default_rng(2), MOE.n_layer, 512, N, USED), N))


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 17))
def test_unions_are_counted_one_by_one(seed: int, n_layers: int, n_tokens: int) -> None:
    rng, n_experts = np.random.default_rng(seed), 6
    ids = skewed(rng, n_layers, n_tokens, n_experts, 2).astype(np.uint16)
    ids[0, :, 1] = NONE
    order = np.array([rng.permutation(n_experts) for _ in range(n_layers)])
    unions = Unions.of_ids(ids, order)
    assert unions.widths[-1] <= n_tokens < 2 * unions.widths[-1]
    for n in unions.widths:
        for k in range(n_experts + 1):
            found = [
                len(set(layer[i : i + n].ravel().tolist()) & set(best[:k].tolist()))
                for layer, best in zip(ids, order, strict=True)
                for i in range(0, n_tokens - n + 1, n)
            ]
            assert unions.at(n)[k] == pytest.approx(np.mean(found))


def test_between_and_beyond_the_widths() -> None:
    unions = Unions((1, 2, 4), np.array([[0.0, 1], [0.0, 2], [0.0, 3]]))
    assert [unions.at(n)[1] for n in (1, 2, 3, 4, 99)] == pytest.approx([1, 2, 2 + np.log2(1.5), 3, 3])


@pytest.mark.parametrize("compute", [0.0, 0.1, 1.0])
def test_both_parts_are_found(compute: float) -> None:
    """Of seconds that are made of both."""
    read, n = 1.0 - compute, 64
    union = uniform_union(N, USED, n)
    many = union * read + n * USED * compute
    assert reading(USED * (read + compute), many, n, N, USED) == pytest.approx(union * read / many)


@given(st.floats(0, 10), st.floats(0, 10), st.integers(1, 4096))
def test_reading_is_a_share(one: float, many: float, n_tokens: int) -> None:
    assert 0 <= reading(one, many, n_tokens, N, USED) <= 1


def test_one_token_reads_whatever_it_uses() -> None:
    assert reading(0.5, 0.5, 1, N, USED) == 1


def costs(use: ExpertUse | None) -> CostModel:
    return CostModel(MODEL, MACHINE, (DEVICE,), CONTEXT, expert_use=use)


def experts_seconds(model: CostModel, n_tokens: int, decode: bool = False) -> float:
    at = model.stage(n_tokens, decode)
    return float(sum(at.seconds[0, op.index] for op in at.graph.operators if op.op == "MUL_MAT_ID"))


def test_a_batch_of_few_experts_takes_less_time() -> None:
    """As long as it is reading that it waits for, and never for one token."""
    for n in (2, 8, 64):
        same, fewer = experts_seconds(costs(UNIFORM), n), experts_seconds(costs(SKEWED), n)
        assert SKEWED.unions is not None
        least = float(SKEWED.unions.at(n)[-1]) / uniform_union(N, USED, n)
        assert least * same <= fewer * (1 + 1e-9) and fewer < same
    assert experts_seconds(costs(SKEWED), 1, True) == pytest.approx(experts_seconds(costs(UNIFORM), 1, True))
    assert experts_seconds(costs(None), 64) == experts_seconds(costs(UNIFORM), 64)


def test_uploads_are_of_the_experts_that_are_used() -> None:
    tensor = MODEL.tensor["blk.0.ffn_up_exps.weight"]
    uploads = [costs(use).times.uploaded_bytes("MUL_MAT_ID", tensor, 32, USED) for use in (UNIFORM, SKEWED)]
    assert uploads[0] == pytest.approx(tensor.nbytes * uniform_union(N, USED, 32) / N) and uploads[1] < uploads[0]
    assert costs(SKEWED).times.uploaded_bytes("MUL_MAT", tensor, 32, 1) == tensor.nbytes


def test_a_side_reads_its_own_experts() -> None:
    """The most used experts take most uses of a prompt, and a smaller share of what it reads."""
    k, n = np.array([N // 4]), 64
    by_uses, by_reads = (SKEWED.computed(k, n, decode=False, reading=(r, r)) for r in (0.0, 1.0))
    for of in (by_uses, by_reads):
        assert of.device + of.host == pytest.approx(1)
    assert 1 / 4 < by_reads.device[0, 0] < by_uses.device[0, 0]
    chance = [UNIFORM.computed(k, n, decode=False, reading=(r, r)).device for r in (0.0, 1.0)]
    assert np.ravel(chance) == pytest.approx([1 / 4, 1 / 4])


def test_a_plan_that_divides_experts_is_predicted_with_what_both_sides_read() -> None:
    made = plan("40%", "experts", SKEWED)
    assert any(s.experts for t in made.tensors.values() for s in t.segments)
    blind = replace(SKEWED, unions=None)
    assert made.predicted.ttft_s != plan("40%", "experts", blind).predicted.ttft_s
    model = costs(SKEWED)
    op = next(op for op in model.stage(64).graph.operators if op.op == "MUL_MAT_ID")
    key = (op.op, model.graph.tensor[op.weight or ""], 64, USED)
    device, host = (model.times.reading(model.names[d], *key) for d in (STREAMER, 0))
    assert 0 < host < device <= 1  # the host computes longer, by this profile
