"""Plans that are found again: the same file at every start, and a new one when anything it depends on has changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oallama import OallamaError
from oallama.data.entries import Note
from oallama.data.plan import PlacementPlan
from oallama.data.profile import Profile
from oallama.engine import device_list, runtime, skeleton
from oallama.engine.device_list import Device
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan, dry_run, given_plan, plan_cache, start
from oallama.loading.autoplan import Choices, Considered
from oallama.profiling import fingerprint as marks
from oallama.profiling.fingerprint import cpu_set, engine_version, nvidia_driver
from oallama.profiling.recorder import DOUBTS
from support.cli import oallama
from support.made_profile import made_profile

SETTINGS = Settings(n_ctx=256)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that plans were really made for, in a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OALLAMA_PLAN_CACHE")
    calls: list[str] = []
    consider = start.consider

    def counted(path: Any, *arguments: Any) -> Considered:
        calls.append(str(path))
        return consider(path, *arguments)

    monkeypatch.setattr(start, "consider", counted)
    return calls


@pytest.fixture
def model(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny("llama").read_bytes())
    return path


@pytest.fixture
def profile(model: Path, rpc: Any, tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    made_profile(model, rpc.devices[0], replace(SETTINGS, n_threads=len(cpu_set()))).save(path)
    return path


def plans(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "oallama" / "plans").glob("*.json"))


@pytest.mark.parametrize("budget", ["2MiB", "50%", "minimal", None])
def test_the_second_start_reads_the_first_ones_plan(
    budget: str | None, model: Path, made: list[str], profile: Path, rpc: Any, tmp_path: Path
) -> None:
    choices = Choices(device=rpc.devices[0], profile=profile)
    first, second = (start.plan_model(model, budget, SETTINGS, choices) for _ in range(2))
    assert first.hash == second.hash and len(made) == 1
    (file,) = plans(tmp_path)
    assert PlacementPlan.load(file).hash == first.hash


def test_the_plan_that_is_shown_is_the_one_that_a_start_takes(model: Path, made: list[str], profile: Path) -> None:
    made_profile(model, None, replace(SETTINGS, n_threads=len(cpu_set()))).save(profile)

    def shown(*more: str) -> tuple[PlacementPlan, bool]:
        of_model = ["plan", model, "--device", "CPU", "--ctx", "256", "--profile", profile]
        said = oallama(*of_model, "--json", *more)
        assert said.returncode == 0, said.stderr
        return PlacementPlan.from_json(said.stdout), "kept at an earlier start" in said.stderr

    assert not shown()[1]
    choices = Choices(device="CPU", profile=profile)
    measured = {"request_s": 1.0, "rounds": 3}
    kept = start.plan_model(model, None, SETTINGS, replace(choices, planner="stock-cpu")).with_measured(measured)
    question = start._question(model, None, SETTINGS, choices)
    assert question and question.keep(kept)  # as after a first use that found it to be the fastest

    found, is_kept = shown()
    assert is_kept and found.hash == kept.hash and found.measured == measured
    assert shown("--n-generate", "128")[1]
    for anew in (["--explain"], ["--recheck"], ["--n-generate", "64"], ["--no-streams"]):
        assert not shown(*anew)[1], anew


def test_what_a_plan_depends_on_makes_another(model: Path, made: list[str], profile: Path, rpc: Any) -> None:
    def plan(budget: str = "2MiB", settings: Settings = SETTINGS, **more: Any) -> None:
        choices = Choices(**{"device": rpc.devices[0], "profile": profile, "planner": "layers", **more})
        start.plan_model(model, budget, settings, choices)

    def touch(file: Path) -> None:
        file.write_bytes(file.read_bytes() + (b"\n" if file == profile else b""))
        os.utime(file, (1, 1))

    plan()
    changes: list[Callable[[], None]] = [
        lambda: plan("3MiB"),
        lambda: plan(settings=replace(SETTINGS, n_ctx=512)),
        lambda: plan(settings=replace(SETTINGS, flash_attn="off")),
        lambda: plan(planner="cpu"),
        lambda: plan(streams=False),
    ]
    for i, change in enumerate(changes, 2):
        change()
        assert len(made) == i
        change()  # each of them is found again
        assert len(made) == i
    for i, file in enumerate((model, profile), len(changes) + 2):
        touch(file)
        plan()
        assert len(made) == i
    plan(recheck=True)
    assert len(made) == len(changes) + 4


def test_a_budget_of_what_is_free_holds_while_about_as_much_is_free(
    model: Path, made: list[str], profile: Path, rpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, free = device_list.device, [8 << 20]

    def device(name: str) -> Device:
        found = real(name)
        return found if found.name == "CPU" else replace(found, memory_free=free[0])

    monkeypatch.setattr(device_list, "device", device)
    for free[0], n_made in ((8 << 20, 1), (int(8.3 * 2**20), 1), (7 << 20, 2), (12 << 20, 3)):
        start.plan_model(model, "auto", SETTINGS, Choices(device=rpc.devices[0], profile=profile))
        assert len(made) == n_made, free


def test_a_file_that_is_damaged_or_cannot_be_written_is_no_error(
    model: Path, made: list[str], profile: Path, tmp_path: Path
) -> None:
    start.plan_model(model, None, SETTINGS, Choices(device="CPU", profile=profile))
    (file,) = plans(tmp_path)
    file.write_text("{")
    start.plan_model(model, None, SETTINGS, Choices(device="CPU", profile=profile))
    assert len(made) == 2 and PlacementPlan.load(file)
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file where a folder should be")
    start.plan_model(model, None, SETTINGS, Choices(device="CPU", profile=profile))
    assert len(made) == 3


def test_old_plans_go(
    model: Path, made: list[str], profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "KEPT", 2)
    for n_ctx in (256, 512, 768):
        start.plan_model(model, None, replace(SETTINGS, n_ctx=n_ctx), Choices(device="CPU", profile=profile))
    assert len(plans(tmp_path)) == 2
    start.plan_model(model, None, replace(SETTINGS, n_ctx=768), Choices(device="CPU", profile=profile))
    assert len(made) == 3


def test_a_plan_of_this_machines_profile_is_kept_once_it_is_whole(
    model: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan measures; what it is kept for is the profile as it was left."""
    monkeypatch.setattr(plan_cache, "DOUBTS", {})  # other tests run beside this one
    for _ in range(2):
        start.plan_model(model, None, SETTINGS, Choices(device="CPU"))
    assert len(made) == 1


