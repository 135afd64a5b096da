"""Routing traces of real models: the ids are the routers' choices, on any device and of many architectures."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama
from oallama.cli.routing import MIXED_TEXT
from oallama.data.plan import PlacementPlan
from oallama.data.routing import STAGES, RoutingTrace
from oallama.engine import native, runtime
from oallama.engine.load_settings import Settings
from oallama.engine.routers import routers_of
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.loading.routing_traces import expert_use
from oallama.tracing.experts import PROMPTS, record_experts
from support import cli
from support.archs import write_models
from support.experts import with_experts
from support.hand_plan import divided_plan, hand_plan, streamed_plan
from support.made_profile import made_profile

TOKENS = np.random.default_rng(7).integers(3, 120, 96).tolist()
SMALL = ("--ctx", "256", "--threads", "1", "-n", "16")
# With biases of the choice, sinks, dense layers between or before, recurrent layers, two choices a layer.
ARCHS = ("deepseek2", "glm4moe", "gpt-oss", "grovemoe", "llama4", "qwen2moe", "qwen3moe", "qwen3next")


@contextmanager
def watched(path: Path, **arguments: Any) -> Iterator[tuple[Llama, Any]]:
    watch = native.core().ExpertWatch()
    arguments = {"n_ubatch": 32, "n_batch": 64, "n_ctx": 128, "n_threads": 1} | arguments
    llm = Llama(str(path), eval_callback=watch.addresses, verbose=False, **arguments)
    try:
        yield llm, watch
    finally:
        llm.close()


def prefill(path: Path, tokens: list[int] = TOKENS, **arguments: Any) -> np.ndarray:
    with watched(path, **arguments) as (llm, watch):
        return record_experts(llm, watch, tokens, PROMPTS).ids["prefill"]


def probabilities(path: Path) -> dict[int, np.ndarray]:
    """By layer [tokens, experts], read by a callback of Python's own."""
    llama_cpp, base = runtime.llama_cpp(), ctypes.CDLL(str(runtime.lib_dir() / "libggml-base.so"))
    base.ggml_get_name.restype, base.ggml_get_data_f32.restype = ctypes.c_char_p, ctypes.POINTER(ctypes.c_float)
    base.ggml_nelements.restype = ctypes.c_int64
    seen: dict[int, list[np.ndarray]] = {}

    @llama_cpp.ggml_backend_sched_eval_callback
    def callback(tensor: int, ask: bool, _: int) -> bool:
        found = re.fullmatch(rb"ffn_moe_probs-(\d+)", base.ggml_get_name(ctypes.c_void_p(tensor)))
        if found and not ask:
            count = base.ggml_nelements(ctypes.c_void_p(tensor))
            values = np.ctypeslib.as_array(base.ggml_get_data_f32(ctypes.c_void_p(tensor)), (count,)).copy()
            seen.setdefault(int(found[1]), []).append(values.reshape(-1, 16))
        return found is not None if ask else True

    address = ctypes.cast(callback, ctypes.c_void_p).value or 0
    llm = Llama(
        str(path),
        eval_callback=(address, 0),
        n_ubatch=32,
        n_batch=32,
        n_ctx=128,
        n_threads=1,
        verbose=False,
        logits_all=True,
    )
    llm.eval(TOKENS)
    llm.close()
    return {layer: np.concatenate(parts) for layer, parts in seen.items()}


def test_ids_are_the_likeliest_experts(tiny: Callable[..., Path]) -> None:
    path = tiny("qwen3moe")
    ids, expected = prefill(path), probabilities(path)
    assert ids.shape == (2, len(TOKENS), 4) and ids.dtype == np.uint16
    for layer, rows in expected.items():
        assert np.array_equal(ids[layer], np.argsort(-rows, axis=1, kind="stable")[:, :4])


@pytest.mark.parametrize("make", [hand_plan, streamed_plan, divided_plan])
def test_any_placement_gives_the_same_trace(
    tiny: Callable[..., Path], rpc: Any, make: Callable[..., PlacementPlan]
) -> None:
    """F16 is not repacked: both devices have the same kernels, but for what the CPU fuses."""
    path = tiny("qwen3moe", "F16")
    alone, planned = prefill(path), prefill(path, plan=make(path, rpc.devices[0]))
    assert (alone == planned).mean() > 0.97


def test_decode_follows_parts_of_the_text(tiny: Callable[..., Path]) -> None:
    with watched(tiny("qwen3moe"), n_ctx=256) as (llm, watch):
        steps: list[tuple[float, float, str]] = []
        recorded = record_experts(llm, watch, TOKENS, 19, lambda *step: steps.append(step))
        again = record_experts(llm, watch, TOKENS, 19)
        assert steps[-1][0] == steps[-1][1] and {what for _, _, what in steps} >= {"reading", "generating"}
        assert recorded.layers == (0, 1) and recorded.n_ubatch == 32
        assert [recorded.ids[stage].shape[1] for stage in STAGES] == [len(TOKENS), 19]
        assert all(np.array_equal(recorded.ids[stage], again.ids[stage]) for stage in STAGES)
        with pytest.raises(OallamaError, match=r"31 tokens and a micro-batch 32: give a longer text"):
            record_experts(llm, watch, TOKENS[:31], 8)
        with pytest.raises(OallamaError, match="up to 255 behind each of 8 parts"):
            record_experts(llm, watch, TOKENS, 255 * 8)


