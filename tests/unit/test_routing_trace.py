"""Routing traces: the file is checked when it is read, and tables fit a terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from oallama.data.expert_hits import POLICIES, hit_rates
from oallama.data.routing import JUDGED, NONE, STAGES, Routers, RoutingTrace, StageRouting, is_trace
from oallama.errors import OallamaError
from oallama.views.routing import default_ks, render_trace
from oallama.views.routing_plot import write_trace_plot

ROUTERS = Routers("qwen3moe", 16, "ab" * 32)


def chosen(n_tokens: int, used: tuple[int, ...] = (4, 4), n_experts: int = 16, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((len(used), n_tokens, n_experts)), axis=2)[:, :, : max(used)].astype(np.uint16)
    for layer, number in enumerate(used):
        ids[layer, :, number:] = NONE
    return ids


def made(used: tuple[int, ...] = (4, 4), routers: Routers = ROUTERS) -> RoutingTrace:
    stages = {
        name: StageRouting.judge(chosen(n, used, routers.n_experts), routers.n_experts)
        for name, n in zip(STAGES, (70, 20), strict=True)
    }
    return RoutingTrace("2026-11-25T08:00:00", "m.gguf", "a text", routers, tuple(range(len(used))), 32, stages)


def same(a: RoutingTrace, b: RoutingTrace) -> bool:
    parts = [
        np.array_equal(getattr(a.stages[s], part), getattr(b.stages[s], part))
        for s in STAGES
        for part in ("ids", "hits", "unions")
    ]
    return all(parts) and replace(a, stages={}) == replace(b, stages={})


def rewritten(path: Path, **changes: Any) -> Path:
    """The same file with other arrays; about: changed fields."""
    with np.load(path) as archive:
        content = {name: archive[name] for name in archive.files}
    about = json.loads(content["about"].tobytes()) | changes.pop("about", {})
    content["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    other = path.with_name("other.npz")
    np.savez_compressed(other, **(content | changes))
    return other


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "trace.npz"
    made().save(path)
    return path


def test_a_file_gives_the_same_trace(file: Path) -> None:
    assert same(RoutingTrace.load(file), made()) and is_trace(file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # nothing is left beside it


def test_layers_may_use_different_numbers(tmp_path: Path) -> None:
    trace, path = made((4, 2, 4)), tmp_path / "t.npz"
    trace.save(path)
    assert same(RoutingTrace.load(path), trace) and trace.n_used == (4, 2, 4)
    alone = chosen(70, (4, 2, 4))[1:2, :, :2]
    for policy, found in zip(POLICIES, trace.stages["prefill"].hits, strict=True):
        assert found[1] == pytest.approx(hit_rates(alone, 16, policy)[0])
    assert trace.counts("prefill").sum(axis=1).tolist() == [280, 140, 280]


def test_another_models_trace_is_refused(file: Path) -> None:
    trace = RoutingTrace.load(file)
    trace.check_model(ROUTERS, file, "m.gguf")
    for other in (replace(ROUTERS, sha256="cd" * 32), replace(ROUTERS, n_experts=32)):
        with pytest.raises(OallamaError, match=r"trace\.npz is of another model than n\.gguf.*m\.gguf.*--routing"):
            trace.check_model(other, file, "n.gguf")


def test_a_file_that_is_cut_off_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for n in {*range(0, len(content), 97), len(content) - 1}:
        file.write_bytes(content[:n])
        with pytest.raises(OallamaError, match=r"trace\.npz is cut off or damaged.*--routing"):
            RoutingTrace.load(file)


def test_damaged_bytes_are_refused_or_do_not_matter(file: Path) -> None:
    content = file.read_bytes()
    rng = np.random.default_rng(2)
    for place in rng.integers(0, len(content), 300):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        file.write_bytes(damaged)
        try:
            RoutingTrace.load(file)
        except OallamaError as error:
            assert "trace.npz" in str(error)


def test_what_no_recording_gives_is_refused(file: Path) -> None:
    stage = made().stages["decode"]
    too_high, unused, half = stage.ids.copy(), stage.ids.copy(), stage.ids.copy()
    too_high[0, 3, 1] = 16
    unused[1, 3, 1] = NONE
    half[:, :, 3] = NONE
    for changes, reason in (
        ({"about": {"schema": "oallama.routing/9"}}, "has schema 'oallama.routing/9'"),
        ({"about": {"policies": ["static"]}}, "policies"),
        ({"about": {"layers": [0]}}, "shape"),
        ({"about": {"routers": {"arch": "x"}}}, "sha256"),
        ({"decode_ids": too_high}, "experts that a model of 16 has not"),
        ({"decode_ids": unused}, "experts that a model of 16 has not"),
        ({"decode_ids": half}, "different numbers of experts"),
        ({"decode_ids": stage.ids.astype(np.int32)}, "type int32"),
        ({"decode_ids": stage.ids[:, :0]}, "shape"),
        ({"decode_hits": stage.hits[:, :, :9]}, "shape"),
        ({"decode_hits": stage.hits + 1}, "from 0 to 1"),
        ({"decode_hits": stage.hits * np.nan}, "from 0 to 1"),
        ({"decode_unions": stage.unions * 20}, "from 1 to 16"),
        ({"decode_unions": np.array([object()])}, "damaged"),
    ):
        with pytest.raises(OallamaError, match=rf"other\.npz.*{reason}"):
            RoutingTrace.load(rewritten(file, **changes))
    with pytest.raises(OallamaError, match=r"nowhere\.npz does not exist"):
        RoutingTrace.load(file.with_name("nowhere.npz"))


def test_a_text_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("PK, a short text")
    assert not is_trace(tmp_path / "text")


def test_k_is_one_of_the_models() -> None:
    trace = made()
    assert trace.hit_rate("decode", "belady", 16).tolist() == [1, 1]
    for k in (0, 17):
        with pytest.raises(OallamaError, match=f"{k} of a layer's experts: the model has 16"):
            trace.hit_rate("decode", "lru", k)


def test_long_stages_are_judged_by_their_beginning() -> None:
    ids = chosen(JUDGED + 1000, (2,), 4)
    stage = StageRouting.judge(ids, 4)
    assert stage.judged == JUDGED and stage.n_tokens == JUDGED + 1000
    assert stage.hits[1, 0] == pytest.approx(hit_rates(ids[:, :JUDGED], 4, "lru")[0])


@pytest.mark.parametrize("n_experts", [16, 512])
def test_tables_fit_a_terminal(n_experts: int) -> None:
    trace = made(routers=replace(ROUTERS, n_experts=n_experts))
    out = io.StringIO()
    Console(file=out, width=80, no_color=True).print(render_trace(trace, default_ks(n_experts)))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert all(len(line) <= 80 for line in lines) and "…" not in out.getvalue()
    row = next(line.split() for line in lines if line.split()[:1] == [str(n_experts)])
    assert row[1] == "100.0%" and row[2] == row[5] == "100.0%"


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_trace_plot(made(), tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
