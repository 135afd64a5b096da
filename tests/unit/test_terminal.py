"""Words for people: progress where no terminal shows a bar, names of models."""

from __future__ import annotations

import pytest

from oallama.base.printing import model_name
from oallama.cli import terminal


def test_a_pipe_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now, announced = [100.0], []
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    report = terminal.in_lines("profiling", lambda done, total, what: announced.append(done))
    for second in range(25):
        now[0] = 100.0 + second
        report(second, 50, f"step {second}")
    assert capsys.readouterr().err == "profiling: 20%, step 10\nprofiling: 40%, step 20\n"
    assert len(announced) == 25


def test_nothing_is_said_before_the_work_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = terminal.in_lines("profiling")
    monkeypatch.setattr(terminal.time, "monotonic", lambda: 1e9)
    report(0, 0, "")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("description", "n_params", "shown"),
    [
        ("llama ?B Q4_0", 247_100_000, "llama 247M Q4_0"),
        ("qwen3moe ?B F16", 3_050_000_000, "qwen3moe 3.05B F16"),
        ("llama 8B Q4_K - Medium", 8_030_000_000, "llama 8B Q4_K - Medium"),
        ("", 0, ""),
    ],
)
def test_models_are_named_by_their_size(description: str, n_params: int, shown: str) -> None:
    assert model_name(description, n_params) == shown