def test_a_text_beyond_the_context_is_read_in_pieces(tiny: Callable[..., Path]) -> None:
    text = np.random.default_rng(8).integers(3, 120, 300).tolist()
    with watched(tiny("qwen3moe"), n_ctx=256) as (llm, watch):
        whole, rest = (record_experts(llm, watch, part, PROMPTS).ids["prefill"] for part in (text, text[256:]))
    assert whole.shape[1] == 300 and np.array_equal(whole[:, 256:], rest)
    assert np.array_equal(whole[:, :96], prefill(tiny("qwen3moe"), text[:96]))


def test_a_plan_without_memory_for_all_logits_is_refused(tiny: Callable[..., Path], rpc: Any) -> None:
    plan = hand_plan(tiny("qwen3moe"), rpc.devices[0])
    plan = replace(plan, context=replace(plan.context, n_outputs_max=1))
    with pytest.raises(OallamaError, match="--all-logits"):
        prefill(tiny("qwen3moe"), plan=plan)


def test_many_architectures_can_be_traced(tmp_path: Path) -> None:
    models = [m for m in write_models(tmp_path / "two", f"^({'|'.join(ARCHS)})$") if m.stem.endswith("-moe")]
    assert {m.stem.removesuffix("-moe") for m in models} == {*ARCHS}
    for source in models:
        arch = source.stem.removesuffix("-moe")
        path = with_experts(source, tmp_path / f"{arch}.gguf")
        traced(path, arch)


