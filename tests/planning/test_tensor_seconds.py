"""What a picture says of each weight adds up to what the cost model says of the pass."""

from __future__ import annotations

import pytest

from oallama.planning import make_plans
from oallama.planning.tensor_seconds import tensor_seconds
from support.planned import MODEL
from support.synthetic import space


def test_the_weights_of_a_pass_add_up() -> None:
    there = space(MODEL, "auto")
    made = make_plans(there, "oato").best
    costs = there.builder_of(made).costs
    times = tensor_seconds(there, made)
    for stage, n_tokens, decode in (("decode", 1, True), ("prefill", made.context.n_ubatch, False)):
        at = costs.stage(n_tokens, decode)
        targets = [op.index for op in at.graph.operators if op.is_target]
        for device, whole in zip(costs.names, at.seconds[:, targets].sum(axis=1).tolist(), strict=True):
            assert sum(getattr(each, stage)[device] for each in times.values()) == pytest.approx(whole)
    assert {*times} <= {*made.tensors}
