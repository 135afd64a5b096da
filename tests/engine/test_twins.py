"""Weights that are in memory twice on the engine: the bits of `repacked` for few tokens, of `tiled` for many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oallama import Llama
from oallama.data.entries import OTHER, is_tiled
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.profile import Profile
from oallama.data.workload import Workload
from oallama.engine import native, runtime, skeleton
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan, start
from support.hand_plan import hand_plan, realised
from support.logits import AMX, TOKENS, compute_logits
from support.made_profile import made_profile
from support.processes import ran_python

TWICE = "repacked+tiled"
MODELS = [
    ("llama", "Q4_0", "q4_0"),
    ("llama", "Q4_K_M", "q4_K"),
    ("llama", "Q4_K_M", "q6_K"),
    ("llama", "Q8_0", "q8_0"),
    ("qwen3moe", "Q4_0", "q4_0"),
]
REPACKS = "from oallama.engine import native; print(native.core().repacks('CPU', '{}', 256, 256, 0))"
FEW, MANY = 5, 64  # tokens of a batch: for all matrices, experts' too


def repacks(type: str, env: dict[str, str]) -> bool:
    """Whether the CPU has a faster layout for such weights."""
    return ran_python(REPACKS.format(type), env=env).stdout.strip() == "True"


def logits(plans: list[PlacementPlan], model: Path, folder: Path, env: dict[str, str], n: int) -> list[np.ndarray]:
    """Of all rows, in batches of n tokens."""
    jobs: list[dict[str, Any]] = []
    for i, plan in enumerate(plans):
        table = folder / f"{i}.map"
        table.write_text(plan.to_backend_map())
        tokens = TOKENS[: 64 // n * n]
        jobs.append({"model": str(model), "table": str(table), "n_ubatch": n, "tokens": tokens, "n_decode": 0})
    return compute_logits(runtime.lib_dir(), jobs, folder, env)


@pytest.mark.parametrize("env", [{}, AMX], ids=["without AMX", "with AMX"])
@pytest.mark.parametrize(("arch", "file_type", "type"), MODELS)
def test_each_number_of_tokens_has_the_bits_of_its_form(
    arch: str, file_type: str, type: str, env: dict[str, str], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    """A type without a faster layout is tiled alone."""
    model = tiny(arch, file_type)
    plan = hand_plan(model, HOST)
    twice, tiled = (realised(plan, form, type=type) for form in (TWICE, "tiled"))
    few = realised(plan, "repacked", type=type) if repacks(type, env) else tiled
    assert twice != tiled
    for n, same in ((FEW, few), (MANY, tiled)):
        found, expected = logits([twice, same], model, tmp_path, env, n)
        assert np.array_equal(found, expected)
    assert not repacks(type, env) or not np.array_equal(*logits([few, tiled], model, tmp_path, env, MANY))


def test_experts_may_have_few_rows_where_other_matrices_have_many(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, n = tiny("qwen3moe", "Q4_0"), 20
    assert is_tiled(n) and not is_tiled(n, 16, 4)
    plan = hand_plan(model, HOST)
    mixed = realised(realised(plan, "tiled"), "repacked", only="_exps")
    found, expected = logits([realised(plan, TWICE), mixed], model, tmp_path, {}, n)
    assert np.array_equal(found, expected)


def rows(llm: Llama, tokens: list[int]) -> np.ndarray:
    llm.eval(tokens)
    return np.array(llm.scores[llm.n_tokens - len(tokens) : llm.n_tokens])


@pytest.mark.parametrize("mapped", [True, False])
def test_a_prompt_and_its_answer(mapped: bool, tiny: Callable[..., Path]) -> None:
    """The answer is that of repacked weights after a prompt of tiled ones, graph after graph."""
    model = tiny("llama", "Q4_0")
    plan = hand_plan(model, HOST)
    twice, tiled, repacked = (
        Llama(str(model), plan=realised(plan, form), verbose=False, logits_all=True, n_threads=2, use_mmap=mapped)
        for form in (TWICE, "tiled", "repacked")
    )
    for prompt in (TOKENS[:40], TOKENS[40:60]):
        assert np.array_equal(rows(twice, prompt), rows(tiled, prompt))
        repacked.load_state(tiled.save_state())
        for _ in range(3):
            assert np.array_equal(rows(twice, [7]), rows(repacked, [7]))
        tiled.load_state(repacked.save_state())
    weights = [llm.placement()[HOST].measured.weights for llm in (twice, tiled)]
    assert weights[0] - weights[1] == pytest.approx(realised(plan, TWICE).repacked_nbytes, rel=0.01)
    for llm in (twice, tiled, repacked):
        llm.close()


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_the_ledger_returns_to_where_it_was(order: tuple[int, ...], tiny: Callable[..., Path]) -> None:
    model = tiny("llama", "Q4_0")
    plan = realised(hand_plan(model, HOST), TWICE)

    def bytes_now() -> dict[str, int]:
        return {name: entry["current"] for name, entry in native.core().ledger().items() if entry["current"]}

    before = bytes_now()
    models = [Llama(str(model), plan=plan, verbose=False, n_threads=1) for _ in order]
    grown = sum(bytes_now().values()) - sum(before.values())
    assert grown >= 2 * plan.repacked_nbytes
    expected = rows_of_last(models[order[1]])
    models[order[0]].close()
    assert np.array_equal(rows_of_last(models[order[1]]), expected)
    models[order[1]].close()
    assert bytes_now() == before


def rows_of_last(llm: Llama) -> np.ndarray:
    llm.reset()
    llm.eval(TOKENS[:40])
    llm.eval([7])
    return np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()


def test_without_room_there_is_no_twin(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", "Q4_0")
    plan = realised(hand_plan(model, HOST), TWICE)
    monkeypatch.setattr("oallama.llama._check_host_memory", lambda *_: None)
    monkeypatch.setenv("OALLAMA_HOST_MEMORY", str(plan.repacked_nbytes))
    llm = Llama(str(model), plan=plan, verbose=False)
    # Room for half of the bytes, half of which may be used, for both forms.
    assert 0.6 < llm.placement().left_mapped / plan.repacked_nbytes < 0.9
    llm.close()


# ---- beside an accelerator -------------------------------------------------------------------------------------------


def test_streamed_weights_may_be_in_memory_twice(tiny: Callable[..., Path], rpc: Any) -> None:
    """Prompts from 32 tokens on are the accelerator's, shorter ones tiled, decode repacked."""
    model = tiny("llama", "Q4_0")
    plan = hand_plan(model, rpc.devices[0])
    states = {}
    for form, n in ((TWICE, 40), ("repacked", 40), (TWICE, 5), ("repacked", 5), (TWICE, 20), ("tiled", 20)):
        llm = Llama(str(model), plan=realised(plan, form, "stream", 32), verbose=False, logits_all=True)
        states[form, n] = rows(llm, TOKENS[:n])
        llm.close()
    assert np.array_equal(states[TWICE, 40], states["repacked", 40])
    assert np.array_equal(states[TWICE, 5], states["repacked", 5])
    assert np.array_equal(states[TWICE, 20], states["tiled", 20])


