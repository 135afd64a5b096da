"""KL divergence, and the search for types: against brute force, against uniform types, and in the engine."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from oallama import Llama
from oallama.cli.app import app
from oallama.engine import runtime
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading.autoplan import Choices
from oallama.modelmaker import make_model
from oallama.quantizing import (
    Importance,
    Laboratory,
    Machine,
    Reference,
    Search,
    measure_importance,
    named,
    quantize,
    resolve,
)
from oallama.quantizing.choose import Limits, Problem, Times, TypeAssignment, choose, evaluate
from oallama.quantizing.importance import make_groups
from oallama.quantizing.machine import retyped
from support import synthetic
from support.made_profile import made_profile
from support.paths import ROOT

TEXT = (ROOT / "python/oallama/bench/prompts/alice.txt").read_text(encoding="utf-8")
TYPES = ("q2_K", "q4_K", "q8_0")


# ---- the integer program on invented tables ----------------------------------------------------------------------


@st.composite
def problems(draw, placed: bool | None = None) -> Problem:
    groups, types = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def table(low: float, high: float, rows: int) -> np.ndarray:
        number = st.floats(low, high, allow_nan=False)
        return np.array(draw(st.lists(st.lists(number, min_size=types, max_size=types), min_size=rows, max_size=rows)))

    kld = table(0, 2, groups)
    legal = np.array(draw(st.lists(st.booleans(), min_size=groups * types, max_size=groups * types)))
    kld[:, 1:][~legal.reshape(groups, types)[:, 1:]] = np.inf  # the first is legal everywhere
    nbytes = (32 * np.ceil(table(1, 100, groups))).astype(np.int64)
    if placed is None:
        return Problem(kld, nbytes)
    tensors = [g for g in range(groups) for _ in range(draw(st.integers(1, 2)))]
    part = sorted(draw(st.lists(st.integers(0, 2), min_size=len(tensors), max_size=len(tensors))))
    part = np.unique(part, return_inverse=True)[1].tolist()
    host, device = table(1e-4, 1e-2, len(tensors)), table(1e-5, 1e-2, len(tensors))
    size = (16 * np.ceil(table(1, 50, len(tensors)))).astype(np.int64)
    cut = draw(st.floats(0, 1e-3))
    return Problem(kld, nbytes, Times(tensors, part, host, device if placed else None, size, cut))


def all_choices(problem: Problem) -> list[TypeAssignment]:
    legal = [np.flatnonzero(np.isfinite(row)) for row in problem.kld]
    times = problem.times
    n_parts = max(times.part) + 1 if times is not None and times.device is not None else 0
    return [
        evaluate(problem, np.array(types), np.array(home, bool))
        for types in product(*legal)
        for home in product((False, True), repeat=n_parts)
    ]


def within(choice: TypeAssignment, limits: Limits) -> bool:
    return (
        choice.nbytes <= limits.nbytes
        and choice.device_bytes <= limits.device_bytes
        and choice.seconds <= limits.seconds * (1 + 1e-7)
    )


@settings(max_examples=60)
@given(problems(), st.floats(0, 1))
def test_knapsack_equals_brute_force(problem, share):
    every = all_choices(problem)
    sizes = [c.nbytes for c in every]
    limits = Limits(int(min(sizes) + share * (max(sizes) - min(sizes))))
    found = choose(problem, limits)
    best = min(c.kld for c in every if within(c, limits))
    assert found is not None
    assert within(found, limits)
    assert found.kld <= best + 1e-6
    assert choose(problem, Limits(min(sizes) - 1)) is None


@settings(max_examples=60)
@given(problems(placed=True), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_joint_choice_equals_brute_force(problem, a, b, c):
    every = all_choices(problem)

    def between(values, share):
        return min(values) + share * (max(values) - min(values))

    limits = Limits(
        between([x.nbytes for x in every], a),
        between([x.device_bytes for x in every], b),
        between([x.seconds for x in every], c),
    )
    # What only just keeps within the seconds may be lost to rounding.
    sure = [x for x in every if within(x, replace(limits, seconds=limits.seconds * (1 - 1e-6)))]
    found = choose(problem, limits)
    assert found is not None or not sure
    if found is not None:
        assert within(found, limits)
        worst = float(np.where(np.isfinite(problem.kld), problem.kld, 0).max(axis=1).sum())
        assert found.kld <= min((x.kld for x in sure), default=np.inf) + 3e-6 * worst + 1e-6
    room = Limits(limits.nbytes, limits.device_bytes)
    fastest = choose(problem, room, fastest=True)
    if fastest is not None:
        assert fastest.seconds <= min(x.seconds for x in every if within(x, room)) * (1 + 1e-6)
    else:
        assert not any(within(x, room) for x in every)


@settings(max_examples=60)
@given(problems(), st.data())
def test_choice_is_never_worse_than_a_uniform_type(problem, data):
    legal = [t for t in range(problem.kld.shape[1]) if np.isfinite(problem.kld[:, t]).all()]
    uniform = evaluate(problem, np.full(len(problem.kld), data.draw(st.sampled_from(legal))), np.zeros(0, bool))
    assert choose(problem, Limits(uniform.nbytes)).kld <= uniform.kld + 1e-6


# ---- in the engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("m") / "f16.gguf", overrides={"n_layer": 2, "n_vocab": 1024})


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model, TEXT, n_ctx=128, n_chunks=2, n_threads=1)


@pytest.fixture(scope="module")
def lab(model, reference):
    return Laboratory(model, reference)


@pytest.fixture(scope="module")
def importance(lab):
    return measure_importance(lab, TYPES, "kind")


def test_divergence_from_itself_is_zero(model, reference):
    found = reference.compare(model)
    assert (found.kld, found.kld_max, found.same_top) == (0.0, 0.0, 1.0)
    assert found.perplexity == found.reference_perplexity
    assert found.n_tokens == 2 * 63
    assert found.file_bytes == model.stat().st_size
    assert 16 < found.bits_per_weight < 16.1


def test_divergence_falls_with_bits(lab):
    found = [lab.measure(lab.uniform(type)) for type in ("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "q8_0")]
    klds = [d.kld for d in found]
    assert klds == sorted(klds, reverse=True)
    assert klds[-1] > 0
    bits = [d.bits_per_weight for d in found]
    assert bits == sorted(bits)


def test_perplexity_is_llama_perplexity_s(model, tmp_path):
    (text := tmp_path / "text.txt").write_text(TEXT)
    quantize(model, other := tmp_path / "q.gguf", named("q4_0"))
    base = ["--ctx-size", "128", "--chunks", "4", "-t", "1", "-b", "128", "-ngl", "0", "-f", text]
    program = runtime.program("llama-perplexity")
    logits = ["--kl-divergence-base", tmp_path / "logits"]

    def run(last_words: str, *command: object) -> str:
        for _ in range(20):  # its log is written by a thread, and the end is lost now and then
            text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
            if last_words in text:
                return text
        raise AssertionError(f"no {last_words!r} in {text}")

    alone = run("[4]", program, "-m", model, *base, *logits)
    both = run("Same top p:", program, "-m", other, *base, *logits, "--kl-divergence")

    def number(label: str, text: str) -> float:
        return float(re.search(rf"{label}\s*:?\s*([\d.]+)", text)[1])

    ours = Reference(model, TEXT, n_ctx=128, n_chunks=4, n_gpu_layers=0, n_threads=1).compare(other)
    assert ours.reference_perplexity == pytest.approx(number(r"\[4\]", alone), rel=1e-3)
    assert ours.perplexity == pytest.approx(number(r"Mean PPL\(Q\)", both), rel=1e-3)
    # The program keeps the reference's logarithms in 16 bits, and none below -16.
    assert ours.kld == pytest.approx(number("Mean    KLD", both), rel=2e-2)
    assert 100 * ours.same_top == pytest.approx(number("Same top p:", both), abs=1.5)


def test_models_of_another_vocabulary_are_refused(model, reference, tiny):
    with pytest.raises(OallamaError, match="another vocabulary"):
        reference.compare(tiny("llama", "F16"))
    with pytest.raises(OallamaError, match=r"the text has \d+ tokens"):
        Reference(model, "short", n_ctx=128)
    with pytest.raises(OallamaError, match="no such model"):
        reference.compare("missing.gguf")
    with pytest.raises(OallamaError, match="even number"):
        Reference(model, TEXT, n_ctx=7)


def test_groups_hold_every_tensor_once(lab):
    for grouping, n in (("tensor", 16), ("third", 16), ("kind", 9)):
        groups = make_groups(lab.tensors, grouping)
        names = [t.name for group in groups for t in group.tensors]
        assert sorted(names) == sorted(t.name for t in lab.tensors)
        assert len(groups) == n
    with pytest.raises(OallamaError, match="unknown grouping"):
        make_groups(lab.tensors, "row")


def test_parts_add_up_nearly(lab, importance):
    """Not a law: the docs say how good the approximation is. Here it must at least order the types."""
    assert (np.diff(importance.kld, axis=1) < 0).all()
    for type in TYPES:
        measured = lab.measure(lab.uniform(type)).kld
        assert 0.4 < importance.expected(lab.uniform(type)) / measured < 2.5
    assert math.isnan(importance.expected(lab.uniform("q6_K")))


def test_search_is_never_worse_than_uniform(lab, importance, tmp_path):
    search = Search(lab, importance)
    sizes = [lab.file_bytes(lab.uniform(type)) for type in TYPES]
    between = (sizes[0] + sizes[1]) // 2
    search.run([*sizes, between])
    for limit in (*sizes, between):
        best, uniform = search.best(limit), search.best(limit, kinds=["uniform"])
        assert best.kld <= uniform.kld
        assert best.file_bytes <= limit
    assert search.best(between).kind == "found"
    found = search.best(between)
    found.recipe.save(tmp_path / "r.json")
    quantize(lab.source, tmp_path / "t.gguf", named(str(tmp_path / "r.json")))
    assert (tmp_path / "t.gguf").stat().st_size == found.file_bytes
    assert lab.reference.compare(tmp_path / "t.gguf") == found.divergence
    llm = Llama(str(tmp_path / "t.gguf"), n_ctx=64, verbose=False)
    assert llm("hello", max_tokens=3)["usage"]["completion_tokens"] == 3
    llm.close()
    with pytest.raises(OallamaError, match="the smallest has"):
        search.run([1000])
    with pytest.raises(OallamaError, match="no choice of types keeps within"):
        search.best(1000)
    klds = [trial.kld for trial in search.front()]
    assert klds == sorted(klds, reverse=True)


def test_joint_search_plans_every_trial(model, lab, importance, rpc, tmp_path):
    device, context = rpc.devices[0], Settings(n_ctx=256, n_ubatch=64, n_threads=1)
    profile = made_profile(model, device, context)
    # Times of every type: those of the file's, by bits.
    factor = {"q2_K": 2.6 / 16, "q4_K": 4.5 / 16, "q8_0": 8.5 / 16}
    more = [
        replace(op, type=type, median_s=op.median_s * share)
        for op in profile.operators
        if op.type == "f16"
        for type, share in factor.items()
    ]
    profile = replace(profile, operators=(*profile.operators, *more))
    machine = Machine(model, "1MiB", context, Choices(device=device, profile=profile, planner="exact"))
    assert machine.accelerator == device
    assert 0 < machine.room <= 2**20
    times = machine.times(importance)
    assert times.device is not None
    assert (times.device < times.host).all()
    assert max(times.part) + 1 == 5  # two layers of two, the output
    search = Search(lab, importance, machine)
    search.run(n_points=2)
    assert {trial.kind for trial in search.trials} == {"uniform", "found"}
    assert all(trial.tpot_s and trial.plan is not None for trial in search.trials)
    uniform = [trial for trial in search.trials if trial.kind == "uniform"]
    for trial in uniform:
        best = search.best(trial.file_bytes, trial.tpot_s)
        assert best.kld <= trial.kld
        assert best.tpot_s <= trial.tpot_s
    front = search.front()
    assert [t.tpot_s for t in front] == sorted(t.tpot_s for t in front)
    with pytest.raises(OallamaError, match="depends on their types"):
        Machine(model, "50%")
    no_times = Machine(model, "1MiB", context, Choices(device=device, profile=made_profile(model, device, context)))
    with pytest.raises(OallamaError, match="the profile has no MUL_MAT of type"):
        no_times.times(importance)


def test_retyped_graph_has_the_bytes_of_the_types():
    graph = synthetic.graph(synthetic.Shape(n_embd=256, n_ff=512))
    other = retyped(graph, {t.name: "q4_K" for t in graph.tensors})
    for before, after in zip(graph.tensors, other.tensors, strict=True):
        if "norm" in before.name or before.name == "token_embd.weight":
            assert after == before
        elif before.ne[0] % 256 == 0:
            assert (after.type, after.nbytes) == ("q4_K", math.prod(before.ne) // 256 * 144)
        else:
            assert after == before


# ---- the command line --------------------------------------------------------------------------------------------


def test_commands(model, tmp_path):
    pytest.importorskip("matplotlib")
    (text := tmp_path / "text.txt").write_text(TEXT)
    run = CliRunner().invoke
    common = ["--text", str(text), "--chunks", "1", "--threads", "1"]
    recipe, plot = tmp_path / "r.json", tmp_path / "p.png"
    search = ["quantize", "search", str(model), *common, "--chunk", "128", "--types", "q4_K,q8_0", "--group", "kind"]
    done = run(app, [*search, "--bytes", "1.2MiB", "-o", str(recipe), "--plot", str(plot), "--json"])
    assert done.exit_code == 0, done.output
    trials = json.loads(done.stdout)
    best = next(t for t in trials if t["best"])
    assert best["file_bytes"] <= 1.2 * 2**20
    assert plot.read_bytes()[:4] == b"\x89PNG"
    done = run(app, ["quantize", str(model), str(tmp_path / "t.gguf"), "--recipe", str(recipe)])
    assert done.exit_code == 0, done.output
    done = run(app, ["compare-models", str(model), str(tmp_path / "t.gguf"), *common, "--ctx", "128", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)[0]["kld"] == best["kld"]
    done = run(app, ["compare-models", str(model), str(model), *common, "--ctx", "128"])
    assert "0.00000" in done.output
    for arguments, message in (
        (["--types", "q4_9"], "unknown type"),
        (["--group", "row"], "unknown grouping"),
        (["--bytes", "10%"], "expects bytes"),
        (["--cpu", "--vram", "1MiB"], "leave it out"),
    ):
        done = run(app, [*search, *arguments])
        assert done.exit_code == 2
        assert message in done.stderr
    done = run(app, ["compare-models", str(model), str(model), "--text", str(model)])
    assert (done.exit_code, "not text" in done.stderr) == (2, True)


def test_nothing_to_quantise_is_told(tmp_path, lab):
    with pytest.raises(OallamaError, match="whole blocks of none"):
        measure_importance(lab, (), "kind")
    assert isinstance(measure_importance(lab, ("f16",), "kind"), Importance)
    assert resolve(lab.source, named("f16")).types == {
        t.name: t.source for t in resolve(lab.source, named("f16")).tensors
    }
