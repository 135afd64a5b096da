"""A model and its draft: which go together, bytes of both in one budget, how often guesses are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import oallama
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.profile import Profile
from oallama.data.workload import Workload
from oallama.drafts import Acceptance, Joint, acceptance, known, measure, plan_jointly
from oallama.engine import draft_pair, skeleton
from oallama.engine.draft_pair import check_pair
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading.autoplan import Choices
from oallama.loading.start import plan_model
from support.made_profile import made_profile

SETTINGS = Settings(n_ctx=256, n_batch=256, n_ubatch=64, n_threads=1)
SURE = Acceptance(1.0, "given")
MIB = 1 << 20


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Path]) -> Path:
    return tiny("llama", "F16")


@pytest.fixture(scope="module")
def profile(target: Path, rpc: Any) -> Profile:
    return made_profile(target, rpc.devices[0], SETTINGS)


@pytest.fixture(scope="module")
def joint(target: Path, draft: Path, profile: Profile, rpc: Any) -> Callable[..., Joint]:
    def plan(vram: str | int, longest: int = 4, **changes: Any) -> Joint:
        choices = Choices(rpc.devices[0], profile, workload=Workload(64, 32), **changes)
        return plan_jointly(target, draft, vram, SETTINGS, choices, SURE, longest)

    return plan


# ---- which go together -----------------------------------------------------------------------------------------------


def test_a_model_guesses_for_itself_and_for_others_of_its_vocabulary(target: Path, draft: Path) -> None:
    check_pair(target, draft)
    check_pair(target, target)


def test_another_vocabulary_is_refused(target: Path) -> None:
    with pytest.raises(OallamaError, match=r"storyteller-F16.gguf cannot guess for llama-F16.gguf: .*same vocabulary"):
        check_pair(target, oallama.demo_model())


def test_one_other_token_is_refused(target: Path, tmp_path: Path) -> None:
    """llama.cpp compares all but the first five."""
    other = tmp_path / "other.gguf"
    content = target.read_bytes()
    vocabulary = draft_pair_tokens(target)
    token = next(t for t in vocabulary[300:] if len(t) > 4 and content.count(t) == 1)
    other.write_bytes(content.replace(token, token[:-1] + bytes([token[-1] ^ 1])))
    with pytest.raises(OallamaError, match=r"token \d+ is .*, the model's is"):
        check_pair(target, other)


def draft_pair_tokens(path: Path) -> list[bytes]:
    from gguf import GGUFReader

    field = GGUFReader(path).fields["tokenizer.ggml.tokens"]
    return [bytes(field.parts[i]) for i in field.data]


@pytest.mark.parametrize(
    "metadata",
    [
        {"general.architecture": "eagle3"},
        {"general.architecture": "llama", "llama.nextn_predict_layers": "1", "llama.block_count": "1"},
    ],
)
def test_heads_are_refused(
    metadata: dict[str, str], target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE-3, and a file that is nothing but an MTP head."""
    monkeypatch.setattr(draft_pair, "metadata", lambda model, key: metadata.get(key, ""))
    with pytest.raises(OallamaError, match="is a head on the hidden states of its target"):
        check_pair(target, draft)


def test_recurrent_states_are_refused(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oallama.engine.runtime.llama_cpp(), "llama_model_is_hybrid", lambda model: True)
    with pytest.raises(OallamaError, match=r"llama-F16\.gguf keeps recurrent states"):
        check_pair(target, draft)


@pytest.mark.parametrize("which", [0, 1])
def test_a_file_that_is_not_there(which: int, target: Path) -> None:
    files = [target, target]
    files[which] = Path("/nonexistent.gguf")
    with pytest.raises(OallamaError, match=r"no such model file: /nonexistent\.gguf"):
        check_pair(*files)


# ---- one budget ------------------------------------------------------------------------------------------------------


def dry_run(path: Path, plan: PlacementPlan) -> dict[str, int]:
    devices = tuple(name for name in plan.devices if name != HOST)
    settings = replace(SETTINGS, **asdict(plan.context), devices=devices)
    found = skeleton.dry_run(path, settings, plan.to_backend_map())
    return {name: sum(sizes.values()) for name, sizes in found.items()}


