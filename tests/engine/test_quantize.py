"""Quantising by recipe: the types really in the file, what is refused, and that nothing half-written stays."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from oallama import Llama
from oallama.cli.app import app
from oallama.engine import runtime
from oallama.errors import OallamaError
from oallama.modelmaker import make_model
from oallama.quantizing import MIXES, OURS, TYPES, Recipe, Rule, described, named, quantize, resolve
from oallama.quantizing.recipe import rules_of
from oallama.quantizing.types import NEED_IMATRIX, fits
from support.cli import CLI
from support.processes import process_of


def types_in(path: Path) -> dict[str, str]:
    return {t.name: t.tensor_type.name.lower() for t in GGUFReader(path).tensors}


def lower(types: dict[str, str]) -> dict[str, str]:
    return {name: type.lower() for name, type in types.items()}


@pytest.fixture(scope="module")
def source(tiny):
    return tiny("llama", "F16")


@pytest.mark.parametrize("arch", ["llama", "minicpm3", "qwen2", "qwen3moe"])
def test_844_is_attention_int8_and_all_else_int4(tiny, tmp_path, arch):
    source, target = tiny(arch, "F16"), tmp_path / "844.gguf"
    found = quantize(source, target, named("8/4/4"))
    before, after = types_in(source), types_in(target)
    assert lower(found.types) == after
    assert found.file_bytes == target.stat().st_size
    for name, type in after.items():
        if before[name] == "f32":
            assert type == "f32", name
        else:
            assert type == ("q8_0" if ".attn_" in name else "q4_0"), name
    assert after["token_embd.weight"] == "q4_0"
    llm = Llama(str(target), n_ctx=64, verbose=False)
    assert len(llm("hello world", max_tokens=4, temperature=0)["choices"][0]["text"]) >= 0
    assert llm.n_tokens > 4
    llm.close()


@pytest.mark.parametrize("type", ["q4_0", "q4_K", "q6_K", "iq4_nl", "bf16", "f32"])
def test_a_type_is_every_matrix(source, tmp_path, type):
    found = quantize(source, target := tmp_path / "t.gguf", named(type))
    counts = Counter(types_in(target).values())
    assert counts[type.lower()] == sum(t.quantisable for t in found.tensors) + (9 if type == "f32" else 0)
    assert not found.fallbacks


def test_a_mix_is_what_llama_quantize_writes(source, tmp_path):
    quantize(source, ours := tmp_path / "ours.gguf", named("Q4_K_M"))
    program = runtime.program("llama-quantize")
    subprocess.run([program, source, tmp_path / "theirs.gguf", "Q4_K_M", "2"], check=True, capture_output=True)
    assert ours.read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_rules_come_before_mixes_and_types(source, tmp_path):
    rules = [Rule.parse("ffn_down=q8_0"), Rule.parse(r"^blk\.0\.ffn=q5_k"), Rule.parse("token_embd=f16")]
    quantize(source, target := tmp_path / "t.gguf", named("Q4_K_M").before(rules))
    types, mix = types_in(target), lower(resolve(source, named("Q4_K_M")).types)
    assert types.pop("token_embd.weight") == "f16"
    for name, type in types.items():
        expected = "q8_0" if "ffn_down" in name else "q5_k" if name.startswith("blk.0.ffn_") else mix[name]
        assert type == (mix[name] if "norm" in name else expected), name


def test_recipe_files_come_back(source, tmp_path):
    recipe = Recipe("mine", "q4_K", (Rule(r"attn_(q|k)\.", "q6_K"), Rule("ffn_down", "q8_0")))
    recipe.save(tmp_path / "mine.json", {"kld": 0.1})
    assert named(str(tmp_path / "mine.json")) == recipe
    assert resolve(source, recipe).types["blk.2.attn_k.weight"] == "q6_K"


@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from(["attn_q", "ffn_up", "ffn_up_exps"]), st.sampled_from(
    ["q4_0", "q8_0", "q6_K"])), min_size=1, unique_by=lambda t: t[:2]))  # fmt: skip
def test_rules_of_types_give_those_types(chosen):
    types = {f"blk.{il}.{kind}.weight": type for il, kind, type in chosen} | {"output.weight": "f16"}
    recipe = Recipe("r", *rules_of(types))
    for name, type in types.items():
        rule = recipe.rule_for(name)
        assert (rule.type if rule else recipe.base) == type


def test_what_llama_cpp_falls_back_to_is_said(tmp_path):
    shape = {"n_layer": 2, "n_embd": 96, "n_ff": 416, "n_head": 3, "n_head_kv": 1, "n_vocab": 512}
    source = make_model(tmp_path / "f16.gguf", overrides=shape)
    found = quantize(source, target := tmp_path / "t.gguf", named("q4_K"))
    assert lower(found.types) == types_in(target)
    assert {t.name for t in found.fallbacks} == {t.name for t in found.tensors if t.quantisable}
    assert all(t.wanted == "q4_K" and t.written == "q5_0" for t in found.fallbacks)
    mix = resolve(source, named("Q4_K_M"))
    assert {t.wanted for t in mix.fallbacks} == {"q4_K", "q6_K"}
    done = CliRunner().invoke(app, ["quantize", str(source), "--dry-run", "--recipe", "q4_K"])
    assert done.exit_code == 0
    assert "blk.0.attn_k.weight: q5_0 instead of q4_K (rows of 96)" in done.output


def test_quantised_input_needs_to_be_allowed(tiny, tmp_path):
    source = tiny("llama", "Q8_0")
    with pytest.raises(OallamaError, match=r"is quantised already .*--requantize"):
        quantize(source, tmp_path / "t.gguf", named("q4_0"))
    quantize(source, tmp_path / "t.gguf", named("q4_0"), requantize=True)
    assert Counter(types_in(tmp_path / "t.gguf").values())["q4_0"] == 30
    assert resolve(source, named("q8_0")).types == resolve(source, Recipe("same", "keep")).types  # nothing to do


def test_an_output_that_exists_is_kept_unless_told(source, tmp_path):
    target = tmp_path / "t.gguf"
    target.write_text("mine")
    command = ["quantize", str(source), str(target), "--recipe", "q4_0"]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "--force replaces it" in refused.stderr and target.read_text() == "mine"
    assert CliRunner().invoke(app, [*command, "--force"]).exit_code == 0
    assert Counter(types_in(target).values())["q4_0"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "nix"], "unknown recipe 'nix'"),
        (["--recipe", "missing.json"], "recipe missing.json does not exist"),
        (["--recipe", "q4_0", "--tensor", "attn=q4_9"], "unknown type 'q4_9'"),
        (["--recipe", "q4_0", "--tensor", "attn"], "expected PATTERN=TYPE"),
        (["--recipe", "q4_0", "--tensor", "(=q4_0"], "no regular expression"),
        (["--recipe", "q4_0", "--tensor", "blk.99=q4_0"], "'blk.99' fits no tensor"),
        (["--recipe", "q4_0", "--tensor", "attn_norm=q8_0"], "which is not quantised"),
        (["--recipe", "IQ2_XXS"], "needs an importance matrix"),
        (["--recipe", "Q2_K_S"], "needs an importance matrix"),
        (["--recipe", "iq1_s"], "needs an importance matrix"),
        (["--recipe", "q4_0", "--imatrix", "none.dat"], "no such importance matrix"),
        ([], "--list"),
    ],
)
def test_mistakes_are_told(source, tmp_path, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["quantize", str(source), "out.gguf", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_input_and_output_are_two_files(source, tmp_path):
    before = source.read_bytes()
    link = tmp_path / "link.gguf"
    link.symlink_to(source)
    for target in (source, link):
        with pytest.raises(OallamaError, match="is the input itself"):
            quantize(source, target, named("q4_0"))
    assert source.read_bytes() == before
    with pytest.raises(OallamaError, match="not a GGUF"):
        (tmp_path / "text.gguf").write_text("hello")
        quantize(tmp_path / "text.gguf", tmp_path / "t.gguf", named("q4_0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "oallama.recipe/2"}', "expected 'oallama.recipe/1'"),
        ('{"schema": "oallama.recipe/1", "base": "q4_0", "rules": {"a": "q4_0"}}', "rules"),
        ('{"schema": "oallama.recipe/1", "base": "q4_0", "rules": [["a", "q99"]]}', "unknown type 'q99'"),
        ('{"schema": "oallama.recipe/1", "base": "nix"}', "unknown base 'nix'"),
        ("[]", "expected an object"),
    ],
)
def test_bad_recipe_files_are_refused(tmp_path, text, message):
    (path := tmp_path / "r.json").write_text(text)
    with pytest.raises(OallamaError, match=message):
        named(str(path))


def test_every_name_is_listed_and_resolves(source):
    names = {name for name, _, _ in described()}
    assert names == {*OURS, *MIXES, *TYPES}
    done = CliRunner().invoke(app, ["quantize", "--list"])
    assert done.exit_code == 0
    assert "8/4/4" in done.output
    for name in OURS:
        assert resolve(source, named(name)).bits_per_weight < 9
    assert named("q4_k_m").base == "Q4_K_M"
    assert (named("q4_0").base, named("Q4_0").base) == ("q4_0", "Q4_0")


def test_blocks_agree_with_gguf():
    assert fits("q4_K", (256, 3))
    assert not fits("q4_K", (288, 3))
    assert fits("q4_0", (288, 3))
    assert set(TYPES) > NEED_IMATRIX


def test_a_file_that_was_there_stays_when_writing_fails(source, tmp_path, monkeypatch):
    target = tmp_path / "t.gguf"
    target.write_text("old")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(OallamaError, match="not enough disk space"):
        quantize(source, target, named("q8_0"))
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_leaves_nothing(source, tmp_path, monkeypatch):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("cannot mount")
    try:
        # Room enough when it is looked at before, none later.
        monkeypatch.setattr("oallama.modelmaker.partial_file._check", lambda path, size: None)
        with pytest.raises(OallamaError, match="not enough disk space"):
            quantize(source, tmp_path / "t.gguf", named("q8_0"))
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_interrupted_it_leaves_nothing(tmp_path):
    source = make_model(tmp_path / "f16.gguf", shape="small", overrides={"n_layer": 6})
    target = tmp_path / "out" / "t.gguf"
    target.parent.mkdir()
    with process_of(
        [*CLI, "quantize", source, target, "--recipe", "q2_K"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        while not list(target.parent.iterdir()):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert "interrupted" in process.stderr.read()
    assert list(target.parent.iterdir()) == []
