"""Profile: look-ups say how they know, files are checked and never half-written."""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oallama.bench.script import read
from oallama.data.curves import log_log, per_token, piecewise_linear
from oallama.data.entries import AttentionTime, DeviceInfo, LinkTime, Note, OperatorTime, OtherLoad, SwitchTime
from oallama.data.profile import RECORDED, Profile
from oallama.errors import OallamaError
from support.paths import ROOT
from support.synthetic import DEVICE, graph, profile


def op(n_tokens, seconds, ne=(64, 128, 1), op="MUL_MAT", type="f16", n_used=1):
    return OperatorTime("CPU", op, type, ne, n_used, n_tokens, seconds)


def make(**parts) -> Profile:
    return Profile(
        created="2026-01-01", fingerprint={"cpu": "a", "threads": 2}, devices=(DeviceInfo("CPU", "", "cpu", 1, "CPU"),),
        **parts,
    )  # fmt: skip


# ---- operators -----------------------------------------------------------------------------------------------------


def test_measured_and_interpolated():
    p = make(operators=(op(1, 1e-3), op(100, 1e-1)))
    assert p.op_time("CPU", "MUL_MAT", "f16", (64, 128), 1) == (1e-3, "measured")
    between = p.op_time("CPU", "MUL_MAT", "f16", (64, 128, 1, 1), 10)
    assert between.source == "interpolated" and between.seconds == pytest.approx(1e-2)


def test_realisations_are_told_apart():
    plain, repacked = (
        (replace(op(1, 2.0), realisation="plain"), replace(op(32, 4.0), realisation="plain")),
        (replace(op(1, 1.0), realisation="repacked"), replace(op(32, 8.0), realisation="repacked")),
    )
    key = ("CPU", "MUL_MAT", "f16", (64, 128))
    p = make(operators=plain + repacked)
    assert p.realisations(*key) == ("plain", "repacked")
    assert [p.op_time(*key, 1, realisation=r).seconds for r in ("plain", "repacked")] == [2.0, 1.0]
    assert p.op_time(*key, 32, realisation="plain") == (4.0, "measured")
    assert p.op_time(*key, 32).seconds == 8.0  # llama.cpp's own: repacked where it can
    other = ("CPU", "MUL_MAT", "f16", (64, 256))
    assert p.realisations(*other) == ()
    assert p.op_time(*other, 1, realisation="plain").seconds == pytest.approx(4.0)
    # Each has curves of its own, however few points.
    assert make(operators=(*plain, repacked[0])).op_time(*key, 32).source == "scaled"


def test_an_older_profile_has_one_realisation(tmp_path):
    made = make(operators=(op(1, 1.0),))
    content = asdict(made)
    del content["operators"][0]["realisation"]
    (tmp_path / "old.json").write_text(json.dumps(content))
    older = Profile.load(tmp_path / "old.json")
    assert older == made
    key = ("CPU", "MUL_MAT", "f16", (64, 128))
    assert older.realisations(*key) == ()
    assert {older.op_time(*key, 1, realisation=r).seconds for r in ("", "plain", "repacked")} == {1.0}
    content["operators"][0]["realisation"] = "packed"
    (tmp_path / "wrong.json").write_text(json.dumps(content))
    with pytest.raises(OallamaError, match="realisation is 'packed', expected nothing or plain or repacked"):
        Profile.load(tmp_path / "wrong.json")


def test_beyond_measured_tokens_each_costs_its_part_of_the_last_point():
    p = make(operators=(op(1, 1e-3), op(100, 1e-2)))
    beyond = p.op_time("CPU", "MUL_MAT", "f16", (64, 128), 10000)
    assert beyond.source == "scaled" and beyond.seconds == pytest.approx(1.0)
    single = make(operators=(op(8, 1e-3),))
    assert single.op_time("CPU", "MUL_MAT", "f16", (64, 128), 16).seconds == pytest.approx(2e-3)
    assert single.op_time("CPU", "MUL_MAT", "f16", (64, 128), 2).seconds == pytest.approx(1e-3)


def test_nearest_shape_is_scaled_by_its_weights():
    p = make(operators=(op(1, 1e-3, (64, 128, 1)), op(1, 1.0, (6400, 12800, 1))))
    scaled = p.op_time("CPU", "MUL_MAT", "f16", (64, 256), 1)
    assert scaled.source == "scaled" and scaled.seconds == pytest.approx(2e-3)


