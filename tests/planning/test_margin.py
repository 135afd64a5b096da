"""The budget "auto" leaves memory of a GPU free, for every planner; what a GPU's backend takes by itself is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oallama import Llama, OallamaError
from oallama.data.plan import PlacementPlan
from oallama.data.profile import Profile
from oallama.engine import device_list
from oallama.engine.device_list import Device
from oallama.engine.load_settings import Settings
from oallama.loading import budgets, start
from oallama.loading.autoplan import Choices
from oallama.planning import Workload, gpu_reserve, make_plans
from oallama.planning.planner import BY_TRACE, PLANNERS
from oallama.planning.pool import PAGE
from oallama.views.plan_table import render_unseen
from support.made_profile import made_profile
from support.synthetic import DEVICE, Shape, Speed, graph, profile, space

GIB = 1 << 30
TOTAL = 24 * GIB
SETTINGS = Settings(n_ctx=512, n_batch=512, n_ubatch=32, n_threads=2)
CUDA = replace(profile(graph()), devices=tuple(replace(d, backend="CUDA") for d in profile(graph()).devices))


class GpuHere:
    """The module of devices, in which one device says that it is a GPU with so much free memory."""

    def __init__(self, name: str, free: int) -> None:
        self._name, self._free = name, free

    def __getattr__(self, name: str) -> Any:
        return getattr(device_list, name)

    def device(self, name: str) -> Device:
        found = device_list.device(name)
        if name != self._name:
            return found
        return replace(found, description="NVIDIA Fake", memory_free=self._free, memory_total=TOTAL)


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", "Q8_0")


@pytest.fixture
def times(model: Path, rpc: Any) -> Profile:
    return made_profile(model, rpc.devices[0], SETTINGS)


@pytest.fixture
def free(model: Path, rpc: Any, monkeypatch: pytest.MonkeyPatch, times: Profile) -> Iterator[int]:
    """Bytes free on a fake GPU: after the reserve nine tenths of what the whole model needs are left."""
    device = rpc.devices[0]
    whole = start.plan_model(model, None, SETTINGS, Choices(device=device, profile=times, planner="all"))
    nbytes = gpu_reserve(TOTAL) + whole.predicted.devices[device].total * 9 // 10
    monkeypatch.setattr(budgets, "device_list", GpuHere(device, nbytes))
    yield nbytes


def test_the_reserve_is_that_of_llama_cpp_and_more_on_large_cards() -> None:
    assert gpu_reserve(8 * GIB) == GIB
    assert gpu_reserve(100 * GIB) == 5 * GIB


@pytest.mark.parametrize(
    "planner",
    [n for n in PLANNERS if n not in ("cpu", "stock-cpu", "cpu-moe", "cpu-moe-last", "divided", *BY_TRACE)],
)
def test_auto_leaves_the_reserve_free(planner: Any, free: int, model: Path, times: Profile, rpc: Any) -> None:
    device = rpc.devices[0]
    choices = Choices(device=device, profile=times, planner=planner, workload=Workload(64, 16))
    if planner == "all":
        with pytest.raises(OallamaError, match="the whole model does not fit the budget auto"):
            start.plan_model(model, "auto", SETTINGS, choices)
        return
    plan = start.plan_model(model, "auto", SETTINGS, choices)
    assert plan.margins == {device: gpu_reserve(TOTAL)}
    assert plan.budgets[device] == free - gpu_reserve(TOTAL)
    assert 0 < plan.predicted.devices[device].total <= free - gpu_reserve(TOTAL)
    assert PlacementPlan.from_json(plan.to_json()) == plan
    (line,) = (text.plain for text in render_unseen(plan))
    assert line == f'{device}: 1.2 GiB of the free memory stay free (budget "auto"; --margin sets it)'


def test_a_margin_takes_the_place_of_the_reserve(free: int, model: Path, times: Profile, rpc: Any) -> None:
    device = rpc.devices[0]

    def budget(margin: Any, vram: Any = "auto") -> int:
        choices = Choices(device=device, profile=times, planner="layers", margin=margin)
        return start.plan_model(model, vram, SETTINGS, choices).budgets[device]

    assert budget("0") == budget(0) == free
    assert budget("1.1GiB") == free - int(1.1 * GIB)
    for bad in ("-1", "a lot", "8Gi", "5%", -1, 0.5, True):
        with pytest.raises(OallamaError, match="cannot read the margin"):
            budget(bad)
    with pytest.raises(OallamaError, match="are to stay free"):
        budget("20GiB")
    with pytest.raises(OallamaError, match='is for the budget "auto", not for 8GiB'):
        budget("1GiB", "8GiB")


def test_a_device_in_the_hosts_memory_has_no_reserve(model: Path, times: Profile, rpc: Any) -> None:
    device = rpc.devices[0]
    plan = start.plan_model(model, "auto", SETTINGS, Choices(device=device, profile=times, planner="layers"))
    assert plan.margins == {} and render_unseen(plan) == []


@pytest.mark.parametrize("arguments", [{"plan": "plan.json"}, {}, {"profile": "p.json"}])
def test_a_margin_without_a_free_budget_is_refused(arguments: dict[str, Any], model: Path) -> None:
    with pytest.raises(OallamaError, match="margin"):
        Llama(str(model), margin="1GiB", verbose=False, **arguments)


# ---- the pool ------------------------------------------------------------------------------------------------------


def pool(shape: Shape, planner: Any = "layers", **context: Any) -> int:
    """Bytes predicted for the pool of a CUDA device that holds all of a model."""
    model = graph(shape)
    machine = profile(model)
    machine = replace(machine, devices=tuple(replace(d, backend="CUDA") for d in machine.devices))
    base = space(model)
    asked = replace(base.context, flash_attn="auto" if shape.fused else "off", **context)
    request = space(model, 10**12, machine=machine, context=asked, graphs={asked.flash_attn: model})
    return make_plans(request, planner).best.predicted.devices[DEVICE].pool


def pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def test_the_pool_holds_the_largest_converted_operand() -> None:
    # Activations and result of the widest product, in F16.
    shape = Shape(n_embd=4096, n_ff=14336, n_head=32, n_head_kv=8, head_dim=128, n_layer=1, n_vocab=64, type="f16")
    assert pool(shape) == pages((4096 + 14336) * 512 * 2)
    assert pool(shape, n_ubatch=128) == pages((4096 + 14336) * 128 * 2)
    # Quantised weights are multiplied by activations in blocks of 36 bytes.
    assert pool(replace(shape, type="q4_K")) == pages(int(14336 * 512 * 36 / 32))


def test_unfused_attention_needs_its_scores_once_more() -> None:
    """Half a GB at 512 tokens, 16k positions and 32 heads: what the desk review found uncounted."""
    shape = Shape(
        n_embd=4096, n_ff=14336, n_head=32, n_head_kv=8, head_dim=128, n_layer=1, n_vocab=64, type="q4_K", fused=False
    )
    assert pool(shape, n_ctx=16384) == pages((16384 + 128) * 512 * 32 * 2) > 500 * 10**6
    assert pool(replace(shape, fused=True), n_ctx=16384) < 10 * 10**6


def test_a_budget_in_bytes_counts_the_pool() -> None:
    model = graph(Shape(n_embd=1024, n_ff=4096, n_layer=8, type="f16"))
    machine = profile(model, cpu=Speed(5e7, 1e9), op_offload=False)
    there = replace(machine, devices=tuple(replace(d, backend="CUDA") for d in machine.devices))
    budget = 50 << 20
    for planner in ("exact", "oato", "layers", "cpu-ffn"):
        without, counted = (
            make_plans(space(model, budget, machine=m), planner).best.predicted.devices[DEVICE]
            for m in (machine, there)
        )
        assert without.pool == 0 < counted.pool
        assert counted.total == counted.buffers + counted.pool <= budget
        assert counted.weights < without.weights or planner in ("layers", "cpu-ffn")  # by whole layers


def test_stock_fit_is_asked_for_less_than_the_budget() -> None:
    model = graph()
    asked: list[Any] = []

    def fit(limits: Any) -> Any:
        asked.append(dict(limits))
        raise OallamaError("asked")

    for machine in (profile(model), CUDA):
        with pytest.raises(OallamaError, match="asked"):
            make_plans(space(model, 100 << 20, machine=machine, fit=fit), "fit")
    assert asked[0] == {DEVICE: 100 << 20}
    assert asked[1] == {DEVICE: (100 << 20) - PAGE}


def test_the_pool_is_shown() -> None:
    plan = make_plans(space(graph(), 100 << 20, machine=CUDA), "layers").best
    (line,) = (text.plain for text in render_unseen(plan))
    assert line == f"{DEVICE}: 2.0 MiB of the total are the backend's pool for conversions, estimated"


def test_a_budget_above_the_devices_memory_is_said(model: Path, times: Profile, free: int, rpc: Any) -> None:
    def notes(budget: str) -> str:
        plan = start.plan_model(model, budget, SETTINGS, Choices(device=rpc.devices[0], profile=times))
        return "\n".join(plan.predicted.notes)

    assert f"the budget of {rpc.devices[0]} is 25GiB, but it has 24.0 GiB of memory" in notes("25GiB")
    assert "but it has" not in notes("23GiB")
