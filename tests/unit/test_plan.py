"""PlacementPlan: file format, identity, exports."""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oallama.base.jsonfile import write_text_atomic
from oallama.data.plan import HOST, SCHEMA_FILE, ContextSettings, PlacementPlan, Segment, TensorPlacement
from oallama.data.plan_difference import describe_difference
from oallama.data.plan_export import name_patterns
from oallama.errors import OallamaError
from support.plans import NAMES, make

# ---- file ----------------------------------------------------------------------------------------------------------


def test_round_trip_and_schema(tmp_path):
    plan = make(measured={"tpot_s": 0.02})
    path = tmp_path / "plans" / "plan.json"
    plan.save(path)
    assert PlacementPlan.load(path) == plan
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    content = json.loads(path.read_text())
    jsonschema.validate(content, schema)
    assert content["schema"] == "oallama.plan/1"
    assert content["predicted"]["devices"]["GPU0"] == {"weights": 1, "kv": 2, "compute": 3, "pool": 0, "total": 6}


def test_only_a_plan_that_was_changed_is_checked_against_the_schema(monkeypatch):
    text = make().to_json()
    content = json.loads(text)
    with monkeypatch.context() as patched:
        patched.setattr("oallama.data.plan._check_schema", lambda *_: pytest.fail("checked"))
        assert PlacementPlan.from_json(text) == make()
    assert PlacementPlan.from_json(make().with_measured({"tpot_s": 1.0}).to_json()).measured == {"tpot_s": 1.0}
    for changed in ({"layers": "GPU0"}, {"measured": 3}, {"hash": "0" * 64, "layers": 1}):
        with pytest.raises(OallamaError, match="does not fit the plan schema"):
            PlacementPlan.from_json(json.dumps(content | changed))
    del content["measured"]
    with pytest.raises(OallamaError, match="does not fit the plan schema"):
        PlacementPlan.from_json(json.dumps(content))


def test_hash_is_stable():
    plan = make()
    assert plan.hash == make().hash == PlacementPlan.from_json(plan.to_json()).hash
    assert len(plan.hash) == 64
    assert plan.with_measured({"tpot_s": 1.0}).hash == plan.hash
    assert replace(plan, tensors=dict(reversed(plan.tensors.items()))).hash == plan.hash
    assert make(on_host=()).hash != plan.hash
    assert replace(plan, context=ContextSettings(n_ctx=1024)).hash != plan.hash


def test_divided_tensors_survive_the_file_but_stock_llama_cpp_has_none():
    divided = TensorPlacement.divided(TensorPlacement.whole("f16", 10, HOST, "upload", 0.3), "GPU0", 6, 10)
    assert divided.segments == (Segment(HOST, "upload", (6, 10), 4), Segment("GPU0", "resident", (0, 6), 6))
    plan = make(tensors={**make().tensors, "output.weight": divided})
    assert PlacementPlan.from_json(plan.to_json()) == plan
    lines = plan.to_backend_map().splitlines()
    assert "tensor output.weight CPU upload" in lines and "segment output.weight GPU0 rows 6" in lines
    with pytest.raises(OallamaError, match=r"output\.weight is divided between two devices"):
        plan.to_llama_cpp_flags()


def test_the_parts_of_a_divided_tensor_begin_on_the_accelerator():
    other = TensorPlacement("f16", 10, (Segment("GPU0", "resident", (0, 6), 6), Segment(HOST, "host", (6, 10), 4)))
    with pytest.raises(OallamaError, match="must begin with the tensor's first row or column"):
        make(tensors={**make().tensors, "output.weight": other}).to_backend_map()


