"""`oallama.Llama`: upstream's class without a plan, and the same answers with one, within the budget."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama, OallamaError, PlacementPlan
from oallama.data.profile import Profile
from oallama.engine import runtime, skeleton
from oallama.engine.load_settings import FLASH_ATTN, KV_TYPES, Settings
from oallama.loading import start
from oallama.loading.autoplan import Choices
from oallama.profiling.fingerprint import cpu_set
from support.made_profile import made_profile
from support.processes import ran_python

Upstream = runtime.llama_cpp().Llama
PROMPT = "The quick brown fox jumps over"
SMALL: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "seed": 3, "verbose": False}
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", "F16")


@pytest.fixture(scope="module")
def device(rpc: Any) -> str:
    return rpc.devices[0]


@pytest.fixture(scope="module")
def profile(model: Path, device: str) -> Profile:
    return made_profile(model, device, Settings(n_ctx=256, n_threads=1))


@pytest.fixture(scope="module")
def plan(model: Path, device: str, profile: Profile) -> PlacementPlan:
    """With memory for the logits of all rows."""
    settings = Settings(n_ctx=256, n_batch=256, n_ubatch=256, n_threads=1)
    return start.plan_model(model, "50%", settings, Choices(device=device, profile=profile, all_logits=True))


# ---- without a plan: upstream ----------------------------------------------------------------------------------------


def both(model: Path, use: Callable[[Any], Any], **arguments: Any) -> None:
    """`use` gives the same with both classes."""
    ours, theirs = (use(cls(str(model), **SMALL, **arguments)) for cls in (Llama, Upstream))
    if isinstance(theirs, np.ndarray):
        assert np.array_equal(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize(
    ("name", "near"), [("vran", "vram"), ("n_tcx", "n_ctx"), ("n_output_max", "n_outputs_max"), ("xyzzy", None)]
)
def test_an_argument_that_nobody_knows_is_refused(model: Path, name: str, near: str | None) -> None:
    also = f"; did you mean {near!r}?" if near else ""
    with pytest.raises(TypeError, match=re.escape(f"unexpected keyword argument {name!r}{also}") + "$"):
        Llama(str(model), **{name: "4GiB"}, **SMALL)


def answer(llm: Any, **arguments: Any) -> Any:
    result = llm.create_completion(PROMPT, max_tokens=8, temperature=0.0, **arguments)
    return result["choices"], result["usage"]


def logits(llm: Any) -> np.ndarray:
    llm.eval(llm.tokenize(PROMPT.encode()))
    return llm.scores[: llm.n_tokens].copy()


def streamed(llm: Any) -> list[str]:
    return [c["choices"][0]["text"] for c in llm(PROMPT, max_tokens=8, temperature=0.0, stream=True)]


def chat(llm: Any) -> Any:
    messages = [{"role": "user", "content": "Hello"}]
    return llm.create_chat_completion(messages, max_tokens=8, temperature=0.0)["choices"]


def continued(llm: Any) -> Any:
    llm.eval(llm.tokenize(PROMPT.encode()))
    state = llm.save_state()
    first = llm.sample(temp=0.0)
    llm.reset()
    llm.eval([5, 6, 7])
    llm.load_state(state)
    return first, llm.n_tokens, len(state.llama_state), answer(llm)


@pytest.mark.parametrize(
    ("use", "arguments"),
    [
        pytest.param(lambda llm: answer(llm, logprobs=3), {"logits_all": True}, id="completion and logprobs"),
        pytest.param(
            lambda llm: [llm(PROMPT, max_tokens=8, temperature=0.9)["choices"] for _ in range(2)], {}, id="sampling"
        ),
        pytest.param(logits, {"logits_all": True}, id="logits"),
        pytest.param(lambda llm: llm.embed([PROMPT, "another text"]), {"embedding": True}, id="embeddings"),
        pytest.param(streamed, {}, id="streaming"),
        pytest.param(chat, {}, id="chat"),
        pytest.param(continued, {}, id="state"),
        pytest.param(lambda llm: (llm.__getstate__(), answer(pickle.loads(pickle.dumps(llm)))), {}, id="pickle"),
    ],
)
def test_what_is_upstreams(model: Path, use: Callable[[Any], Any], arguments: dict[str, Any]) -> None:
    both(model, use, **arguments)


def test_grammar_is_upstreams(model: Path) -> None:
    from oallama import LlamaGrammar

    grammar = LlamaGrammar.from_string('root ::= ("yes" | "no") " and " [0-9]')
    both(model, lambda llm: answer(llm, grammar=grammar))
    text = answer(Llama(str(model), **SMALL), grammar=grammar)[0][0]["text"]
    assert text[:-1] in ("yes and ", "no and ") and text[-1].isdigit()


def test_constructor_shows_upstreams_arguments() -> None:
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (Llama, Upstream))
    assert [name for name in ours if name not in theirs] == ["vram", "plan", "margin", "profile", "verify", "progress"]
    assert all(ours[name].default == theirs[name].default for name in theirs)


def test_no_plan_no_report_of_one(model: Path) -> None:
    llm = Llama(str(model), **SMALL)
    assert llm.plan is None
    cpu = llm.placement()["CPU"]
    assert cpu.measured.weights > 4 * MIB and cpu.measured.kv > 0 and cpu.tensors is None and cpu.budget is None
    llm.close()
    llm.close()


def test_importing_is_light_and_names_are_forwarded() -> None:
    program = (
        "import sys, oallama; assert 'numpy' not in sys.modules and 'llama_cpp' not in sys.modules\n"
        "from oallama.engine import runtime; assert 'llama_cpp' not in sys.modules\n"
        "from oallama import LlamaGrammar, LlamaRAMCache, LlamaState, LogitsProcessorList, LLAMA_SPLIT_MODE_LAYER\n"
        "from oallama import Llama, __version__, llama_chat_format\n"
        "import llama_cpp; assert issubclass(Llama, llama_cpp.Llama)\n"
        "try: oallama.Nonsense\n"
        "except AttributeError: print('ok')"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB")}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert result.stdout.strip() == "ok", result.stderr[-2000:]


def test_llama_cpp_behind_oallama_has_our_engine(tmp_path: Path) -> None:
    """Packages that import llama-cpp-python themselves need no more; a library that the user names stays in force."""
    program = (
        "import oallama, llama_cpp, llama_cpp.mtmd_cpp\n"
        "from importlib.machinery import SourceFileLoader\n"
        "from oallama.engine import runtime; assert runtime.llama_cpp() is llama_cpp\n"
        "assert type(llama_cpp.__spec__.loader) is type(llama_cpp.__loader__) is SourceFileLoader\n"
        "print(llama_cpp.llama_cpp._base_path)"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("LLAMA_CPP_LIB_PATH", "MTMD_CPP_LIB")}
    run = partial(subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True)
    assert run(env=env).stdout.strip() == str(runtime.lib_dir())
    other = run(env=env | {"LLAMA_CPP_LIB_PATH": str(tmp_path)})
    assert other.returncode == 1 and "Shared library with base name 'llama' not found" in other.stderr


# ---- with a plan -----------------------------------------------------------------------------------------------------


def check_memory(llm: Llama, device: str) -> None:
    """Measured bytes of the device: within the budget, and within 1 % or 4 MiB of what was predicted."""
    at = llm.placement()[device]
    assert at.predicted is not None and at.budget is not None and at.tensors
    assert at.measured.total <= at.budget
    assert abs(at.measured.total - at.predicted.total) <= max(4 * MIB, 0.01 * at.predicted.total)
    assert at.process_bytes >= at.measured.total > 0


@pytest.mark.parametrize("arch", ["llama", "minicpm3", "qwen2", "qwen3moe"])
@pytest.mark.parametrize("vram", ["50%", 24 * MIB])
def test_plan_keeps_the_tokens_and_the_budget(
    tiny: Callable[..., Path], device: str, arch: str, vram: str | int
) -> None:
    path = tiny(arch, "F16")
    settings = Settings(n_ctx=256, n_threads=1)
    choices = Choices(device=device, profile=made_profile(path, device, settings), planner="oato")
    expected = answer(Llama(str(path), flash_attn=True, **SMALL))
    llm = Llama(str(path), plan=start.plan_model(path, vram, settings, choices), **SMALL)
    assert answer(llm) == expected
    check_memory(llm, device)
    homes = llm.placement()
    assert len(homes[device].tensors) + len(homes["CPU"].tensors) == len(llm.plan.tensors)
    llm.close()


def test_plan_and_plan_file(model: Path, plan: PlacementPlan, device: str, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    expected = answer(Llama(str(model), flash_attn=True, **SMALL))
    for source in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        llm = Llama(str(model), plan=source, n_threads=1, verbose=False)
        assert llm.plan.hash == plan.hash and llm.n_ctx() == 256
        assert answer(llm) == expected
        check_memory(llm, device)
        llm.close()


def test_plan_with_state_streaming_chat_and_logprobs(model: Path, plan: PlacementPlan) -> None:
    llm = Llama(str(model), plan=plan, logits_all=True, **SMALL)
    tokens = llm.tokenize(PROMPT.encode())
    llm.eval(tokens)
    state, first = llm.save_state(), llm.sample(temp=0.0)
    llm.reset()
    llm.load_state(state)
    assert llm.n_tokens == len(tokens)
    assert next(llm.generate(tokens, temp=0.0)) == first
    assert answer(llm, logprobs=2)[0][0]["logprobs"]["top_logprobs"]
    assert "".join(streamed(llm)) == answer(llm)[0][0]["text"]
    assert llm.create_chat_completion([{"role": "user", "content": "Hi"}], max_tokens=4)["choices"]


def test_plan_without_memory_for_all_logits_says_so(model: Path, plan: PlacementPlan) -> None:
    lean = replace(plan, context=replace(plan.context, n_outputs_max=1))
    for wanted in ("logits_all", "embedding"):
        with pytest.raises(OallamaError, match=r"no memory for the logits of all rows.*--all-logits"):
            Llama(str(model), plan=lean, **{wanted: True}, **SMALL)


def test_plan_with_embeddings(model: Path, profile: Profile, device: str) -> None:
    expected = Llama(str(model), embedding=True, flash_attn=True, **SMALL).embed([PROMPT, "another text"])
    llm = Llama(str(model), embedding=True, vram="50%", profile=profile, **SMALL)
    for ours, theirs in zip(llm.embed([PROMPT, "another text"]), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-2)
    check_memory(llm, device)


def test_plan_survives_pickling(model: Path, plan: PlacementPlan) -> None:
    llm = Llama(str(model), plan=plan, **SMALL)
    again = pickle.loads(pickle.dumps(llm))
    assert again.plan == plan and answer(again) == answer(llm)
    assert again.context_params.flash_attn_type == FLASH_ATTN["auto"]


def test_a_plan_is_its_threads_alone(model: Path, plan: PlacementPlan) -> None:
    """While one thread loads by a plan, loads of another follow upstream's rules. (Not several models over one RPC
    server at once: ggml-rpc ends the process then.)"""
    expected = answer(Llama(str(model), flash_attn=True, **SMALL))
    results: list[Any] = []

    def work() -> None:
        for _ in range(3):
            llm = Llama(str(model), plan=plan, **SMALL)
            results.append(answer(llm))
            llm.close()

    thread = threading.Thread(target=work)
    thread.start()
    unplanned = Settings(n_ctx=256, devices=())
    loads = 0
    while thread.is_alive():
        assert skeleton.dry_run(model, unplanned)["CPU"]["kv"] > 0
        loads += 1
    thread.join()
    assert results == [expected] * 3 and loads > 0


def test_flash_attention_is_auto_unless_given(model: Path, profile: Profile) -> None:
    for given, expected in (({}, "auto"), ({"flash_attn": True}, "on"), ({"flash_attn": False}, "off")):
        llm = Llama(str(model), vram="50%", profile=profile, **SMALL, **given)
        assert llm.plan.context.flash_attn == expected
        assert llm.context_params.flash_attn_type == FLASH_ATTN[expected]
        llm.close()


def test_batches_follow_upstreams_rules(model: Path, profile: Profile) -> None:
    llm = Llama(str(model), vram="50%", profile=profile, n_batch=64, n_ubatch=512, **SMALL)
    context = llm.plan.context
    assert (context.n_ctx, context.n_batch, context.n_ubatch) == (256, 64, 64)
    assert (llm.n_batch, llm.context_params.n_ubatch) == (64, 64)
    whole = Llama(str(model), vram="75%", profile=profile, n_threads=1, n_ctx=0, verbose=False)
    assert whole.plan.context.n_ctx == whole.n_ctx() == whole._model.n_ctx_train()
    assert whole.context_params.n_batch == whole.plan.context.n_batch


def test_a_plan_knows_whether_weights_are_read(model: Path, profile: Profile) -> None:
    """From memory that is not the mapped file a GPU copies faster: the plan says so, and brings it along."""
    read = Llama(str(model), vram="50%", profile=profile, use_mmap=False, **SMALL)
    assert read.plan is not None and read.plan.context.use_mmap is False
    again = Llama(str(model), plan=PlacementPlan.from_json(read.plan.to_json()), verbose=False)
    assert [llm.model_params.load_mode for llm in (read, again)] == [runtime.llama_cpp().LLAMA_LOAD_MODE_NONE] * 2
    mapped = Llama(str(model), vram="50%", profile=profile, **SMALL)
    assert mapped.plan is not None and mapped.plan.context.use_mmap is None


def test_threads_default_to_all(model: Path, plan: PlacementPlan) -> None:
    llm = Llama(str(model), plan=plan, verbose=False)
    assert llm.context_params.n_threads == llm.context_params.n_threads_batch == len(cpu_set())


# ---- mistakes --------------------------------------------------------------------------------------------------------


def refuses(text: str, model: Path, **arguments: Any) -> None:
    with pytest.raises(OallamaError) as caught:
        Llama(str(model), **{**SMALL, **arguments})
    assert text in str(caught.value)


def test_arguments_that_contradict(model: Path, plan: PlacementPlan, profile: Profile) -> None:
    refuses("n_gpu_layers", model, plan=plan, n_gpu_layers=10)
    refuses("tensor_split", model, vram="50%", tensor_split=[1.0])
    refuses("not both", model, plan=plan, vram="50%")
    refuses("give vram=", model, profile=profile)
    refuses("no type of a KV cache", model, vram="50%", profile=profile, type_k=99)


def test_plan_for_something_else(tiny: Callable[..., Path], model: Path, plan: PlacementPlan, tmp_path: Path) -> None:
    refuses("another model", tiny("qwen2"), plan=plan)
    refuses("n_ctx up to 256, asked for 512; make a new plan", model, plan=plan, n_ctx=512)
    refuses("type_k f16", model, plan=plan, type_k=KV_TYPES["q8_0"])
    elsewhere = replace(
        plan,
        devices=tuple(d.replace("RPC", "CUDA") for d in plan.devices),
        layers=tuple(d.replace("RPC", "CUDA") for d in plan.layers),
    )
    refuses("uses device 'CUDA", model, plan=elsewhere)
    refuses("does not exist", model, plan=tmp_path / "none.json")


def test_stale_profile(model: Path, profile: Profile) -> None:
    old = replace(profile, fingerprint={**profile.fingerprint, "engine": "another"})
    with pytest.raises(OallamaError, match=r"is stale \(engine: profile has another.*oallama profile"):
        Llama(str(model), vram="50%", profile=old, **SMALL)


def test_budget_too_small_names_the_minimum(model: Path, profile: Profile, device: str) -> None:
    with pytest.raises(OallamaError, match=r"minimum is (\d+MiB)") as caught:
        Llama(str(model), vram="64KiB", profile=profile, **SMALL)
    minimum = str(caught.value).split("minimum is ")[1].split(" ")[0]
    at = Llama(str(model), vram=minimum, profile=profile, **SMALL).placement()[device]
    assert at.budget is not None and at.measured.total <= at.budget


def test_missing_model_is_upstreams_error_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Model path does not exist"):
        Llama(str(tmp_path / "none.gguf"), verbose=False)
    with pytest.raises(OallamaError, match="no such model file"):
        Llama(str(tmp_path / "none.gguf"), vram="1GiB", verbose=False)


def test_a_failed_load_leaves_no_map_behind(model: Path, tiny: Callable[..., Path], plan: PlacementPlan) -> None:
    broken = replace(plan, tensors={**plan.tensors, "blk.9.nothing": next(iter(plan.tensors.values()))})
    refuses("the model has no tensor 'blk.9.nothing'", model, plan=broken)
    assert answer(Llama(str(tiny("qwen2")), **SMALL))


def test_the_budget_auto_without_an_accelerator_plans_for_the_cpu(model: Path) -> None:
    """In a process of its own: this one has an RPC device."""
    program = (
        "import sys; from oallama import Llama\n"
        "llm = Llama(sys.argv[1], n_ctx=256, vram='auto', n_threads=1, verbose=False)\n"
        "print(llm.plan.devices, len(llm('Once', max_tokens=2)['choices'][0]['text']) > 0)"
    )
    assert ran_python(program, model).stdout == "('CPU',) True\n"