def test_both_fit_the_budget_by_dry_run(target: Path, draft: Path, joint: Callable[..., Joint], rpc: Any) -> None:
    device, budget = rpc.devices[0], 8 * MIB
    found = joint(budget)
    assert found.pairs.keys() == {"no draft", f"draft on {device}", "draft on CPU"} and not found.failed
    for name, guesser in found.drafts.items():
        both = (dry_run(target, found.targets[name]), dry_run(draft, guesser))
        sums = {d: sum(sizes.get(d, 0) for sizes in both) for d in (device, HOST)}
        assert found.pairs[name].nbytes == sums and 0 < sums[device] <= budget
        assert found.targets[name].context.n_outputs_max == 5 and guesser.context.n_outputs_max in (0, 1)
    beside = found.drafts[f"draft on {device}"]
    assert {t.device for name, t in beside.tensors.items() if name != "token_embd.weight"} == {device}
    assert found.drafts["draft on CPU"].devices == (HOST,)
    weights = {name: plan.predicted.devices[device].weights for name, plan in found.targets.items()}
    assert weights[f"draft on {device}"] < weights["no draft"]  # it gives way to the draft


def test_a_draft_larger_than_the_budget_is_left_out(joint: Callable[..., Joint], rpc: Any) -> None:
    found = joint(3 * MIB)
    reason = str(found.failed[f"draft on {rpc.devices[0]}"])
    assert "does not fit the budget" in reason or "taken by" in reason or "too small" in reason
    assert {choice.pair for choice in found.choices} == {"no draft", "draft on CPU"}


def test_the_choice_is_the_fastest_and_said(joint: Callable[..., Joint]) -> None:
    found = joint(64 * MIB)
    assert found.best.n and found.draft_plan is found.drafts[found.best.pair]
    assert found.best.request_s == min(choice.request_s for choice in found.choices)
    assert f"one-layer.gguf guesses {found.best.n} at a time" in found.describe()
    assert found.to_dict()["chosen"]["n"] == found.best.n
    never = found.with_acceptance(Acceptance(0.0, "given"))
    assert not never.best.n and never.draft_plan is None and never.plan is found.targets["no draft"]
    assert "without the draft one-layer.gguf" in never.describe() and "0% of guesses right, given" in never.describe()


def test_the_draft_has_the_target_s_context(joint: Callable[..., Joint]) -> None:
    """Its micro-batch, too, where the target's plan takes a smaller one."""
    found = joint(6 * MIB)
    for name, guesser in found.drafts.items():
        target = found.targets[name].context
        assert (guesser.context.n_ubatch, guesser.context.n_ctx) == (target.n_ubatch, target.n_ctx)


def test_lengths_up_to_the_longest(joint: Callable[..., Joint]) -> None:
    assert {choice.n for choice in joint(64 * MIB, longest=2).choices} == {0, 1, 2}
    for longest in (0, 5):
        with pytest.raises(OallamaError, match=f"1 to 4 tokens at a time, got {longest}"):
            joint(64 * MIB, longest=longest)


@pytest.mark.parametrize("vram", ["50%", "minimal"])
def test_budgets_of_one_model_are_refused(vram: str, joint: Callable[..., Joint]) -> None:
    with pytest.raises(OallamaError, match="with a draft give bytes for both"):
        joint(vram)


# ---- acceptance ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(acceptance, "cache_dir", lambda: tmp_path)
    return tmp_path / "acceptance"


def on_the_cpu(model: Path, profile: Profile) -> PlacementPlan:
    return plan_model(model, None, SETTINGS, Choices(HOST, profile))


def test_a_model_is_right_about_itself(cache: Path, rpc: Any) -> None:
    model = oallama.demo_model()
    assert known(model, model) is None
    found = measure(model, model, on_the_cpu(model, made_profile(model, rpc.devices[0], SETTINGS)), n_threads=1)
    # Batches round differently from single tokens.
    assert found.source == "measured" and found.n_tokens >= 24 and found.rate > 0.9
    assert known(model, model) == found and len([*cache.iterdir()]) == 1


def test_random_weights_are_not(target: Path, draft: Path, profile: Profile, cache: Path) -> None:
    assert measure(target, draft, on_the_cpu(target, profile), n_threads=1).rate < 0.5


def test_a_damaged_file_is_measured_again(target: Path, draft: Path, cache: Path) -> None:
    cache.mkdir()
    file = acceptance._file(target, draft)
    for text in ("", "{}", '{"acceptance": {"rate": 7, "source": "measured"}}', '{"acceptance": {"share": 1}}'):
        file.write_text(text)
        assert known(target, draft) is None
    file.write_text('{"acceptance": {"rate": 0.5, "source": "measured", "n_tokens": 9, "created": ""}}')
    assert known(target, draft) == Acceptance(0.5, "measured", 9)


def test_a_draft_that_does_not_load_is_said(target: Path, profile: Profile, cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(target.read_bytes()[:100_000])
    with pytest.raises(OallamaError, match=r"the guesses of broken\.gguf could not be counted: "):
        measure(target, broken, on_the_cpu(target, profile), n_threads=1)
    assert known(target, broken) is None