def corrupt(change) -> str:
    content = json.loads(make().to_json())
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("null", "expected an object"),
        ("[" * 100_000, "not valid JSON"),
        (corrupt(lambda c: c.update(schema="oallama.plan/2")), "schema 'oallama.plan/2', expected 'oallama.plan/1'"),
        (corrupt(lambda c: c.pop("schema")), "schema None"),
        (corrupt(lambda c: c.pop("layers")), "'layers' is a required property"),
        (corrupt(lambda c: c.update(extra=1)), "extra"),
        (corrupt(lambda c: c["budgets"].update(GPU0=-1)), "budgets/GPU0"),
        (corrupt(lambda c: c["budgets"].update(GPU0=2**63)), "budgets/GPU0"),
        (corrupt(lambda c: c["tensors"]["output.weight"].update(nbytes=2**63)), "tensors/output.weight/nbytes"),
        (corrupt(lambda c: c["context"].update(n_ctx=2**31)), "context/n_ctx"),
        (corrupt(lambda c: c["context"].update(n_outputs_max=2**32 + 1)), "context/n_outputs_max"),
        (corrupt(lambda c: c["tensors"]["output.weight"].update(segments=[])), "tensors/output.weight/segments"),
        (corrupt(lambda c: c["tensors"]["output.weight"]["segments"][0].update(mode="magic")), "magic"),
        (
            corrupt(lambda c: c["tensors"]["output.weight"]["segments"][0].update(device="GPU9")),
            "unknown device 'GPU9'",
        ),
        (corrupt(lambda c: c["layers"].append("GPU9")), "unknown device 'GPU9', it lists GPU0, CPU"),
    ],
)
def test_bad_content(text, words):
    with pytest.raises(OallamaError, match=re.escape(words)) as error:
        PlacementPlan.from_json(text, "plan x.json")
    assert "plan x.json" in str(error.value) and "oallama plan" in str(error.value) and "\n" not in str(error.value)


def test_missing_file(tmp_path):
    with pytest.raises(OallamaError, match="does not exist; make a new one with `oallama plan`"):
        PlacementPlan.load(tmp_path / "none.json")


# ---- identity ------------------------------------------------------------------------------------------------------


def test_check_model():
    plan = make()
    plan.check_model({"name": "m", "size": 7})
    with pytest.raises(OallamaError, match=r"another model .size 7 against 8"):
        plan.check_model({"name": "m", "size": 8})
    with pytest.raises(OallamaError, match="another model"):
        plan.check_model({"name": "m"})


def test_check_devices():
    plan = make()
    plan.check_devices(["CPU", "GPU0", "GPU1"])
    with pytest.raises(OallamaError, match="uses device 'GPU0', this machine has CPU"):
        plan.check_devices(["CPU"])


def test_describe_difference():
    plan = make()
    assert describe_difference(plan, make()) == []
    other = make(on_host=("blk.3.ffn_up.weight",), upload=("blk.0.ffn_up.weight",), budgets={"GPU0": 2000})
    assert describe_difference(plan, other) == [
        "budgets: GPU0=1000 -> GPU0=2000",
        "tensors: 1 go GPU0 -> CPU (upload): blk.0.ffn_up.weight",
        "tensors: 1 go CPU (host) -> GPU0: blk.11.ffn_up.weight",
    ]
    moved = make(layers=(HOST,) * 2 + ("GPU0",) * 11)
    assert describe_difference(plan, moved) == ["layers: KV cache and attention of 2 layers move (0, 1)"]


# ---- backend map ---------------------------------------------------------------------------------------------------


def test_backend_map_text():
    lines = make(upload=("blk.5.ffn_down.weight",)).to_backend_map().splitlines()
    assert lines[0] == "# oallama backend map v1"
    assert lines[1:14] == [f"layer {il} GPU0" for il in range(13)]
    assert len(lines) == 1 + 13 + len(NAMES)
    assert {
        "tensor token_embd.weight CPU host",
        "tensor blk.3.ffn_up.weight CPU host",
        "tensor blk.5.ffn_down.weight CPU upload",
        "tensor blk.0.ffn_up.weight GPU0 resident",
    } <= set(lines)


# ---- flags ---------------------------------------------------------------------------------------------------------


def homes_by_flags(plan: PlacementPlan, flags: list[str]) -> dict[str, str]:
    """Where stock llama.cpp would put every tensor: its own rules, in a few lines."""
    n_layer, ngl = len(plan.layers) - 1, int(flags[flags.index("-ngl") + 1])
    overrides = flags[flags.index("-ot") + 1].split(",") if "-ot" in flags else []
    homes = {}
    for name in plan.tensors:
        block = re.match(r"blk\.(\d+)\.", name)
        layer = int(block[1]) if block else 0 if name.startswith("rope_") else n_layer
        home = "GPU0" if layer >= n_layer + 1 - ngl else HOST
        if name.startswith("token_embd"):
            home = HOST
        seen_as = "token_embd.weight" if plan.tied_output and name == "output.weight" else name
        for override in overrides:
            pattern, device = override.split("=")
            if re.search(pattern, seen_as):
                home = device
                break
        homes[name] = home
    return homes


