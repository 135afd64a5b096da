"""The table of `oallama tune`: thresholds from its points, found again by fingerprint, by nobody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oallama.cli.tune import tuning_table
from oallama.data.tuning import (
    Crossover,
    Tuning,
    find_tuning,
    first_wins_to,
    mmvq_limits,
    second_wins_from,
    tuning_file,
)
from oallama.engine import native
from oallama.errors import OallamaError
from oallama.profiling import tuner

MARK = {"cpu": "one", "driver": "1"}


def table(**more: object) -> Tuning:
    repack = Crossover("repack", "q4_K", (4096, 4096), ((1, 1.0, 1.2), (4, 1.5, 1.2), (64, 16.0, 8.0)))
    mmvq = Crossover("mmvq", "q6_K", (4096, 4096), ((1, 1.0, 2.0), (2, 1.1, 2.0), (3, 2.5, 2.0), (4, 1.9, 2.0)))
    fields = {"created": "2026", "device": "CUDA1", "fingerprint": MARK, "crossovers": (repack, mmvq), **more}
    return Tuning(**fields)  # type: ignore[arg-type]


def test_a_threshold_holds_on_its_whole_side() -> None:
    assert second_wins_from([(1, 1.0, 0.9), (2, 1.0, 1.1), (4, 1.0, 0.9), (8, 1.0, 0.9)]) == 4
    assert second_wins_from([(1, 1.0, 0.9), (2, 1.0, 1.0)]) is None
    assert second_wins_from([(1, 1.0, 0.9)]) == 1
    assert first_wins_to([(1, 9.0, 1.0), (2, 1.0, 2.0)]) == 1  # one column is always MMVQ's
    assert first_wins_to([(1, 1.0, 1.0), (2, 2.0, 3.0)]) == 2
    made = table()
    assert made.of("repack")["q4_K"].threshold == 4 and made.of("mmvq")["q6_K"].threshold == 2
    assert made.of("repack")["q4_K"].ratio(4) == pytest.approx(0.8)
    assert 0.5 < made.of("repack")["q4_K"].ratio(16) < 0.8


def test_a_table_is_found_by_its_fingerprint_only(tmp_path: Path) -> None:
    made = table()
    assert find_tuning(MARK, tmp_path) is None
    path = made.save(tmp_path)
    assert find_tuning(MARK, tmp_path) == made
    other = {**MARK, "driver": "2"}
    assert find_tuning(other, tmp_path) is None
    path.rename(tuning_file(other, tmp_path))  # copied from another machine
    assert find_tuning(other, tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "oallama.tuning/9"}, "expected 'oallama.tuning/1'"),
        ({"crossovers": [{"kind": "speed", "type": "q4_K", "ne": [1, 1], "points": [[1, 1, 1]]}]}, "kind is 'speed'"),
        ({"crossovers": [{"kind": "mmvq", "type": "q4_K", "ne": [1, 1], "points": []}]}, "points of q4_K"),
        ({"crossovers": [{"kind": "mmvq", "type": "q4_K", "ne": [1, 1], "points": [[1, 0, 1]]}]}, "points of q4_K"),
        ({"crossovers": [{"kind": "mmvq"}]}, "not a valid"),
    ],
)
def test_a_wrong_table_is_named_and_not_used(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = table().save(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(OallamaError, match=message):
        Tuning.load(path)
    assert find_tuning(MARK, tmp_path) is None


def test_limits_as_the_engine_reads_them() -> None:
    assert mmvq_limits([table(), table(device="CUDA0")]) == "CUDA1:q6_K=2;CUDA0:q6_K=2"
    assert mmvq_limits([]) == "" and mmvq_limits([table(crossovers=())]) == ""
    core = native.core()
    core.set_mmvq_limits(mmvq_limits([table()]))
    try:
        assert core.mmvq_limit("q6_K", 1) == 2
        assert core.mmvq_limit("q6_K", 0) == 0 and core.mmvq_limit("q4_K", 1) == 0  # upstream's own rule
    finally:
        core.set_mmvq_limit("CUDA1", "q6_K", 0)
    assert core.mmvq_limit("q6_K", 1) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CUDA0:q4_K=9", "9 columns, expected 0 to 8"),
        ("CUDA0:q4_K", "'q4_K', expected type=columns"),
        ("CUDA0:f16=4", "type 'f16', expected a quantised type"),
        ("Vulkan0:q4_K=4", "device 'Vulkan0'"),
        ("CUDA99:q4_K=4", "device 'CUDA99'"),
        ("CUDA0:q4_K=four", "'four', expected a number"),
        ("CUDA0", "'CUDA0', expected DEVICE:type"),
        ("CUDA0:q6_K=3;CUDA0:q4_K=x", "'x'"),
    ],
)
def test_wrong_limits_change_nothing(text: str, message: str) -> None:
    core = native.core()
    with pytest.raises(ValueError, match=message):
        core.set_mmvq_limits(text)
    assert core.mmvq_limit("q6_K", 0) == 0 and core.mmvq_limit("q4_K", 0) == 0


def test_this_cpu_is_tuned_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "_MAX_SECONDS", 0.01)
    monkeypatch.setattr(tuner, "TOKENS", (1, 8))
    made = tuner.tune("CPU", types=["q4_0", "f16"], shape=(256, 256), n_threads=1, cache=tmp_path)
    repacks = native.core().repacks("CPU", "q4_0", 256, 256, 0)
    assert [c.type for c in made.crossovers] == (["q4_0"] if repacks else [])
    assert all(len(c.points) == 2 for c in made.crossovers)
    assert tuner.tuned("CPU", 1, tmp_path) == made
    assert tuner.tuned("CPU", 2, tmp_path) is None
    assert tuning_table(made).row_count == len(made.crossovers)


def test_a_device_without_thresholds_is_refused(rpc, tmp_path: Path) -> None:
    with pytest.raises(OallamaError, match="no thresholds to tune"):
        tuner.tune(rpc.devices[0], cache=tmp_path)
    with pytest.raises(OallamaError, match=r"unknown device|no device"):
        tuner.tune("CUDA9", cache=tmp_path)
    assert tuner.tuned_variable([rpc.devices[0], "CPU"], tmp_path) == {}