def test_experts_are_chosen_in_groups(tmp_path: Path) -> None:
    """Of 4 groups of 4 experts a token uses 2."""
    (source,) = [m for m in write_models(tmp_path / "two", "^deepseek2$") if m.stem.endswith("-moe")]
    ids = traced(with_experts(source, tmp_path / "grouped.gguf", groups=(4, 2)), "deepseek2")
    groups = [len(set(token)) for layer in (ids // 4).tolist() for token in layer]
    assert max(groups) == 2
    free = traced(with_experts(source, tmp_path / "free.gguf"), "deepseek2")
    assert max(len(set(token)) for layer in (free // 4).tolist() for token in layer) > 2


def traced(path: Path, arch: str) -> np.ndarray:
    """Chosen experts of a text [layers, tokens, 4], which are different ones for each token."""
    routers = routers_of(path)
    assert routers is not None and (routers.arch, routers.n_experts) == (arch, 16)
    with watched(path) as (llm, watch):
        recorded = record_experts(llm, watch, TOKENS, PROMPTS)
    for stage, n_tokens in zip(STAGES, (len(TOKENS), PROMPTS), strict=True):
        ids = recorded.ids[stage]
        assert ids.shape == (len(recorded.layers), n_tokens, 4) and ids.max() < 16, arch
        assert all(len(set(token)) == 4 for layer in ids.tolist() for token in layer), arch
    assert len(np.unique(recorded.ids["prefill"])) > 4, arch
    return recorded.ids["prefill"]


def test_routers_are_known_by_their_weights(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Not by the types of other weights; a change in any router is seen, and a file that ends early."""
    one, other = routers_of(tiny("qwen3moe", "Q8_0")), routers_of(tiny("qwen3moe", "F16"))
    assert one is not None and one == other and (one.arch, one.n_experts) == ("qwen3moe", 16)
    assert routers_of(tiny("llama")) is None
    content = bytearray(tiny("qwen3moe").read_bytes())
    places = {name: offset for name, _, offset, _ in native.core().tensor_places(str(tiny("qwen3moe")))["tensors"]}
    changed = tmp_path / "changed.gguf"
    for layer in (0, 1):
        damaged = bytearray(content)
        damaged[places[f"blk.{layer}.ffn_gate_inp.weight"]] ^= 1
        changed.write_bytes(damaged)
        assert routers_of(changed) != one
    changed.write_bytes(content[: places["blk.1.ffn_gate_inp.weight"] + 8])
    with pytest.raises(OallamaError, match="cut off"):
        routers_of(changed)
    changed.write_bytes(content[:100])
    with pytest.raises(OallamaError, match="cut off"):
        routers_of(changed)


def test_a_plan_says_that_uniform_routing_is_assumed(tiny: Callable[..., Path]) -> None:
    settings = Settings(n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1)
    for arch, expected in (("qwen3moe", 1), ("llama", 0)):
        path = tiny(arch)
        choices = Choices(device="CPU", profile=made_profile(path, None, settings))
        graph = autoplan.read_graph(path, settings)
        plan = autoplan.candidates(path, graph, None, settings, choices).best
        said = [note for note in plan.predicted.notes if "uniform routing" in note]
        assert len(said) == expected and said == expert_use(path, graph)[1]


# ---- as users type it ----------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> dict[str, str]:
    """An environment with a cache of its own."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def run(here: dict[str, str], *arguments: str | Path) -> str:
    done = cli.oallama("profile", *arguments, env=here)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(here: dict[str, str], expected: str, *arguments: str | Path) -> None:
    done = cli.oallama("profile", *arguments, env=here)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(expected, done.stderr), done.stderr


def test_a_trace_is_recorded_kept_shown_and_taken_elsewhere(
    tiny: Callable[..., Path], here: dict[str, str], tmp_path: Path
) -> None:
    model, copy = tiny("qwen3moe"), tmp_path / "copy.npz"
    refused(here, f"there is no routing trace of {model}", model, "--routing", "--show")
    plans = tmp_path / "cache" / "oallama" / "plans"
    plans.mkdir(parents=True)
    for name in (f"{model.stem}-0123456789ab.json", "other-0123456789ab.json"):
        (plans / name).write_text("{}")
    shown = run(here, model, "--routing", *SMALL, "-o", copy)
    assert "our mixed text" in shown and "16 tokens generated" in shown and max(map(len, shown.splitlines()[:20])) <= 80
    assert [path.name for path in plans.iterdir()] == ["other-0123456789ab.json"]
    content = json.loads(run(here, model, "--routing", "--show", "--json", "--k", "16,4"))
    kept = RoutingTrace.load(content["file"])
    assert kept.model == model.name and content["stages"]["decode"]["n_tokens"] == 16
    assert content["stages"]["prefill"]["hit_rates"]["belady"]["16"] == 1
    assert set(content["stages"]["prefill"]["hit_rates"]["lru"]) == {"4", "16"}
    assert sum(content["stages"]["decode"]["counts"][0]) == 4 * 16

    elsewhere = {**here, "XDG_CACHE_HOME": str(tmp_path / "elsewhere")}
    refused(elsewhere, "no routing trace", model, "--routing", "--show")
    run(elsewhere, model, "--routing", copy)
    again = json.loads(run(elsewhere, model, "--routing", "--show", "--json"))
    assert Path(again["file"]).read_bytes()[:2] == b"PK" and again["created"] == content["created"]


def test_texts_come_as_files_or_words(tiny: Callable[..., Path], here: dict[str, str], tmp_path: Path) -> None:
    model, file, picture = tiny("qwen3moe"), tmp_path / "prose.txt", tmp_path / "p.png"
    words = " ".join(MIXED_TEXT.read_text().split()[:300])
    file.write_text(words)
    by_file = json.loads(run(here, model, "--routing", file, *SMALL, "--json"))
    by_words = json.loads(run(here, model, "--routing", words, *SMALL, "--json", "--plot", picture))
    assert by_file["stages"] == by_words["stages"]
    assert (by_file["text"], by_words["text"]) == ("prose.txt", "the given text")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_recorded_by_a_plan(
    tiny: Callable[..., Path], rpc: Any, here: dict[str, str], tmp_path: Path
) -> None:
    model, file = tiny("qwen3moe"), tmp_path / "plan.json"
    plan = hand_plan(model, rpc.devices[0])
    other_name = plan.to_json().replace(f'"{rpc.devices[0]}"', '"RPC0"')
    file.write_text(other_name)
    planned = json.loads(run(here, model, "--routing", "--local-rpc", "--plan", file, *SMALL, "--json"))
    alone = json.loads(run(here, model, "--routing", *SMALL, "--json"))
    assert planned["stages"]["prefill"]["unions"] == pytest.approx(alone["stages"]["prefill"]["unions"], rel=0.05)


def test_what_cannot_be_traced_is_refused(tiny: Callable[..., Path], here: dict[str, str], tmp_path: Path) -> None:
    model, file = tiny("qwen3moe"), tmp_path / "trace.npz"
    refused(here, "has no experts: there is nothing to trace", tiny("llama"), "--routing")
    refused(here, "the text has .* tokens and a micro-batch 256", model, "--routing", "too short", *SMALL)
    refused(here, "there is no file nowhere.txt", model, "--routing", "nowhere.txt", *SMALL)
    refused(here, "--k 17: a layer of this model has 16 experts", model, "--routing", "--k", "4,17", *SMALL)
    refused(here, "--k expects numbers", model, "--routing", "--k", "many", *SMALL)
    refused(here, "--show needs --routing", model, "--show")
    refused(here, "--n-generate needs --routing", model, "-n", "16")
    refused(here, "needs --routing", model, "a text")
    refused(here, "--operators is about times", model, "--routing", "--operators")
    refused(here, "leave out the text", model, "--routing", "some words", "--show")
    refused(here, "give --plan or --vram", model, "--routing", "--local-rpc")
    run(here, model, "--routing", *SMALL, "-o", file)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    refused(here, r"trace\.npz is cut off or damaged", model, "--routing", file)
    file.write_bytes(content)
    other = tmp_path / "other.gguf"
    done = cli.oallama("make-model", other, "--arch", "qwen3moe", "--shape", "tiny", "--seed", "5")
    assert done.returncode == 0, done.stderr
    refused(here, r"trace\.npz is of another model than .*other\.gguf", other, "--routing", file)