def test_the_word_means_nothing_for_a_weight_on_a_device(tiny: Callable[..., Path], rpc: Any) -> None:
    model = tiny("llama", "Q4_0")
    plan = hand_plan(model, rpc.devices[0])
    name = next(name for name, t in plan.tensors.items() if t.type == "q4_0" and t.device != HOST)
    table = plan.to_backend_map()
    marked = table.replace(f"tensor {name} {rpc.devices[0]} resident", f"tensor {name} {rpc.devices[0]} host {TWICE}")
    assert marked != table
    settings = Settings(n_ctx=256, devices=(rpc.devices[0],))
    assert skeleton.dry_run(model, settings, marked) == skeleton.dry_run(model, settings, table)


# ---- plans -----------------------------------------------------------------------------------------------------------


def machine(model: Path, settings: Settings) -> Profile:
    """A made-up CPU on which decode likes repacked weights, and prompts tiled ones."""
    made = made_profile(model, None, settings)
    few = {"plain": 1.0, "repacked": 0.5}
    operators = [e for e in made.operators if e.device != HOST or e.op == OTHER or e.type != "q4_0"]
    for e in made.operators:
        if e not in operators:
            many = is_tiled(e.n_tokens, e.ne[2], e.n_used)
            for form, ratio in ({"plain": 1.0, "repacked": 0.8, "tiled": 0.2} if many else few).items():
                operators.append(replace(e, realisation=form, median_s=e.median_s * ratio))
    return replace(made, operators=tuple(operators))


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_a_plan_takes_what_it_says(arch: str, tiny: Callable[..., Path]) -> None:
    model, settings = tiny(arch, "Q4_0"), Settings(n_ctx=1024, n_threads=2)
    choices = autoplan.Choices(device=HOST, profile=machine(model, settings), workload=Workload(512, 64))
    plan = start.plan_model(model, None, settings, choices)
    matrices = {t.realisation for name, t in plan.tensors.items() if t.type == "q4_0" and name != "token_embd.weight"}
    assert TWICE in matrices and any("in memory twice" in note for note in plan.predicted.notes)
    llm = Llama(str(model), plan=PlacementPlan.from_json(plan.to_json()), verbose=False, n_threads=2, use_mmap=False)
    assert llm.placement()[HOST].measured.weights == plan.predicted.devices[HOST].weights
    llm.close()
    once = start.plan_model(model, None, settings, replace(choices, repack=False))
    assert plan.predicted.devices[HOST].weights - once.predicted.devices[HOST].weights >= plan.repacked_nbytes > 0


def test_a_plan_takes_no_more_than_the_host_has(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = tiny("llama", "Q4_0"), Settings(n_ctx=1024, n_threads=2)
    choices = autoplan.Choices(device=HOST, profile=machine(model, settings), workload=Workload(512, 64))

    def planned(memory: int) -> PlacementPlan:
        monkeypatch.setenv("OALLAMA_HOST_MEMORY", str(memory))
        return start.plan_model(model, None, settings, choices)

    plan = planned(2**30)
    memory = plan.predicted.devices[HOST]
    assert plan == planned(2**40)
    some, none = planned(memory.total), planned(memory.weights)
    assert plan.repacked_nbytes > some.repacked_nbytes > 0
    assert TWICE not in {t.realisation for t in none.tensors.values()}
    assert plan.predicted.request_s < some.predicted.request_s < none.predicted.request_s
