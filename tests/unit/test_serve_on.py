"""What is left of a plan when an RPC server is gone."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oallama.cli import serve_on
from oallama.engine.load_settings import Settings

DEVICES = {"a:1": 2, "b:1": 1}  # behind each server


def left(monkeypatch: pytest.MonkeyPatch, budgets: dict[str, int] | None, *endpoints: str) -> list[str]:
    monkeypatch.setattr(serve_on, "add_rpc_server", lambda endpoint: ["?"] * DEVICES[endpoint])
    plan: Any = None if budgets is None else SimpleNamespace(budgets=budgets)
    served = serve_on.Served(Path("m.gguf"), Settings(), plan, None, tuple(DEVICES), "")
    return serve_on._devices_left(served, endpoints)


def test_devices_keep_their_bytes_and_get_new_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = {"CUDA0": 5, "RPC0": 1, "RPC1": 2, "RPC2": 3}
    assert left(monkeypatch, budgets, "b:1") == ["--rpc", "b:1", "--device", "CUDA0,RPC0", "--vram", "CUDA0=5,RPC0=3"]
    rest = ["--rpc", "a:1", "--device", "CUDA0,RPC0,RPC1", "--vram", "CUDA0=5,RPC0=1,RPC1=2"]
    assert left(monkeypatch, budgets, "a:1") == rest


@pytest.mark.parametrize("budgets", [None, {}, {"RPC0": 1, "RPC2": 3}])
def test_without_any_the_cpu_computes(monkeypatch: pytest.MonkeyPatch, budgets: dict[str, int] | None) -> None:
    assert left(monkeypatch, budgets) == ["--device", "CPU"]
