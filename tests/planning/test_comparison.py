"""What a plan is compared with: stock placements in the same bytes; engines that do not fit at once take turns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from oallama.bench import Engine, LoadParams
from oallama.bench.rivals import Rivals, interleave_for
from oallama.data.plan import HOST
from oallama.engine import device_list
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan, start
from oallama.loading.stock_plans import stock_plans
from support.made_profile import made_profile


@pytest.mark.parametrize(
    ("asked", "each", "expected"),
    [("loaded", 0.4, "loaded"), ("loaded", 0.5, "reload"), ("reload", 0.1, "reload")],
)
def test_interleave(
    asked: str, each: float, expected: str, tiny: Callable[..., Path], rpc, capsys: pytest.CaptureFixture[str]
) -> None:
    path, device = tiny("llama"), rpc.devices[0]
    settings = Settings(n_ctx=256, n_batch=256, n_threads=2)
    choices = autoplan.Choices(device=device, profile=made_profile(path, device, settings), planner="oato")
    plan = start.plan_model(path, "50%", settings, choices)
    size = {device: int(device_list.device(device).memory_free * each)}
    on_device = LoadParams(devices=(device,))
    engines = [
        Engine("a", ".", on_device, predicted_bytes=size),
        Engine("b", ".", on_device, predicted_bytes=size),
        Engine("cpu", ".", LoadParams(devices=())),
    ]
    assert interleave_for(asked, engines, plan) == expected
    assert ("take turns" in capsys.readouterr().err) == (asked != expected)


@pytest.mark.parametrize(("arch", "names"), [("llama", ["layers"]), ("qwen3moe", ["layers", "fit"])])
def test_rivals_are_stock_placements_in_the_same_bytes(
    arch: str, names: list[str], tiny: Callable[..., Path], rpc, baseline_lib: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, device = tiny(arch), rpc.devices[0]
    settings = Settings(n_ctx=256, n_batch=256, n_threads=2)
    graph = autoplan.read_graph(path, settings)
    choices = autoplan.Choices(device=device, profile=made_profile(path, device, settings), streams=False)
    plan = autoplan.plan_graph(path, graph, "60%", settings, choices)
    ours = replace(plan, context=replace(plan.context, flash_attn="off", n_ubatch=64))
    stock = stock_plans(path, graph, ours, "60%", settings, choices)
    assert list(stock) == names and ("does the same" in capsys.readouterr().err) == (names == ["layers"])
    assert all(p.predicted.devices[device].total <= plan.budgets[device] for p in stock.values())
    with ExitStack() as stack:
        engines = {e.name: e for e in Rivals(ours, stock).engines(settings, ("h:1",), False, stack, everything=False)}
    assert list(engines) == ["llama.cpp", *["llama.cpp --fit"] * ("fit" in stock), "oallama", "llama.cpp CPU"]
    for name, one in engines.items():
        mine = name == "oallama"
        assert one.lib_dir != baseline_lib if mine else one.lib_dir == baseline_lib
        assert (one.params.flash_attn, one.params.n_ubatch) == (("off", 64) if mine else ("auto", 256)), name
    assert engines["llama.cpp"].params.n_gpu_layers == stock["layers"].planner["params"]["n_gpu_layers"]
    if "fit" in stock:
        assert bool(engines["llama.cpp --fit"].params.override_tensor) == bool(
            stock["fit"].planner["params"]["overrides"]
        )


@pytest.mark.parametrize(("type_v", "forms"), [("f16", ["on", "off"]), ("q8_0", ["on"])])
def test_rivals_without_a_device_are_llama_cpps_cpu_in_both_forms(
    type_v: str, forms: list[str], tiny: Callable[..., Path], baseline_lib: Path
) -> None:
    path = tiny("llama")
    settings = Settings(n_ctx=256, n_batch=256, n_ubatch=128, n_threads=2, type_v=type_v)
    graph = autoplan.read_graph(path, settings)
    choices = autoplan.Choices(device=HOST, profile=made_profile(path, None, settings))
    plan = autoplan.plan_graph(path, graph, None, settings, choices)
    ours = replace(plan, context=replace(plan.context, attention="oallama", n_ubatch=64))
    with ExitStack() as stack:
        *stock, planned = Rivals(ours, {}, on_cpu=True).engines(settings, (), False, stack)
    assert [engine.params.flash_attn for engine in stock] == forms and [e.baseline for e in stock] == [True, False][
        : len(forms)
    ]
    assert all(e.lib_dir == baseline_lib and e.backend_map is None and e.params.devices == () for e in stock)
    assert all((e.params.n_ubatch, e.params.type_v) == (128, type_v) for e in stock)
    assert planned.lib_dir != baseline_lib and "attention oallama" in (planned.backend_map or "")
    assert planned.params.n_ubatch == 64 and planned.name == "oallama"


def test_rivals_of_a_plan_that_leaves_the_device_alone(tiny: Callable[..., Path], rpc, baseline_lib: Path) -> None:
    """A plan of the CPU alone has no bytes of its own: stock llama.cpp gets the budget that was asked for."""
    path, device = tiny("llama"), rpc.devices[0]
    settings = Settings(n_ctx=256, n_batch=256, n_threads=2)
    graph = autoplan.read_graph(path, settings)
    choices = autoplan.Choices(device=device, profile=made_profile(path, device, settings))
    plan = autoplan.plan_graph(path, graph, None, settings, replace(choices, planner="cpu"))
    stock = stock_plans(path, graph, plan, "60%", settings, choices)
    assert stock["layers"].predicted.devices[device].weights > 0
