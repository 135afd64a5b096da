"""Datasheets: rooflines checked by hand, profiles marked as computed, nonsense refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from oallama.cli.app import app
from oallama.data.plan import HOST, PlacementPlan, TensorPlacement
from oallama.data.profile import Profile
from oallama.engine import device_list, skeleton
from oallama.engine.device_list import Device
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan, start
from oallama.loading.dry_run import LocalAllocators, stand_ins
from oallama.profiling.datasheet import FOLDER, Accelerator, Cpu, Datasheet, Link, ShapeEfficiency, make_profile
from support.hand_plan import hand_plan
from support.synthetic import SMALL, graph

SHEET = Datasheet(
    "box",
    Cpu("host", cores=4, dram_gb_s=50, ghz=2, flops_per_cycle=32, bandwidth_efficiency=0.5, compute_efficiency=0.5),
    (
        Accelerator(
            "CUDA0",
            "card",
            memory_bytes=2**33,
            memory_gb_s=1000,
            fp16_tflops=100,
            link=Link(30, pinned_efficiency=0.8, pageable_efficiency=0.4, latency_s=1e-5),
            launch_s=2e-6,
            bandwidth_efficiency=0.8,
            compute_efficiency=0.5,
        ),
    ),
)


# ---- rooflines -----------------------------------------------------------------------------------------------------


def test_an_operator_by_hand():
    """ffn_up of the small model: 64 x 128 in F16, 16384 bytes of weights."""
    made = make_profile(graph(), SHEET)
    wide = ("MUL_MAT", "f16", (64, 128))
    one_row = 16384 + 4 * (64 + 128)
    assert made.op_time("CUDA0", *wide, 1) == (pytest.approx(one_row / 800e9 + 2e-6), "measured")
    assert made.op_time("CPU", *wide, 1).seconds == pytest.approx(one_row / 25e9 + 3e-6)
    # 512 rows: 2 * 64 * 128 * 512 flops on 4 cores * 2 GHz * 32 * 0.5 are slower than their bytes.
    assert made.op_time("CPU", *wide, 512).seconds == pytest.approx(2 * 64 * 128 * 512 / 128e9 + 3e-6)


def test_a_shape_of_the_cpu_has_efficiencies_of_its_own():
    """Of the weight's type the nearest shape's; other types and the accelerator keep the general ones."""
    shapes = (ShapeEfficiency("f16", 64, 120, 0.25, 0.1), ShapeEfficiency("f16", 64, 40, 0.4, 0.2))
    shapes += (ShapeEfficiency("q8_0", 64, 64, 0.01, 0.01),)
    made = make_profile(graph(), replace(SHEET, cpu=replace(SHEET.cpu, shapes=shapes)))
    plain = make_profile(graph(), SHEET)
    wide, narrow, square = (64, 128), (64, 32), (64, 64)
    one_row = 16384 + 4 * (64 + 128)
    assert made.op_time("CPU", "MUL_MAT", "f16", wide, 1).seconds == pytest.approx(one_row / 12.5e9 + 3e-6)
    at_512 = made.op_time("CPU", "MUL_MAT", "f16", wide, 512).seconds
    assert at_512 == pytest.approx(2 * 64 * 128 * 512 / 25.6e9 + 3e-6)
    for ne in (narrow, square):
        rows = 2 * 64 * ne[1] + 4 * (64 + ne[1])
        assert made.op_time("CPU", "MUL_MAT", "f16", ne, 1).seconds == pytest.approx(rows / 20e9 + 3e-6)
    assert made.op_time("CUDA0", "MUL_MAT", "f16", wide, 1) == plain.op_time("CUDA0", "MUL_MAT", "f16", wide, 1)
    types = make_profile(graph(replace(SMALL, type="q4_K")), replace(SHEET, cpu=replace(SHEET.cpu, shapes=shapes)))
    assert types.operators == make_profile(graph(replace(SMALL, type="q4_K")), SHEET).operators


def test_token_counts_between_the_tiers_lie_on_the_roofline():
    made = make_profile(graph(), SHEET)
    at_64 = made.op_time("CPU", "MUL_MAT", "f16", (64, 128), 64)
    assert at_64 == (pytest.approx(2 * 64 * 128 * 64 / 128e9 + 3e-6), "measured")


def test_quantised_weights_move_fewer_bytes():
    made = make_profile(graph(replace(SMALL, type="q8_0")), SHEET)
    assert made.op_time("CUDA0", "MUL_MAT", "q8_0", (64, 128), 1).seconds == pytest.approx(
        (16384 * 34 / 64 + 4 * (64 + 128)) / 800e9 + 2e-6
    )


def test_experts_that_no_token_chose_are_not_read():
    made = make_profile(graph(replace(SMALL, n_expert=8, n_used=2)), SHEET)
    seconds = [made.op_time("CUDA0", "MUL_MAT_ID", "f16", (64, 128, 8), n, 2).seconds - 2e-6 for n in (1, 4)]
    assert seconds[0] == pytest.approx((2 * 16384 + 4 * 2 * 192) / 800e9)
    assert seconds[1] == pytest.approx((8 * 16384 + 4 * 8 * 192) / 800e9)


def test_attention_of_an_accelerator_reads_the_cache_once_and_unfused_costs_more():
    shape = (4, 2, 16, 16)
    f16 = make_profile(graph(), SHEET)
    fused = f16.attention_time("CUDA0", shape, 1, 4096).seconds
    assert fused == pytest.approx(4096 * 2 * 32 * 2 / 800e9 + 2e-6)
    assert f16.attention_time("CUDA0", shape, 1, 4096, flash=False).seconds > fused
    assert f16.attends(HOST, shape) and not f16.attends("CUDA0", shape)
    q8_0 = make_profile(graph(), SHEET, type_k="q8_0", type_v="q8_0")
    exact = q8_0.attention_time("CUDA0", shape, 1, 4096, "q8_0", "q8_0")
    assert exact == (pytest.approx(4096 * 2 * 32 * 34 / 32 / 800e9 + 2e-6), "measured")
    with pytest.raises(OallamaError, match="unknown type of the KV cache 'q3_K'"):
        make_profile(graph(), SHEET, type_k="q3_K")


def test_links_and_switches():
    made = make_profile(graph(), SHEET)
    assert made.link_time("CUDA0", "h2d", 2**20) == pytest.approx(1e-5 + 2**20 / 12e9)
    assert made.link_time("CUDA0", "d2h", 2**30, "pinned") == pytest.approx(1e-5 + 2**30 / 24e9)
    assert made.switch_time("CUDA0") == 20e-6


def test_a_link_may_be_given_by_its_generation_and_lanes():
    assert Link(generation=4, lanes=4).peak_gb_s == pytest.approx(7.877, abs=1e-3)
    assert Link(generation=5, lanes=16).peak_gb_s == pytest.approx(63.0, abs=0.1)
    narrow = replace(SHEET, accelerators=(replace(SHEET.accelerators[0], link=Link(generation=3, lanes=1)),))
    made = make_profile(graph(), narrow)
    assert made.link_time("CUDA0", "h2d", 2**30, "pinned") == pytest.approx(1e-5 + 2**30 / (0.8 * 0.98462e9), rel=1e-3)
    assert Link(31.5).peak_gb_s == 31.5 and Link(generation=2, lanes=4).peak_gb_s == 0


# ---- the mark ------------------------------------------------------------------------------------------------------


def test_a_computed_profile_says_so_in_its_file(tmp_path):
    made = make_profile(graph(), SHEET)
    made.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded == made and loaded.source == "datasheet" and loaded.fingerprint["datasheet"] == "box"
    with pytest.raises(OallamaError, match="--datasheet"):
        loaded.op_time("CPU", "MUL_MAT", "q2_K", (64, 64), 1)


def test_a_plan_made_from_it_names_its_source(tiny, rpc):  # else a stand-in becomes the RPC0 of tests after it
    path, settings = tiny("llama", "F16"), Settings(n_ctx=256)
    profile = make_profile(autoplan.read_graph(path, settings), SHEET)
    choices = autoplan.Choices(profile=profile, planner="layers", elsewhere=True)
    plan = start.plan_model(path, "100%", settings, choices)
    assert "CUDA0" in plan.devices
    assert any("datasheet" in note for note in plan.predicted.notes)


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({"Vulkan0": "Vulkan", "RPC3": "RPC"}, "RPC3"),  # a Vulkan driver may refuse matrices that CUDA holds
        ({"RPC3": "RPC", "CUDA1": "CUDA"}, "CUDA1"),
        ({"CUDA1": "CUDA", "CUDA0": "CUDA"}, "CUDA0"),
    ],
)
def test_allocators_asked_for_a_device_that_is_elsewhere(monkeypatch, tiny, here, expected):
    path, settings = tiny("llama", "F16"), Settings(n_ctx=256)
    made = [Device(name, "", "gpu", backend, 1, 1, False, False) for name, backend in here.items()]
    monkeypatch.setattr(device_list, "devices", lambda: made)
    profile = make_profile(autoplan.read_graph(path, settings), SHEET)
    assert stand_ins(("CUDA0",), profile) == (expected,)


def test_a_stand_in_may_have_the_name_of_another_device_of_the_plan(monkeypatch, tiny):
    """CUDA0 is answered for by RPC0, and the plan's own RPC0 by RPC1: neither takes the other's part."""
    path, settings = tiny("llama", "F16"), Settings(n_ctx=256)
    made = hand_plan(path, "CUDA0")
    name = "blk.0.ffn_up.weight"
    divided = TensorPlacement.divided(made.tensors[name], "RPC0", 128, 512)
    layers = ("RPC0", *made.layers[1:])
    made = replace(made, devices=("CUDA0", "RPC0", HOST), layers=layers, tensors={**made.tensors, name: divided})
    seen = []

    def dry_run(path, settings, table):
        seen.append((settings.devices, table))
        return {"RPC0": {"weights": 7}, "RPC1": {"weights": 1}, HOST: {}}

    monkeypatch.setattr(skeleton, "dry_run", dry_run)
    allocators = LocalAllocators(path, settings, ("CUDA0", "RPC0"), None)
    monkeypatch.setattr(allocators, "_stand_in", {"CUDA0": "RPC0", "RPC0": "RPC1"})
    assert allocators.memory(made) == {"CUDA0": {"weights": 7}, "RPC0": {"weights": 1}, HOST: {}}
    ((devices, table),) = seen
    assert devices == ("RPC0", "RPC1") and "CUDA0" not in table
    lines = table.splitlines()
    assert {"layer 0 RPC1", "layer 1 RPC0", f"segment {name} RPC1 rows 128"} <= {*lines}
    assert "tensor blk.0.attn_q.weight RPC0 resident" in lines


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_shipped_datasheets_load_under_their_name(name):
    sheet = Datasheet.load(name)
    assert sheet.name == name and sheet.sources and sheet.accelerators
    gpu, cpu = sheet.accelerators[0].roofline, sheet.cpu.roofline
    assert gpu.bytes_s > cpu.bytes_s and gpu.flops > cpu.flops
    assert Datasheet.load(FOLDER / f"{name}.json") == sheet


def test_unknown_name_lists_the_shipped_ones():
    with pytest.raises(OallamaError, match=r"no datasheet is called 'rtx9090'.*rtx4090-xeon4314"):
        Datasheet.load("rtx9090")
    with pytest.raises(OallamaError, match="does not exist"):
        Datasheet.load("no/such.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("schema", "oallama.profile/1"), "schema is not"),
        (("cpu", "cores", 0), r"cpu.cores is 0"),
        (("cpu", "cores", 2.5), r"cpu.cores is 2.5, expected a whole number"),
        (("cpu", "dram_gb_s", -1), r"cpu.dram_gb_s is -1"),
        (("cpu", "ghz", 0), "cpu needs ghz"),
        (("cpu", "bandwidth_efficiency", 1.5), "at most 1"),
        (("cpu", "turbo", 4), "cpu.turbo is not known"),
        (("cpu", "shapes", [{"type": "f16", "k": 64, "m": 64}]), r"cpu.shapes\[0\] has no bandwidth_efficiency"),
        (("cpu", "shapes", 3), "datasheet"),
        (("cpu", None), "'cpu'"),
        (("cpu", [1]), "cpu"),
        (("accelerators", 0, "memory_gb_s", float("inf")), r"accelerators\[0\].memory_gb_s is inf"),
        (("accelerators", 0, "fp16_tflops", "fast"), r"accelerators\[0\].fp16_tflops is 'fast'"),
        (("accelerators", 0, "memory_bytes", None), r"accelerators\[0\] has no memory_bytes"),
        (("accelerators", 0, "name", "CPU"), "different names"),
        (("accelerators", 0, "link", "pcie_gb_s", 0), r"accelerators\[0\].link.pcie_gb_s is 0"),
        (("accelerators", 0, "link", {"generation": 4}), r"link needs either pcie_gb_s, or generation"),
        (("accelerators", 0, "link", {"generation": 2, "lanes": 4}), r"generation \(one of 3, 4, 5\) and lanes"),
        (("accelerators", 0, "link", "lanes", 4), r"link needs either pcie_gb_s"),
        (("accelerators", 0, "link", None), "'link'"),
        (("accelerators", [3]), "datasheet"),
    ],
)
def test_nonsense_is_refused(tmp_path, change, words):
    content = json.loads((FOLDER / "rtx4090-xeon4314.json").read_text())
    *way, key, value = change
    place = content
    for step in way:
        place = place[step]
    if value is None:
        del place[key]
    else:
        place[key] = value
    path = tmp_path / "sheet.json"
    path.write_text(json.dumps(content))
    with pytest.raises(OallamaError, match=words) as error:
        Datasheet.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_the_command_writes_a_profile_of_the_model(tiny, tmp_path):
    out = tmp_path / "p.json"
    ran = CliRunner().invoke(app, ["profile", str(tiny("llama", "F16")), "--datasheet", "h200", "-o", str(out)])
    assert ran.exit_code == 0 and "computed from a datasheet" in ran.output
    profile = Profile.load(out)
    assert profile.source == "datasheet" and [d.name for d in profile.devices] == ["CUDA0", "CPU"]
    assert profile.op_time("CUDA0", "MUL_MAT", "f16", (256, 512), 1).source == "measured"


def test_the_command_plans_for_its_machine(tiny, tmp_path):
    """As with the profile that is computed from it; its threads are the datasheet's."""
    model, out, sheet = str(tiny("qwen3moe", "F16")), tmp_path / "p.json", "rtx3060-ddr4"
    common = ["--vram", "70%", "--ctx", "512", "--planner", "experts"]
    ran = CliRunner().invoke(app, ["plan", model, "--datasheet", sheet, *common, "-o", str(out)])
    assert ran.exit_code == 0, ran.output
    made = PlacementPlan.load(out)
    settings = Settings(n_ctx=512, n_threads=8)
    profile = make_profile(autoplan.read_graph(model, settings), Datasheet.load(sheet))
    choices = autoplan.Choices(profile=profile, planner="experts", elsewhere=True)
    by_profile = autoplan.plan_graph(model, autoplan.read_graph(model, settings), "70%", settings, choices)
    assert made.tensors == by_profile.tensors and made.devices == ("CUDA0", HOST)
    assert made.predicted.request_s == pytest.approx(by_profile.predicted.request_s)
    for more, words in ((["--profile", str(out)], "leave out --profile"), (["--heads"], "leave out --heads")):
        refused = CliRunner().invoke(app, ["plan", model, "--datasheet", sheet, *more])
        assert refused.exit_code == 2 and words in " ".join(refused.output.split())
