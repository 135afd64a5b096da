"""Drift of a profile: what is measured again, what is said about it, and how the cache is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oallama.data.entries import OTHER, OperatorTime
from oallama.data.profile import Profile
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.profiling import profiler
from oallama.profiling.drift import check_drift, describe_drift
from oallama.profiling.fingerprint import fingerprint
from oallama.profiling.workload import Task, tasks_for
from support import synthetic


class FakeProbe:
    """Answers with `times[device]` seconds and notes what it was asked."""

    asked: Sequence[tuple[str, int, float, dict[str, Any]]]

    def __init__(self, seconds: Callable[[str, dict[str, Any]], float]) -> None:
        self.seconds, self.asked = seconds, []

    def __call__(self, device: str, n_threads: int, max_s: float) -> FakeProbe:
        self.device, self.settings = device, (n_threads, max_s)
        return self

    def measure(self, task: Task) -> list[OperatorTime]:
        a = task.args
        assert task.kind == "mul_mat"
        self.asked = [*self.asked, (self.device, *self.settings, a)]
        ne = (a["k"], a["m"], max(1, a["n_expert"]))
        return [OperatorTime(self.device, "MUL_MAT", a["type"], ne, 1, a["n_tokens"], self.seconds(self.device, a))]


def dense(m: int, median_s: float, n_tokens: int = 1, device: str = "CPU", op: str = "MUL_MAT") -> OperatorTime:
    return OperatorTime(device, op, "q8_0", (64, m, 1), 1, n_tokens, median_s)


def a_profile(*operators: OperatorTime) -> Profile:
    return replace(synthetic.profile(synthetic.graph()), operators=operators)


def test_the_heaviest_decode_entries_are_measured_again() -> None:
    profile = a_profile(
        dense(1, 0.1), dense(2, 0.2), dense(3, 0.3), dense(4, 0.4),
        dense(5, 9.0, n_tokens=512), dense(6, 9.0, op=OTHER), dense(7, 9.0, device=synthetic.DEVICE),
    )  # fmt: skip
    probe = FakeProbe(lambda device, a: 0.15 * a["m"])  # then: 0.1 * m
    assert check_drift(profile, ["CPU"], 3, max_entries=3, max_s=1.5, make_probe=probe) == pytest.approx({"CPU": 1.5})
    assert [a["m"] for *_, a in probe.asked] == [4, 3, 2]
    assert {(device, n_threads, max_s) for device, n_threads, max_s, _ in probe.asked} == {("CPU", 3, 0.5)}
    assert all(a["n_tokens"] == 1 and a["n_expert"] == a["n_used"] == 0 for *_, a in probe.asked)


def test_one_odd_entry_does_not_decide() -> None:
    profile = a_profile(dense(1, 0.1), dense(2, 0.2), dense(3, 0.3))
    probe = FakeProbe(lambda device, a: 30.0 if a["m"] == 2 else 0.1 * a["m"])
    assert check_drift(profile, ["CPU"], 1, make_probe=probe)["CPU"] == pytest.approx(1.0)


def test_every_device_has_its_own_ratio() -> None:
    profile = a_profile(dense(1, 0.1), dense(1, 0.1, device=synthetic.DEVICE))
    probe = FakeProbe(lambda device, a: 0.2 if device == "CPU" else 0.05)
    ratios = check_drift(profile, [synthetic.DEVICE, "CPU"], 1, make_probe=probe)
    assert ratios == pytest.approx({synthetic.DEVICE: 0.5, "CPU": 2.0})


def test_experts_are_measured_as_experts() -> None:
    entry = OperatorTime("CPU", "MUL_MAT_ID", "q4_0", (64, 32, 8), 2, 1, 0.5)
    probe = FakeProbe(lambda device, a: 0.5)
    check_drift(a_profile(entry), ["CPU"], 1, make_probe=probe)
    asked = {"type": "q4_0", "k": 64, "m": 32, "n_tokens": 1, "n_expert": 8, "n_used": 2, "realisation": ""}
    assert probe.asked[0][-1] == asked


def test_tasks_are_the_profilers(tiny: Callable[..., Path]) -> None:
    """What is measured again must be what was measured, or the ratio would compare two things."""
    graph = autoplan.read_graph(tiny("qwen3moe"), Settings(n_ctx=64))
    tasks = {t.arguments for t in tasks_for(graph, depths=[64], type_k="f16", type_v="f16", accelerator=False)}
    profile = synthetic.profile(graph)
    probe = FakeProbe(lambda device, a: 1.0)
    check_drift(profile, ["CPU"], 1, max_entries=99, make_probe=probe)
    assert len(probe.asked) > 3
    assert {tuple(sorted(a.items())) for *_, a in probe.asked} <= tasks


def test_what_cannot_be_checked() -> None:
    probe = FakeProbe(lambda device, a: 1.0)
    with pytest.raises(OallamaError, match="no device 'CUDA7'"):
        check_drift(a_profile(dense(1, 0.1)), ["CUDA7"], 1, make_probe=probe)
    with pytest.raises(OallamaError, match=r"no decode times of CPU.*oallama profile"):
        check_drift(a_profile(dense(1, 0.0), dense(2, 0.1, n_tokens=512)), ["CPU"], 1, make_probe=probe)


def test_lines_are_for_devices_that_changed() -> None:
    ratios = {"CUDA0": 1.149, "CPU": 1.31, "RPC0": 0.5, "RPC1": 0.9}
    slower, faster = describe_drift(ratios, recorded="2026-01-31")
    assert slower == (
        "CPU: 1.31x slower than when the profile was recorded (2026-01-31); "
        "record it again with `oallama profile MODEL.gguf --fresh`"
    )
    assert faster.startswith("RPC0: 2.00x faster than when the profile was recorded (2026-01-31);")
    assert describe_drift(ratios, tolerance=2.0) == []


def test_the_real_probe_answers(tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No assertion about time: only that what was recorded can be measured again, and dropped."""
    monkeypatch.setattr(profiler, "cpus_of_others", lambda: 1.0)  # else doubtful times would be measured again
    graph = autoplan.read_graph(tiny("llama"), Settings(n_ctx=64))
    said: list[str] = []

    def measure() -> Profile:
        said.clear()
        return profiler.profile_machine(
            graph, [], n_threads=1, depths=[64], cache=tmp_path, progress=lambda done, total, text: said.append(text)
        )

    profile = measure()
    assert profile.is_stale(fingerprint(["CPU"], 1)) == []
    assert check_drift(profile, ["CPU"], 1, max_entries=1, max_s=0.02)["CPU"] > 0
    n_tasks = len(said)
    measure()
    assert len(said) == 1  # complete: nothing was measured again
    profiler.forget(["CPU"], 2, cache=tmp_path)
    measure()
    assert len(said) == 1  # another number of threads is another profile
    profiler.forget([], 1, cache=tmp_path)
    assert not any(tmp_path.iterdir())
    measure()
    assert len(said) == n_tasks > 1