def test_experts_scale_by_active_ones():
    p = make(operators=(op(1, 8e-3, (64, 128, 64), "MUL_MAT_ID", n_used=8),))
    scaled = p.op_time("CPU", "MUL_MAT_ID", "f16", (64, 128, 64), 1, n_used=4)
    assert scaled.seconds == pytest.approx(4e-3)
    dense = make(operators=(op(1, 1e-3),))
    from_dense = dense.op_time("CPU", "MUL_MAT_ID", "f16", (64, 128, 64), 1, n_used=8)
    assert from_dense.source == "scaled" and from_dense.seconds == pytest.approx(8e-3)


def test_unmeasured_type_names_the_command():
    with pytest.raises(OallamaError, match=r"no MUL_MAT of type q4_K on CPU.*oallama profile"):
        make(operators=(op(1, 1.0),)).op_time("CPU", "MUL_MAT", "q4_K", (64, 128), 1)


def test_other_operators():
    assert make().other_op_time("CPU", 1, 64) is None
    p = make(operators=(op(1, 2e-6, (64, 1, 1), "OTHER", "f32"), op(1, 5e-6, (4096, 1, 1), "OTHER", "f32")))
    assert p.other_op_time("CPU", 1, 128) == 2e-6
    assert p.other_op_time("CPU", 1, 5120) == 5e-6


# ---- attention, links, switches ------------------------------------------------------------------------------------


def attention(n_tokens, depth, seconds, type_k="f16", n_head_kv=2):
    return AttentionTime("CPU", 4, n_head_kv, 16, 16, type_k, "f16", n_tokens, depth, seconds)


def test_attention_is_linear_in_depth():
    p = make(attention=(attention(1, 0, 1e-3), attention(1, 1000, 3e-3), attention(100, 0, 1e-1)))
    shape = (4, 2, 16, 16)
    assert p.attention_time("CPU", shape, 1, 1000) == (3e-3, "measured")
    halfway = p.attention_time("CPU", shape, 1, 500)
    assert halfway.source == "interpolated" and halfway.seconds == pytest.approx(2e-3)
    assert p.attention_time("CPU", shape, 10, 0).seconds == pytest.approx(1e-2)
    assert p.attention_time("CPU", shape, 1, 2000).seconds == pytest.approx(5e-3)


def test_fewer_rows_than_were_measured_take_less():
    """On CPUs the fused form skips what is hidden: the first depth, 256, must not stand for all below it."""
    p = make(attention=(attention(1, 256, 3e-3), attention(1, 1024, 9e-3)))
    shape = (4, 2, 16, 16)
    assert p.attention_time("CPU", shape, 1, 128).seconds == pytest.approx(2e-3)
    # Never below the share of the rows, never above the first point.
    steep = make(attention=(attention(1, 256, 1e-3), attention(1, 1024, 9e-3)))
    assert steep.attention_time("CPU", shape, 1, 128).seconds == pytest.approx(5e-4)
    falling = make(attention=(attention(1, 256, 3e-3), attention(1, 1024, 1e-3)))
    assert falling.attention_time("CPU", shape, 1, 128).seconds == pytest.approx(3e-3)


def test_notes_are_kept(tmp_path):
    noted = make(notes=(Note("CPU", "norms and adds", "not measured: no room"),))
    noted.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == noted
    with pytest.raises(OallamaError, match=r"no MUL_MAT of type q4_K on CPU.*the profiler noted: CPU: not measured"):
        noted.op_time("CPU", "MUL_MAT", "q4_K", (64, 128), 1)


def test_attention_of_another_shape_or_type_is_scaled():
    p = make(attention=(attention(1, 0, 1e-3),))
    assert p.attention_time("CPU", (4, 2, 32, 32), 1, 0) == (pytest.approx(2e-3), "scaled")
    assert p.attention_time("CPU", (4, 2, 16, 16), 1, 0, type_k="q8_0").source == "scaled"
    with pytest.raises(OallamaError, match=r"no attention on GPU0 .*4 heads on 2.*oallama profile .*--device GPU0"):
        p.attention_time("GPU0", (4, 2, 16, 16), 1, 0)


def test_links_are_piecewise_linear_with_latency():
    p = make(links=(LinkTime("GPU0", "h2d", "pageable", 1000, 1e-5), LinkTime("GPU0", "h2d", "pageable", 2000, 2e-5)))
    assert p.link_time("GPU0", "h2d", 1) == 1e-5
    assert p.link_time("GPU0", "h2d", 1500) == pytest.approx(1.5e-5)
    assert p.link_time("GPU0", "h2d", 4000) == pytest.approx(4e-5)
    assert p.link_time("GPU0", "h2d", 1500, "pinned") == pytest.approx(1.5e-5)
    with pytest.raises(OallamaError, match=r"no d2h link of GPU0.*oallama profile"):
        p.link_time("GPU0", "d2h", 1)