def test_a_missing_model_is_said(made: list[str], profile: Path, tmp_path: Path) -> None:
    with pytest.raises(OallamaError, match="no such model file"):
        start.plan_model(tmp_path / "none.gguf", None, SETTINGS, Choices(device="CPU", profile=profile))


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_plan_from_doubtful_times_is_not_kept(model: Path, made: list[str], profile: Path, doubt: str) -> None:
    times = Profile.load(profile)
    replace(times, notes=(Note("CPU", "links", doubt),)).save(profile)
    for _ in range(2):
        start.plan_model(model, None, SETTINGS, Choices(device="CPU", profile=profile))
    assert len(made) == 2


# ---- what a start does not do again ---------------------------------------------------------------------------------


def test_a_plan_of_this_process_is_not_checked_against_its_model_again(
    model: Path, made: list[str], profile: Path, rpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = Choices(device=rpc.devices[0], profile=profile)
    plan = start.plan_model(model, "2MiB", SETTINGS, choices)
    read: list[Any] = []
    real = given_plan.read_graph
    monkeypatch.setattr(given_plan, "read_graph", lambda path, *more: read.append(path) or real(path, *more))
    settings = replace(SETTINGS, n_batch=plan.context.n_batch, n_ubatch=plan.context.n_ubatch)
    settings = replace(settings, flash_attn=plan.context.flash_attn)
    given_plan.check_plan(plan, model, settings)
    assert not read
    given_plan.check_plan(PlacementPlan.from_json(plan.to_json()), model, settings)
    assert len(read) == 1  # a plan from elsewhere is
    os.utime(model, (1, 1))
    given_plan.check_plan(plan, model, settings)
    assert len(read) == 2  # and so is one for what was another file
    with pytest.raises(OallamaError, match="the plan is for n_ctx up to 256"):
        given_plan.check_plan(plan, model, replace(settings, n_ctx=512))


def test_equal_dry_runs_are_remembered_while_the_file_is_the_same(
    model: Path, made: list[str], profile: Path, rpc: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "known", {})
    tables: list[str | None] = []
    real = skeleton.dry_run

    def counted(path: Any, settings: Settings, table: str | None = None) -> Any:
        tables.append(table)
        return real(path, settings, table)

    monkeypatch.setattr(skeleton, "dry_run", counted)
    graph = autoplan.read_graph(model, SETTINGS)
    choices = Choices(device=rpc.devices[0], profile=profile)
    first = autoplan.candidates(model, graph, "2MiB", SETTINGS, choices)
    n_runs = len(tables)
    assert n_runs == len(dry_run.known) > 3  # each another one
    again = autoplan.candidates(model, graph, "2MiB", SETTINGS, choices)
    maps = [{name: plan.to_backend_map() for name, plan in found.plans.items()} for found in (first, again)]
    assert len(tables) == n_runs and maps[0] == maps[1]
    os.utime(model, (1, 1))
    autoplan.candidates(model, graph, "2MiB", SETTINGS, choices)
    assert len(tables) == 2 * n_runs


def test_libraries_are_hashed_once_as_long_as_their_files_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "libllama.so").touch()
    library = tmp_path / "libggml.so"
    library.write_bytes(b"1")
    monkeypatch.setattr(runtime, "lib_dir", lambda: tmp_path)
    hashed: list[Any] = []
    real = marks._hash
    monkeypatch.setattr(marks, "_hash", lambda paths: hashed.append(paths) or real(paths))

    def version() -> str:
        engine_version.cache_clear()
        return engine_version()

    first = version()
    assert version() == first and len(hashed) == 1
    library.write_bytes(b"2")
    os.utime(library, (1, 1))
    assert version() != first and len(hashed) == 2
    (tmp_path / "cache" / "oallama" / "engines.json").write_text("[1]")  # damaged: made anew
    version()
    assert len(hashed) == 3
    engine_version.cache_clear()


def test_the_drivers_version_is_read_where_linux_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "version"
    version.write_text("535.104.05\n")
    monkeypatch.setattr(marks, "_DRIVER_VERSION", version)
    monkeypatch.setattr(marks.subprocess, "run", lambda *_, **__: pytest.fail("nvidia-smi was called"))
    nvidia_driver.cache_clear()
    assert nvidia_driver() == "535.104.05"
    nvidia_driver.cache_clear()