@settings(max_examples=60)
@given(st.sets(st.sampled_from(NAMES)), st.integers(0, 13), st.booleans())
def test_flags_put_every_tensor_home(on_host, ngl, tied):
    if tied:
        on_host = on_host - {"output.weight"} if ngl else on_host | {"output.weight"}
    layers = (HOST,) * (13 - ngl) + ("GPU0",) * ngl
    plan = make(on_host=on_host, layers=layers, tied_output=tied)
    homes = homes_by_flags(plan, plan.to_llama_cpp_flags())
    assert homes == {name: t.device for name, t in plan.tensors.items()}


@settings(max_examples=60)
@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_patterns_match_exactly(names):
    patterns = name_patterns(sorted(names), NAMES)
    assert {n for n in NAMES if any(re.search(p, n) for p in patterns)} == names
    assert all(p.startswith("^") and p.endswith("$") and "," not in p and "=" not in p for p in patterns)


def test_patterns_are_compact():
    some = [f"blk.{il}.ffn_{kind}.weight" for il in (0, 3, 7) for kind in ("up", "gate")]
    assert name_patterns(some, NAMES) == [r"^blk\.(0|3|7)\.ffn_(gate|up)\.weight$"]
    all_q = [f"blk.{il}.attn_q.weight" for il in range(12)]
    assert name_patterns(all_q, NAMES) == [r"^blk\.[0-9]+\.attn_q\.weight$"]
    assert name_patterns(["output.weight"], NAMES) == [r"^output\.weight$"]


def test_flags_text():
    assert make().to_llama_cpp_flags() == [
        "-ngl", "13", "-ot", r"^blk\.(3|11)\.ffn_up\.weight$=CPU", "--no-op-offload",
    ]  # fmt: skip
    uploads = make(on_host=["output.weight"], upload=["blk.1.ffn_up.weight"])
    assert uploads.to_llama_cpp_flags("llama-bench") == [
        "-ngl", "13", "-ot", r"^output\.weight$=CPU;^blk\.1\.ffn_up\.weight$=CPU",
    ]  # fmt: skip
    assert make().to_llama_cpp_flags("llama-bench")[-2:] == ["-nopo", "1"]
    assert make(on_host=()).to_llama_cpp_flags() == ["-ngl", "13"]


def test_flags_say_that_llama_cpp_lacks_our_attention(capsys):
    ours = make(context=replace(make().context, attention="oallama"))
    assert ours.to_llama_cpp_flags() == make().to_llama_cpp_flags()
    assert capsys.readouterr().err.count("\n") == 1


def test_tied_output_on_the_host_is_written_by_its_embedding():
    plan = make(on_host=["output.weight"], tied_output=True)
    assert plan.to_llama_cpp_flags()[:4] == ["-ngl", "13", "-ot", r"^token_embd\.weight$=CPU"]


def test_what_stock_llama_cpp_cannot_do():
    with pytest.raises(OallamaError, match="not the last ones"):
        make(layers=("GPU0",) * 12 + (HOST,)).to_llama_cpp_flags()
    with pytest.raises(OallamaError, match="several devices"):
        make(devices=("GPU0", "GPU1", HOST), layers=("GPU0", "GPU1") + ("GPU0",) * 11).to_llama_cpp_flags()
    with pytest.raises(OallamaError, match="tied output"):
        make(layers=(HOST,) * 13, tied_output=True).to_llama_cpp_flags()


def test_a_device_or_a_link_is_written_through_not_replaced(tmp_path):
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file.json"
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text_atomic(pipe, "hello", "plan")
    assert os.read(reader, 100) == b"hello" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)
    write_text_atomic(link, "hello", "plan")
    assert link.is_symlink() and file.read_text() == "hello"
