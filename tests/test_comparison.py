"""Engines that a device cannot hold at once are measured in turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from made_profile import made_profile
from oallama import autoplan, engine
from oallama.bench import Engine, LoadParams
from oallama.cli.comparison import interleave_for


@pytest.mark.parametrize(
    ("asked", "each", "expected"),
    [("loaded", 0.4, "loaded"), ("loaded", 0.5, "reload"), ("reload", 0.1, "reload")],
)
def test_interleave(
    asked: str, each: float, expected: str, tiny: Callable[..., Path], rpc, capsys: pytest.CaptureFixture[str]
) -> None:
    path, device = tiny("llama"), rpc.devices[0]
    settings = engine.Settings(n_ctx=256, n_batch=256, n_threads=2)
    choices = autoplan.Choices(device=device, profile=made_profile(path, device, settings), planner="oato")
    plan = autoplan.plan_model(path, "50%", settings, choices)
    size = {device: int(engine.device(device).memory_free * each)}
    on_device = LoadParams(devices=(device,))
    engines = [
        Engine("a", ".", on_device, predicted_bytes=size),
        Engine("b", ".", on_device, predicted_bytes=size),
        Engine("cpu", ".", LoadParams(devices=())),
    ]
    assert interleave_for(asked, engines, plan) == expected
    assert ("take turns" in capsys.readouterr().err) == (asked != expected)