def test_switch():
    assert make(switches=(SwitchTime("GPU0", 3e-5),)).switch_time("GPU0") == 3e-5
    assert make().switch_time("GPU0") is None


def test_many_tokens_cost_the_same_each():
    curve = [(1, 1.0), (32, 2.0), (512, 17.0)]
    assert per_token(curve, 128) == pytest.approx(2 + 15 * 96 / 480) and per_token(curve, 1024) == pytest.approx(34)
    assert per_token(curve, 8) == log_log(curve, 8)
    assert per_token([(1, 1.0), (8, 2.0)], 4) == pytest.approx(4 ** (1 / 3))


def test_linear_in_many_tokens_is_nearer_than_log_log_to_what_was_recorded():
    curves: dict[tuple[str, str], dict[int, float]] = {}
    for line in read(ROOT / "bench/results" / "2026-11-25-products.jsonl"):
        for form, ms in line["ms"].items():
            curves.setdefault((line["type"], form), {})[line["rows"]] = ms
    whole = [curve for curve in curves.values() if {32, 128, 512} <= curve.keys()]
    linear, log = (
        statistics.median(abs(at([(32, c[32]), (512, c[512])], 128) / c[128] - 1) for c in whole)
        for at in (per_token, log_log)
    )
    assert len(whole) == 22 and linear < 0.03 < 0.06 < log


points = st.dictionaries(st.integers(1, 10**6), st.floats(1e-7, 10), min_size=1, max_size=6).map(
    lambda d: sorted(d.items())
)


@given(points, st.integers(1, 10**7))
def test_curves_stay_positive_and_meet_their_points(curve, x):
    for at in (log_log, per_token, piecewise_linear):
        assert at(curve, x) >= 0
        for n, seconds in curve:
            assert at(curve, n) == pytest.approx(seconds)
        inside = [s for n, s in curve if n <= x], [s for n, s in curve if n >= x]
        if all(inside):
            low, high = sorted((inside[0][-1], inside[1][0]))
            assert low * 0.999999 <= at(curve, x) <= high * 1.000001


# ---- file ----------------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path):
    p = replace(profile(graph()), loads=(OtherLoad("CPU", 0.25),))
    path = tmp_path / "deep" / "profile.json"
    p.save(path)
    assert Profile.load(path) == p
    assert [f.name for f in path.parent.iterdir()] == ["profile.json"]


def test_newer_fields_are_ignored(tmp_path):
    path = tmp_path / "p.json"
    profile(graph()).save(path)
    content = json.loads(path.read_text())
    content["operators"][0]["note"] = "fused"
    path.write_text(json.dumps(content))
    assert Profile.load(path) == profile(graph())


def test_stale_fingerprint():
    p = make()
    assert p.is_stale({"cpu": "a", "threads": 2}) == []
    assert p.is_stale({"cpu": "a", "threads": 4}) == ["threads: profile has 2, this machine 4"]
    assert p.is_stale({"cpu": "a", "threads": 2, "driver": "1"}) == ["driver: profile has nothing, this machine 1"]


def test_unknown_device():
    with pytest.raises(OallamaError, match=r"no device 'GPU7'.*GPU0, CPU"):
        profile(graph()).device("GPU7")
    assert profile(graph()).device(DEVICE).op_offload


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "expected an object"),
        ("{}", "schema None"),
        ('{"schema": "oallama.profile/9"}', "oallama.profile/9"),
        ('{"schema": "oallama.profile/1"}', "'created'"),
        ('{"schema": "oallama.profile/1", "created": "", "fingerprint": {}, "devices": [{}]}', "not a valid"),
        ('{"schema": "oallama.profile/1", "created": "", "fingerprint": {}, "devices": [3]}', r"devices\[0\] is 3"),
    ],
)
def test_bad_files(tmp_path, text, words):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(OallamaError, match=words) as error:
        Profile.load(path)
    assert str(path) in str(error.value) and "oallama profile" in str(error.value) and "\n" not in str(error.value)


