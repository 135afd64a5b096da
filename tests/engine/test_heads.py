"""MTP heads in a model's own file: which llama.cpp runs, bytes of model and heads in one budget, what a step costs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from oallama.data.plan import HOST, PlacementPlan
from oallama.data.profile import Profile
from oallama.data.workload import Workload
from oallama.drafts import Acceptance, Joint, plan_with_heads
from oallama.drafts import heads as heads_module
from oallama.engine import native, skeleton
from oallama.engine.draft_pair import check_pair
from oallama.engine.load_settings import Settings, make_params
from oallama.engine.mtp_heads import CHAINS, KEEP_STATES, ONE_HEAD, count_heads
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.planning.heads import guesses_of
from support import mtp_model as mtp_model_module
from support.archs import SOURCE, TOKENS
from support.logits import compute_logits, nmse
from support.made_profile import made_profile
from support.mtp_model import mtp_model, with_tokens
from support.mtp_recipes import RECIPES
from support.placements import placed_jobs

SETTINGS = Settings(n_ctx=256, n_batch=256, n_ubatch=64, n_threads=1)
SURE = Acceptance(1.0, "given")
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return mtp_model(folder, "glm4moe")


@pytest.fixture(scope="module")
def profile(model: Path, rpc: Any) -> Profile:
    return made_profile(model, rpc.devices[0], SETTINGS)


@pytest.fixture(scope="module")
def joint(model: Path, profile: Profile, rpc: Any) -> Callable[..., Joint]:
    def plan(vram: str | int, longest: int = 4, path: Path = model, **changes: Any) -> Joint:
        choices = Choices(rpc.devices[0], profile, workload=Workload(64, 32), **changes)
        return plan_with_heads(path, vram, SETTINGS, choices, SURE, longest)

    return plan


# ---- models with heads that do not guess -----------------------------------------------------------------------------


def test_heads_that_do_not_guess_do_not_keep_a_model_from_its_plan(lib: Path, model: Path, tmp_path: Path) -> None:
    """llama.cpp deals them like other layers, although their weights stay in the file."""
    jobs = placed_jobs(model, [], [], tmp_path, tokens=TOKENS, n_ctx=128, n_ubatch=32)
    plain = {"model": str(model), "table": "", "devices": [], "rpc": [], "tokens": TOKENS, "n_ctx": 128, "n_ubatch": 32}
    expected, *found = compute_logits(lib, [plain, *jobs], tmp_path)
    assert all(nmse(logits, expected) < 1e-5 for logits in found)


def test_all_layers_are_listed(model: Path, profile: Profile, rpc: Any) -> None:
    graph = autoplan.read_graph(model, SETTINGS)
    assert (graph.n_layer, graph.n_heads, graph.n_layer_all) == (6, 1, 7)
    found = autoplan.candidates(model, graph, 64 * MIB, SETTINGS, Choices(rpc.devices[0], profile))
    assert {"exact", "layers"} <= found.plans.keys()
    assert all(len(plan.layers) == 8 for plan in found.plans.values())  # six, the head, the output
    assert found.plans["layers"].planner["params"]["n_gpu_layers"] == 8


# ---- which heads llama.cpp runs --------------------------------------------------------------------------------------


def test_architectures_are_those_of_the_sources() -> None:
    """A graph of one head asserts that there is one; the names are llama-arch.cpp's."""
    names = dict(re.findall(r"\{ LLM_ARCH_(\w+), +\"([\w.-]+)\" +\}", (SOURCE / "src" / "llama-arch.cpp").read_text()))
    by_file = {re.sub(r"\W", "", name).replace("_", ""): name for name in names.values()}
    one, chains = set(), set()
    for file in (SOURCE / "src" / "models").glob("*.cpp"):
        text = file.read_text()
        if "graph_mtp::graph_mtp(" in text:
            kind = one if re.search(r"n_layer_nextn == 1 &&", text) else chains
            kind.add(by_file[file.stem.replace("-", "")])
    assert (one, chains) == (ONE_HEAD, CHAINS)


def test_states_that_are_kept_are_those_of_the_sources() -> None:
    text = (SOURCE / "src" / "llama-arch.cpp").read_text()
    names = dict(re.findall(r"\{ LLM_ARCH_(\w+), +\"([\w.-]+)\" +\}", text))
    body = re.search(r"bool llm_arch_supports_rs_rollback.*?return true", text, re.DOTALL)
    assert body
    kept = {names[name] for name in re.findall(r"case LLM_ARCH_(\w+):", body[0])}
    assert kept & (ONE_HEAD | CHAINS) == KEEP_STATES


def test_a_model_without_heads(tiny: Callable[..., Path]) -> None:
    with pytest.raises(OallamaError, match=r"llama-F16\.gguf has no MTP heads; leave --heads out, or give a draft"):
        count_heads(tiny("llama", "F16"))


