"""Uses of experts that two devices share: in the metrics of a server, and in a line where they are not as planned."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oallama.data.layer_experts import ExpectedExperts, ExpectedHits
from oallama.loading.expert_hits import LEAST_TOKENS
from support.expert_slots import plan_of
from support.processes import until
from support.servers import call, complete, serving

pytestmark = pytest.mark.engine
FIRST = (0, 3, 4)
USED, N_EXPERTS = 4, 16
LINE = re.compile(r'^llamacpp:expert_(\w+)_total\{device="([^"]+)"\} (\d+)$', re.MULTILINE)


def metrics(port: int) -> dict[str, int]:
    text = call(port, "/metrics")
    found = LINE.findall(text)
    assert len({device for _, device, _ in found}) <= 1
    for name, _, _ in found:
        assert f"# TYPE llamacpp:expert_{name}_total counter\n" in text
    return {name: int(value) for name, _, value in found}


@pytest.mark.parametrize("slots", [0, 3])
def test_a_server_counts_uses_and_says_that_they_are_fewer(
    tiny: Callable[..., Path], rpc, tmp_path: Path, slots: int
) -> None:
    model, device = tiny("qwen3moe"), rpc.devices[0]
    expected = ExpectedExperts("trace", N_EXPERTS, USED, {layer: ExpectedHits(3, 0.95, 0.95) for layer in range(2)})
    made = plan_of(model, device, slots, FIRST)
    made = replace(made, predicted=replace(made.predicted, experts=expected))
    made.save(tmp_path / "plan.json")
    log, n = tmp_path / "log", LEAST_TOKENS + 40
    with serving(log, model, "--plan", tmp_path / "plan.json", "--rpc", rpc.endpoint, "--threads", "1") as port:
        before = metrics(port)
        assert set(before) == {"uses", "hits", "uploads", "uploaded_bytes"}
        complete(port, model, "The fox jumps over the lazy dog and goes on", n)
        after = metrics(port)
        uses = after["uses"] - before["uses"]
        assert 2 * USED * (n - 20) <= uses <= 2 * USED * (n + 20)  # an answer may end early by a token
        assert 0 < after["hits"] < after["uses"] and bool(after["uploads"]) == bool(slots)
        assert bool(after["uploaded_bytes"]) == bool(slots)
        until(lambda: "95% were expected by the plan's routing trace" in log.read_text(errors="replace"))


def test_models_without_such_experts_have_no_such_counters(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("qwen3moe")
    with serving(tmp_path / "log", model, "--no-plan", "--device", "CPU", "--ctx", "256", "--threads", "1") as port:
        complete(port, model, "a", 4)
        assert metrics(port) == {}
