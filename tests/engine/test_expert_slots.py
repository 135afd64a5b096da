"""Experts that come and go in slots of an accelerator while a model runs: the same logits, whatever moves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama
from oallama.data.expert_hits import hit_rates
from oallama.data.plan import PlacementPlan
from oallama.data.plan_difference import describe_difference
from oallama.engine import native, skeleton
from oallama.engine.expert_counts import ExpertCounts
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.tracing.experts import record_experts
from support.archs import write_models
from support.expert_slots import OF_EXPERTS, difference, plan_of, sampled, seam, steps
from support.experts import with_experts
from support.paths import ROOT
from support.processes import ran, until
from support.sanitizers import skip_without

ARCHS = ("deepseek2", "gpt-oss", "qwen2moe", "qwen3moe")
PLAIN = 1e-6  # NMSE: the order of the last sum
# Over thousands of tokens that order changes the last bit of an activation where it is rounded to 8 bits: all tokens
# behind it differ a little, by the same amounts each time.
LONG = 1e-5
PROMPT = np.random.default_rng(2).integers(3, 120, 160).tolist()


# ---- the same logits -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def mixtures(lib: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Upstream's tiny mixtures, with 16 experts of which 4 are used."""
    folder = tmp_path_factory.mktemp("mixtures")
    models = [m for m in write_models(folder / "two", f"^({'|'.join(ARCHS)})$") if m.stem.endswith("-moe")]
    return [with_experts(source, folder / f"{source.stem}.gguf") for source in models]


@pytest.mark.parametrize("number", range(len(ARCHS)))
@pytest.mark.parametrize("delay_us", [0, 3000])
def test_slots_keep_the_model(number: int, delay_us: int, mixtures: list[Path], rpc: Any) -> None:
    path, device = mixtures[number], rpc.devices[0]
    with steps(path, plan_of(path, device)) as whole, seam(delay_us=delay_us):
        tokens = sampled(whole, 80)
        for slots, first, uploads in ((1, (), 1), (5, (0, 3, 9), 1), (12, (), 4)):
            with steps(path, plan_of(path, device, slots, first, uploads)) as cached:
                assert difference(cached, whole, tokens) <= PLAIN
                uses, hits, moved, _ = cached.counts()
                assert uses > 0 and hits > 0 and moved > 0
            whole.forget()