def change(section, key, value, i=0):
    """What a hand may do to a profile file: one value of one entry."""
    return lambda content: content[section][i].__setitem__(key, value)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda c: c["devices"].append(c["devices"][0]), "device 'GPU0' is listed 2 times"),
        (change("operators", "median_s", 0), r"operators\[0\] \(GPU0, MUL_MAT, f16.*median_s is 0, expected more"),
        (change("operators", "median_s", float("inf"), 2), r"operators\[2\] .*median_s is inf"),
        (change("operators", "median_s", float("nan")), r"operators\[0\] .*median_s is nan"),
        (change("operators", "median_s", "1 ms"), r"operators\[0\] .*median_s is '1 ms'"),
        (change("operators", "median_s", True), r"operators\[0\] .*median_s is True"),
        (change("operators", "spread_s", -1e-6), r"operators\[0\] .*spread_s is -1e-06"),
        (change("operators", "n_tokens", 0), r"operators\[0\] .*n_tokens is 0"),
        (change("operators", "ne", [64, -1, 1]), r"operators\[0\] .*ne is \(64, -1, 1\)"),
        (change("operators", "ne", [64]), r"operators\[0\] .*ne is \(64,\)"),
        (change("operators", "device", "GPU1"), r"operators\[0\] is for the device 'GPU1'.*\(GPU0, CPU\)"),
        (lambda c: c["operators"][0].pop("median_s"), r"operators\[0\] has no median_s"),
        (change("attention", "median_s", 0.0), r"attention\[0\] .*median_s is 0.0"),
        (change("attention", "head_dim_k", 0), r"attention\[0\] .*head_dim_k is 0"),
        (change("attention", "depth", -1), r"attention\[0\] .*depth is -1"),
        (change("links", "median_s", 0), r"links\[0\] .*median_s is 0"),
        (change("links", "bytes", 0), r"links\[0\] .*bytes is 0"),
        (change("links", "direction", "up"), r"links\[0\] .*direction is 'up', expected h2d or d2h"),
        (change("switches", "median_s", -1), r"switches\[0\] .*median_s is -1, expected 0 or more"),
        (change("switches", "device", "GPU1"), r"switches\[0\] is for the device 'GPU1'"),
        (change("devices", "memory_total", -1), r"devices\[0\] .*memory_total is -1"),
        (lambda c: c.update(source="guessed"), "source is 'guessed'"),
        (lambda c: c.update(loads=[{"device": "CPU", "cpus": -1}]), r"loads\[0\] .*cpus is -1, expected 0 or more"),
    ],
)
def test_a_hand_written_profile_is_checked(tmp_path, spoil, words):
    path = tmp_path / "profile.json"
    profile(graph()).save(path)
    content = json.loads(path.read_text())
    spoil(content)
    path.write_text(json.dumps(content))
    with pytest.raises(OallamaError, match=words) as error:
        Profile.load(path)
    assert str(path) in str(error.value) and "correct the entry" in str(error.value)


def test_a_free_device_change_and_an_older_file_are_fine(tmp_path):
    path = tmp_path / "profile.json"
    profile(graph()).save(path)
    content = json.loads(path.read_text())
    content["switches"][0]["median_s"] = 0
    del content["source"]
    path.write_text(json.dumps(content))
    loaded = Profile.load(path)
    assert loaded.switch_time(DEVICE) == 0 and loaded.source == "measured"


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_recorded_profiles_load_by_name(name):
    recorded = Profile.load(name)
    assert recorded.source == "measured" and recorded.operators and recorded.attention
    assert all(recorded.switch_time(d.name) is not None for d in recorded.devices if d.name != "CPU")


def test_unknown_name_lists_the_recorded_ones():
    with pytest.raises(OallamaError, match=r"no recorded profile is called 'my-machine': take one of .*xeon"):
        Profile.load("my-machine")


def test_missing_file_directory_and_binary(tmp_path):
    with pytest.raises(OallamaError, match="does not exist"):
        Profile.load(tmp_path / "no.json")
    with pytest.raises(OallamaError, match="is a directory"):
        Profile.load(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OallamaError, match="not text"):
        Profile.load(tmp_path / "b.json")


def test_write_error_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    old = make()
    old.save(path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OallamaError, match=r"cannot write profile .*Permission denied; choose a folder"):
        replace(old, created="later").save(path)
    assert Profile.load(path) == old
    assert [f.name for f in tmp_path.iterdir()] == ["profile.json"]


def test_interrupt_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make().save(tmp_path / "profile.json")
    assert list(tmp_path.iterdir()) == []