def test_heads_that_are_not_in_the_file(folder: Path) -> None:
    """Converted without them, its metadata may have them all the same."""
    path = mtp_model(folder, "glm4moe", 0, says=1)
    with pytest.raises(OallamaError, match=r"1 MTP heads by its metadata, but no blk\.6\.nextn\.eh_proj\.weight"):
        count_heads(path)


def test_heads_in_another_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's graph for MiMo asserts that queries, keys and values are one matrix."""
    monkeypatch.setattr(mtp_model_module, "finished_head", lambda arch, prefix, tensors, n_embd: tensors)
    with pytest.raises(OallamaError, match=r"2 MTP heads by its metadata, but no blk\.6\.attn_qkv\.weight"):
        count_heads(mtp_model(folder / "apart", "mimo2", 2))


def test_heads_that_end_llama_cpp(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek 4's graph of a head asserts that its layer does not compress the cache: tried in another process."""
    monkeypatch.delitem(RECIPES, "deepseek4")
    said = r"llama.cpp ends the process on the MTP heads of .*\(deepseek4\.cpp:\d+: GGML_ASSERT.*\); leave --heads out"
    with pytest.raises(OallamaError, match=said):
        count_heads(mtp_model(folder / "compressed", "deepseek4"))


def test_a_model_that_takes_images(folder: Path) -> None:
    """Its positions have sections, which the graph of the head does not know: ggml asserts."""
    with pytest.raises(OallamaError, match=r"does not run the MTP head of .*, which takes images"):
        count_heads(mtp_model(folder / "images", "glm4moe", sections=True))


def test_more_heads_than_llama_cpp_runs(folder: Path) -> None:
    with pytest.raises(OallamaError, match=r"has 2 MTP heads; llama.cpp runs one of architecture 'glm4moe'"):
        count_heads(mtp_model(folder, "glm4moe", 2))


def test_an_architecture_whose_heads_have_no_graph(folder: Path) -> None:
    with pytest.raises(OallamaError, match=r"does not run the MTP heads of .*architecture 'bailingmoe2'"):
        count_heads(mtp_model(folder, "bailingmoe2"))


def test_states_that_cannot_be_taken_back(folder: Path) -> None:
    with pytest.raises(OallamaError, match=r"keeps recurrent states, which llama.cpp takes back by copying"):
        count_heads(mtp_model(folder, "qwen3next"))


def test_the_model_as_its_own_draft(model: Path) -> None:
    with pytest.raises(OallamaError, match="is the model itself; take --heads in place of --draft"):
        check_pair(model, model)


# ---- one budget ------------------------------------------------------------------------------------------------------


def by_kind(path: Path, plan: PlacementPlan, **changes: Any) -> dict[str, dict[str, int]]:
    devices = tuple(name for name in plan.devices if name != HOST)
    settings = replace(SETTINGS, **asdict(plan.context), devices=devices)
    return skeleton.dry_run(path, replace(settings, **changes), plan.to_backend_map())


def test_model_and_heads_fit_the_budget_by_dry_run(model: Path, joint: Callable[..., Joint], rpc: Any) -> None:
    device, budget = rpc.devices[0], 24 * MIB
    found = joint(budget)
    assert found.pairs.keys() == {"no head", f"head on {device}", "head on CPU"} and not found.failed
    for name, held in found.held.items():
        plan = found.targets[name]
        assert plan.context.n_outputs_max == 5 and len(plan.layers) == 8
        assert plan.layers[6] == name.removeprefix("head on ")
        assert {t.device for w, t in plan.tensors.items() if w.startswith("blk.6.")} == {plan.layers[6]}
        # The model's own context, and that of its heads, each with all weights.
        own, theirs = by_kind(model, plan, heads="loaded"), by_kind(model, plan, heads="run", n_outputs_max=1)
        for d in (device, HOST):
            predicted = plan.predicted.devices.get(d)
            zero = {"weights": 0, "kv": 0, "compute": 0}
            o, t = own.get(d, zero), theirs.get(d, zero)
            assert predicted is not None and predicted.weights == o["weights"] == t["weights"]
            assert predicted.kv == o["kv"] + t["kv"]
            assert predicted.compute >= o["compute"] + t["compute"]  # both grow when heads guess
            assert found.pairs[name].nbytes[d] == predicted.total >= held.get(d, 0)
        assert 0 < found.pairs[name].nbytes[device] <= budget == plan.budgets[device]
    beside = found.targets[f"head on {device}"]
    assert found.held[f"head on {device}"][device] > sum(
        t.nbytes for name, t in beside.tensors.items() if name.startswith("blk.6.")
    )


def test_drawing_tokens_on_the_device_is_counted(model: Path, folder: Path) -> None:
    """llama-server adds that to the heads' context when it is there already."""
    path = with_tokens(model, folder / "more-tokens.gguf", 64)
    settings = replace(SETTINGS, heads="run", n_ubatch=1, n_outputs_max=1, devices=())
    params = make_params(settings)
    before, after = (
        sum(b["compute"] for b in native.core().memory_dry_run(str(path), *params.addresses, guess))
        for guess in (False, True)
    )
    assert after > before
    assert after == sum(sizes["compute"] for sizes in skeleton.dry_run(path, settings).values())


def test_a_head_pushes_weights_off_the_device(joint: Callable[..., Joint], rpc: Any) -> None:
    device = rpc.devices[0]
    found = joint(16 * MIB)
    plain, beside = (found.targets[name] for name in ("no head", f"head on {device}"))

    def own(plan: PlacementPlan) -> int:
        return sum(t.nbytes for w, t in plan.tensors.items() if t.device == device and not w.startswith("blk.6."))

    assert own(beside) < own(plain)


def test_heads_larger_than_the_budget_are_left_out(joint: Callable[..., Joint], rpc: Any) -> None:
    found = joint(2 * MIB)
    assert f"head on {rpc.devices[0]}" in found.failed
    assert {choice.pair for choice in found.choices} <= {"no head", "head on CPU"}


def test_the_choice_is_the_fastest_and_said(joint: Callable[..., Joint]) -> None:
    found = joint(64 * MIB)
    assert found.best.n and found.draft_plan is None and guesses_of(found.plan) == found.best.n
    assert found.plan.tensors == found.targets[found.best.pair].tensors
    assert found.best.request_s == min(choice.request_s for choice in found.choices)
    assert f"the MTP head guesses {found.best.n} at a time" in found.describe()
    never = found.with_acceptance(Acceptance(0.0, "given"))
    assert not never.best.n and never.plan is found.targets["no head"]
    assert "without the MTP head" in never.describe() and found.to_dict()["draft"] is None


def test_a_chain_of_heads_guesses_as_many_as_it_has(folder: Path, rpc: Any) -> None:
    """Each guess is a pass of another head over the tokens of the guesses before; all read what is there."""
    path = mtp_model(folder, "hy_v3", 2)
    times = made_profile(path, rpc.devices[0], SETTINGS)
    choices = Choices(rpc.devices[0], times, workload=Workload(64, 32))
    found = plan_with_heads(path, 64 * MIB, SETTINGS, choices, SURE)
    assert {choice.n for choice in found.choices} == {0, 1, 2}
    pair = found.pairs[f"head on {rpc.devices[0]}"]
    assert pair.guess_s[2] > 2 * pair.guess_s[1]
    assert found.targets[f"head on {rpc.devices[0]}"].layers[6:8] == (rpc.devices[0],) * 2


@pytest.mark.parametrize(
    ("arch", "n_heads"),
    [("bailingmoe3", 1), ("deepseek4", 1), ("mimo2", 2), ("nemotron_h_moe", 1), ("step35", 2)],
)
def test_heads_of_other_forms_are_planned(arch: str, n_heads: int, folder: Path, rpc: Any) -> None:
    path, device = mtp_model(folder, arch, n_heads), rpc.devices[0]
    times = made_profile(path, device, SETTINGS)
    choices = Choices(device, times, workload=Workload(64, 32))
    found = plan_with_heads(path, 256 * MIB, SETTINGS, choices, SURE)
    assert found.pairs.keys() == {"no head", f"head on {device}", "head on CPU"} and not found.failed
    assert found.best.pair == f"head on {device}"


def test_matrices_that_a_head_does_not_read_stay_on_the_host(folder: Path, rpc: Any) -> None:
    """The head of a model with sparse attention attends to the whole cache: its indexer would fill the device."""
    path, device = mtp_model(folder, "glm-dsa"), rpc.devices[0]
    choices = Choices(device, made_profile(path, device, SETTINGS), workload=Workload(64, 32))
    plan = plan_with_heads(path, 128 * MIB, SETTINGS, choices, SURE).targets[f"head on {device}"]
    head = {name: t.device for name, t in plan.tensors.items() if name.startswith("blk.6.") and "norm" not in name}
    assert {d for name, d in head.items() if ".indexer." in name} == {HOST}
    assert {d for name, d in head.items() if ".indexer." not in name} == {device}


@pytest.mark.parametrize("vram", ["50%", "minimal"])
def test_budgets_of_one_model_are_refused(vram: str, joint: Callable[..., Joint]) -> None:
    with pytest.raises(OallamaError, match="with a draft give bytes for both"):
        joint(vram)


def test_an_unknown_device(model: Path, profile: Profile) -> None:
    with pytest.raises(OallamaError, match="unknown device"):
        plan_with_heads(model, 64 * MIB, SETTINGS, Choices("NPU0", profile), SURE)


def test_without_an_accelerator(model: Path, profile: Profile) -> None:
    found = plan_with_heads(model, None, SETTINGS, Choices(HOST, profile, workload=Workload(64, 32)), SURE)
    assert found.pairs.keys() == {"no head", "head on CPU"} and found.best.pair == "head on CPU"


def test_room_that_does_not_settle_is_said(
    joint: Callable[..., Joint], rpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_module, "_ROUNDS", 0)
    assert "does not settle" in str(joint(64 * MIB).failed[f"head on {rpc.devices[0]}"])