def test_random_experts_in_random_slots_keep_the_model(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    with steps(path, plan_of(path, device)) as whole, seam(delay_us=2000, at_random=True):
        tokens = sampled(whole, 300)
        with steps(path, plan_of(path, device, 6, uploads=3, realisation="plain")) as cached:
            assert difference(cached, whole, tokens) <= PLAIN
            assert cached.counts()[2] > 100


def test_the_host_may_repack_all_experts(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe", "Q4_0"), rpc.devices[0]
    with steps(path, plan_of(path, device)) as whole, seam(at_random=True):
        tokens = sampled(whole, 200)
        with steps(path, plan_of(path, device, 5, realisation="repacked")) as cached:
            assert difference(cached, whole, tokens) <= 1e-3  # other kernels
            assert cached.counts()[2] > 50


def test_tables_that_change_too_early_are_caught(tiny: Callable[..., Path], rpc: Any) -> None:
    """The control: without the order of evicting, copying and publishing logits differ."""
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    with steps(path, plan_of(path, device)) as whole:
        tokens = sampled(whole, 100)
        plan = plan_of(path, device, 6, uploads=3, realisation="plain")
        with seam(delay_us=200_000, at_random=True, unordered=True), steps(path, plan) as cached:
            assert difference(cached, whole, tokens) > 100 * PLAIN


@pytest.mark.slow
def test_ten_thousand_steps(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    plan = plan_of(path, device, 4, uploads=2, realisation="plain")
    with steps(path, plan_of(path, device)) as whole, seam(delay_us=500, at_random=True), steps(path, plan) as cached:
        tokens = sampled(whole, 500)
        for _ in range(20):
            assert difference(cached, whole, tokens) <= LONG
            whole.forget()
            cached.forget()
        assert cached.counts()[2] > 2000


# ---- what moves ----------------------------------------------------------------------------------------------------


def test_a_prompt_changes_nothing(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    with steps(path, plan_of(path, device, 6)) as cached:
        for token in PROMPT[:30]:
            cached.feed(token)
        before = cached.counts()
        for _ in range(5):
            cached.feed(*PROMPT)
        counted = cached.counts()
        assert counted[0] == before[0] and counted[1] == before[1] and counted[2] - before[2] <= 2
        cached.feed(PROMPT[0])
        assert cached.counts()[0] > before[0]


def test_counts_are_those_of_a_trace(tiny: Callable[..., Path], rpc: Any) -> None:
    """Experts that stay: uses and hits of decode, token by token, as the eval callback sees them."""
    path, first = tiny("qwen3moe", "Q8_0"), (0, 3, 9)
    watch = native.core().ExpertWatch()
    plan = plan_of(path, rpc.devices[0], first=first)
    llm = Llama(str(path), plan=plan, eval_callback=watch.addresses, n_ubatch=32, verbose=False)
    try:
        recorded = record_experts(llm, watch, PROMPT, 40)
        ids = recorded.ids["decode"]
        for layer, counts in zip(recorded.layers, llm.expert_counts(), strict=True):
            chosen = ids[recorded.layers.index(layer)]
            assert counts == ExpertCounts(layer, chosen.size, int(np.isin(chosen, first).sum()), 0, 0)
    finally:
        llm.close()


def test_slots_hit_what_the_policy_says(tiny: Callable[..., Path], rpc: Any) -> None:
    """Uploads that end before the next step: the counts are those of a replay of the same choices."""
    path, n = tiny("qwen3moe", "Q8_0"), 150
    watch = native.core().ExpertWatch()
    plan = plan_of(path, rpc.devices[0], 4)
    llm = Llama(str(path), plan=plan, eval_callback=watch.addresses, n_ubatch=32, verbose=False)
    try:
        rng, chosen = np.random.default_rng(3), {}
        for position in range(n):
            watch.take()
            llm._batch.set_batch([int(rng.integers(3, 900))], position, logits_all=False)
            llm._ctx.decode(llm._batch)
            for layer, ids in watch.take():
                chosen.setdefault(layer, []).append(ids)
        whole = {layer: sum_of_expert(path, layer) for layer in chosen}
        # The last upload may be on its way; its matrices are counted one by one.
        until(lambda: all(c.uploads * whole[c.layer] == c.uploaded_bytes for c in llm.expert_counts()))
        for counts in llm.expert_counts():
            ids = np.concatenate(chosen[counts.layer])
            assert counts.uses == ids.size
            ideal = sum(hits for hits, _ in native.core().replay_slots(ids, 16, 4))
            assert 0 < counts.hits <= ideal + 0.1 * ids.size
        totals = llm.placement().to_dict()["experts"]
        assert totals["uses"] == 2 * n * 4 and len(totals["layers"]) == 2
    finally:
        llm.close()


def sum_of_expert(path: Path, layer: int) -> int:
    tensors = plan_of(path, "CPU").tensors
    return sum(t.nbytes for name, t in tensors.items() if OF_EXPERTS.search(name) and f"blk.{layer}." in name) // 16


@pytest.mark.parametrize("policy", ["lfru", "lru"])
def test_the_policy_is_that_of_traces(policy: str) -> None:
    """C++ against data/expert_hits.py, without a margin and with any number of uploads: the same hits."""
    rng = np.random.default_rng(4)
    shares = 1 / np.arange(1, 33) ** 1.1
    ids = np.array([rng.choice(32, 4, replace=False, p=shares / shares.sum()) for _ in range(600)])
    wanted = hit_rates(ids[None].astype(np.uint16), 32, policy)[0]
    for k in (1, 4, 12, 31):
        found = native.core().replay_slots(ids, 32, k, policy, 0.0)
        assert sum(hits for hits, _ in found[300:]) / (300 * 4) == pytest.approx(wanted[k - 1], abs=0.01)


def test_one_upload_a_token_and_a_margin_keep_most_hits() -> None:
    rng = np.random.default_rng(4)
    shares = 1 / np.arange(1, 65) ** 1.2
    ids = np.array([rng.choice(64, 4, replace=False, p=shares / shares.sum()) for _ in range(1000)])
    free = native.core().replay_slots(ids, 64, 16, margin=0.0)
    bound = native.core().replay_slots(ids, 64, 16, uploads=1)
    assert sum(h for h, _ in bound) > 0.97 * sum(h for h, _ in free)
    assert max(moved for _, moved in bound) == 1 and sum(m for _, m in bound) < sum(m for _, m in free)


# ---- ends and failures ---------------------------------------------------------------------------------------------


def test_an_upload_that_fails_ends_the_computation(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    with steps(path, plan_of(path, device)) as whole, steps(path, plan_of(path, device, 4)) as cached:
        tokens = sampled(whole, 60)
        with seam(fails_in=3), pytest.raises(OallamaError, match="an upload of experts failed"):
            for token in tokens:
                cached.llm.eval([token])
        cached.forget()
        assert difference(cached, whole, tokens) <= PLAIN, "it goes on"


def test_a_file_that_is_cut_off_is_an_error(tiny: Callable[..., Path], rpc: Any, tmp_path: Path) -> None:
    path, device = tmp_path / "cut.gguf", rpc.devices[0]
    path.write_bytes(tiny("qwen3moe", "Q4_0").read_bytes())
    with steps(path, plan_of(path, device, 4, realisation="repacked")) as cached:
        cached.feed(5)
        with path.open("ab") as file:
            file.write(b"more")
        with pytest.raises(OallamaError, match="was changed while it was streamed"):
            for token in PROMPT:
                cached.llm.eval([token])


def test_a_model_may_be_closed_while_it_uploads(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    with seam(delay_us=50_000):
        for n in range(6):
            with steps(path, plan_of(path, device, 6, uploads=4)) as cached:
                for token in PROMPT[: 2 + n]:
                    cached.feed(token)


def test_two_models_have_their_own_slots(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    with steps(path, plan_of(path, device)) as whole:
        tokens = sampled(whole, 80)
        with steps(path, plan_of(path, device, 3)) as one, steps(path, plan_of(path, device, 9)) as two:
            assert difference(one, whole, tokens) <= PLAIN
            assert two.counts()[0] == 0
            whole.forget()
            assert difference(two, whole, tokens) <= PLAIN
            assert one.counts()[0] == two.counts()[0] > 0


def test_contexts_of_one_model_share_its_slots(tiny: Callable[..., Path], rpc: Any) -> None:
    """In turn; while one computes, the other changes nothing."""
    path, device = tiny("qwen3moe", "Q8_0"), rpc.devices[0]
    with steps(path, plan_of(path, device)) as whole, seam(delay_us=1000):
        tokens = sampled(whole, 100)
        with steps(path, plan_of(path, device, 5, uploads=3)) as cached:
            wanted = [whole.feed(token) for token in tokens]
            with cached.second() as second:
                for token, row in zip(tokens, wanted, strict=True):
                    for context in (cached, second):
                        found = context.feed(token)
                        assert float(((found - row) ** 2).sum() / (row**2).sum()) <= PLAIN
            assert cached.counts()[0] == 2 * 2 * 4 * len(tokens)


@pytest.mark.slow
def test_two_contexts_and_the_copier_do_not_race() -> None:
    skip_without("thread")
    script = ROOT / "scripts" / "tsan_slots.sh"
    found = json.loads(ran(script, "3000", timeout=1800.0).stdout.splitlines()[-1])
    assert found["wrong"] == 0 and found["uploads"] > 100 and found["hits"] > 1000
    with pytest.raises(AssertionError, match="data race"):
        ran(script, "3000", "unordered", timeout=1800.0)


# ---- plans, maps, memory -------------------------------------------------------------------------------------------


def test_a_plan_file_keeps_slots(tiny: Callable[..., Path], rpc: Any, tmp_path: Path) -> None:
    path, device = tiny("qwen3moe", "Q4_0"), rpc.devices[0]
    plan = plan_of(path, device, 6, (0, 3, 4), uploads=2)
    plan.save(tmp_path / "plan.json")
    again = PlacementPlan.load(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash
    lines = again.to_backend_map().splitlines()
    assert f"segment blk.0.ffn_up_exps.weight {device} slots 6 experts 0,3-4" in lines and "uploads 2" in lines
    tensor = again.tensors["blk.0.ffn_up_exps.weight"]
    host, there = tensor.segments
    assert host.nbytes == tensor.nbytes and there.nbytes * 16 == tensor.nbytes * 7
    found = describe_difference(replace(plan, slot_uploads=1, tensors=plan_of(path, device, 7).tensors), plan)
    assert any("(7 slots)" in line for line in found) and "slot_uploads: 1 -> 2" in found


@pytest.mark.parametrize("realisation", ["plain", "repacked"])
def test_memory_is_as_predicted(realisation: str, tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe", "Q4_0"), rpc.devices[0]
    settings = Settings(n_ctx=512, devices=(device,))
    plan = plan_of(path, device, 5, (1, 2), realisation=realisation)
    predicted = skeleton.dry_run(path, settings, plan.to_backend_map())
    segments = [s for t in plan.tensors.values() for s in t.segments if s.device == device]
    with steps(path, plan) as cached:
        for token in PROMPT:
            cached.feed(token)
        measured = cached.llm.placement()[device].measured
    assert measured.weights == predicted[device]["weights"]
    assert measured.weights == pytest.approx(sum(s.nbytes for s in segments), rel=0.02)  # tables, paddings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ffn_up_exps.weight {} slots 0", "1 slot or more"),
        ("ffn_up_exps.weight {} slots", "1 slot or more"),
        ("ffn_up_exps.weight {} slots many", "1 slot or more"),
        ("ffn_up_exps.weight {} slots 3 experts", "numbers rising, as 0,3-5"),
        ("ffn_up_exps.weight {} slots 3 experts 2,1", "numbers rising, as 0,3-5"),
        ("ffn_up_exps.weight {} slots 3 others 2", "numbers rising, as 0,3-5"),
        ("ffn_up_exps.weight {} slots 2 experts 0-2", "more experts than slots"),
        ("ffn_up_exps.weight {} slots 16", "has 16 experts; it has slots for fewer, or none"),
        ("ffn_up_exps.weight {} slots 2 experts 16", "has 16 experts; the segment's are not some of them"),
        ("attn_q.weight {} slots 2", "has no experts"),
        ("attn_q.weight {} experts 2", "has no experts"),
    ],
)
def test_wrong_slots_are_refused(line: str, message: str, tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe"), rpc.devices[0]
    plan = plan_of(path, device, 3)
    text = plan.to_backend_map().replace(f"blk.0.attn_q.weight {device} resident", "blk.0.attn_q.weight CPU host")
    kept = [row for row in text.splitlines() if not row.startswith(f"segment blk.0.{line.split()[0]} ")]
    changed = "\n".join([*kept, f"segment blk.0.{line.format(device)}", ""])
    with pytest.raises(OallamaError) as error:
        skeleton.dry_run(path, Settings(n_ctx=64, devices=(device,)), changed)
    assert message in str(error.value)


def test_weights_of_a_layer_have_the_same_slots(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("qwen3moe"), rpc.devices[0]
    text = plan_of(path, device, 3).to_backend_map()
    settings = Settings(n_ctx=64, devices=(device,))
    for old, new, message in (
        (
            f"blk.0.ffn_up_exps.weight {device} slots 3",
            f"blk.0.ffn_up_exps.weight {device} slots 4",
            "other slots than",
        ),
        ("uploads 1", "uploads 0", "expected 'uploads <number>', 1 to 64"),
    ):
        assert old in text
        with pytest.raises(OallamaError) as error:
            skeleton.dry_run(path, settings, text.replace(old, new))
        assert message in str(error.value)
