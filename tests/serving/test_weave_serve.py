"""`oallama serve --hot --cold`: real servers, requests by name, and a cold model that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from oallama.base.environment import BACKEND_MAP
from oallama.base.ports import free_port
from oallama.cli import serve
from oallama.cli.options import Placing, Sizes
from oallama.data.plan import PlacementPlan
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.serving import hot_cold
from oallama.serving.serve_limits import Limits
from support.cli import oallama
from support.made_profile import made_profile
from support.plans import make
from support.processes import process_of, until
from support.servers import OALLAMA, PROMPTS, alike, answers, call, children, complete, greedy


def start(*arguments: str | Path) -> AbstractContextManager[subprocess.Popen[str]]:
    return process_of([OALLAMA, "serve", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def refused(port: int, path: str, body: dict[str, Any]) -> int:
    with pytest.raises(urllib.error.HTTPError) as refusal:
        call(port, path, body)
    return refusal.value.code


def channels(server: subprocess.Popen[str]) -> list[Path]:
    return list(Path("/dev/shm").glob(f"oallama-weave-*-{server.pid}-*"))


def variable(model: Path, name: str) -> str:
    """Of the environment of a model's process."""
    (process,) = children(model)
    lines = Path(f"/proc/{process}/environ").read_text().split("\0")
    return dict(line.partition("=")[::2] for line in lines)[name]


@pytest.fixture
def woven(tiny: Callable[..., Path]) -> Iterator[tuple[subprocess.Popen[str], int, Path, Path]]:
    hot, cold, port = tiny("llama", "F16"), tiny("qwen2", "F16"), free_port()
    arguments = ["--hot", hot, "--cold", cold, "--parallel", "2", "--guests", "3", "--ctx", "2048", "--threads", "1"]
    arguments += ["--no-plan", "--deadline", "5", "--port", str(port)]  # a busy machine is no failure
    with start(*arguments) as server:
        until(lambda: answers(port, hot) and answers(port, cold))
        assert channels(server)
        yield server, port, hot, cold
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=60)
    assert server.returncode == 0, said
    until(lambda: not channels(server))
    assert not children(hot) and not children(cold)


def test_models_by_name(woven: tuple[subprocess.Popen[str], int, Path, Path]) -> None:
    """Six requests at once for five sequences of the hot model, three of which are guests; then one at a time."""
    _, port, hot, cold = woven
    with ThreadPoolExecutor(8) as pool:
        for model in (hot, cold):
            together = list(pool.map(lambda prompt, m=model: greedy(port, m, prompt), PROMPTS))
            alone = [greedy(port, model, prompt) for prompt in PROMPTS]
            assert all(map(alike, together, alone))
            assert complete(port, model, PROMPTS[0])
    names = {model["id"] for model in call(port, "/v1/models")["data"]}
    assert {hot.stem, cold.stem} <= names
    assert "llamacpp" in call(port, f"/metrics?model={hot.stem}")
    assert refused(port, "/v1/completions", {"model": "nobody", "prompt": "a"}) == 404
    assert refused(port, "/v1/completions", {"model": hot.stem, "prompt": {"a": 1}}) == 400


def test_home_is_full_before_there_are_guests(woven: tuple[subprocess.Popen[str], int, Path, Path]) -> None:
    _, port, hot, _ = woven
    body = {"model": hot.stem, "n_predict": 1, "cache_prompt": False}
    slots = [call(port, "/completion", {**body, "prompt": prompt})["id_slot"] for prompt in PROMPTS]
    assert set(slots) == {0, 1}


def metrics(port: int, model: Path) -> dict[str, float]:
    """What a model's process tells of guests, by name and cause."""
    begin = "llamacpp:weave_"
    lines = call(port, f"/metrics?model={model.stem}").splitlines()
    found = (line.removeprefix(begin).rpartition(" ") for line in lines if line.startswith(begin))
    return {name: float(value) for name, _, value in found}


def test_metrics_of_guests(woven: tuple[subprocess.Popen[str], int, Path, Path]) -> None:
    _, port, hot, cold = woven
    assert metrics(port, hot)["guests_total"] == 0 and metrics(port, cold)["used_bytes"] == 0
    seen = Event()

    def request(prompt: str) -> None:
        while not seen.is_set():
            complete(port, hot, prompt, 300)

    with ThreadPoolExecutor(5) as pool:
        requests = [pool.submit(request, prompt) for prompt in PROMPTS[:5]]
        until(lambda: metrics(port, hot)["guests"] == metrics(port, cold)["kept_guests"] == 3)
        there = metrics(port, cold)
        seen.set()
        for each in requests:
            each.result()
    assert 0 < there["used_bytes"] <= there["lent_bytes"] and there["senders_total"] == 1
    at_home = metrics(port, hot)
    assert at_home["guests_total"] >= 3 and at_home["rows_total"] > 0 and at_home["waited_seconds_total"] > 0
    assert at_home["appended_rows_total"] > 0
    assert sum(value for name, value in at_home.items() if name.startswith("lost_guests_total")) == 0
    complete(port, cold, PROMPTS[0])
    assert metrics(port, cold)["looks_total"] >= 64 and there["drains_total"] == 0
    assert metrics(port, cold)["tasks_total"] > there["tasks_total"] > metrics(port, cold)["refused_tasks_total"] == 0


def test_the_hot_model_outlives_the_cold_one(woven: tuple[subprocess.Popen[str], int, Path, Path]) -> None:
    _, port, hot, cold = woven
    expected = [greedy(port, hot, prompt, 200) for prompt in PROMPTS[:5]]
    with ThreadPoolExecutor(5) as pool:
        while not metrics(port, hot)["guests_total"]:  # a receiver that is too busy to attach in time is tried again
            requests = [pool.submit(greedy, port, hot, prompt, 200) for prompt in PROMPTS[:5]]
            until(lambda sent=requests: metrics(port, hot)["guests_total"] > 0 or all(one.done() for one in sent))
        (pid,) = children(cold)
        os.kill(pid, signal.SIGKILL)
        found = [request.result() for request in requests]
    assert all(map(alike, found, expected))
    assert alike(greedy(port, hot, PROMPTS[0], 200), expected[0])
    until(lambda: answers(port, cold))  # the router starts it again


def test_guests_end_before_those_at_home(woven: tuple[subprocess.Popen[str], int, Path, Path]) -> None:
    """Five sequences outgrow home's 2048 tokens: guests whose receiver is gone may end, none in a slot at home."""
    _, port, hot, cold = woven

    def request(prompt: str) -> int | str:
        """The slot of an answer of 800 tokens, or a refusal."""
        body = {"model": hot.stem, "prompt": prompt, "n_predict": 800, "ignore_eos": True, "cache_prompt": False}
        try:
            answer = call(port, "/completion", body)
        except urllib.error.HTTPError as refusal:
            return f"{refusal.code}: {json.loads(refusal.read())['error']['message']}"
        assert answer["tokens_predicted"] == 800
        return int(answer["id_slot"])

    with ThreadPoolExecutor(5) as pool:
        requests = [pool.submit(request, prompt) for prompt in PROMPTS[:5]]
        until(lambda: all(slot["is_processing"] for slot in call(port, f"/slots?model={hot.stem}")))
        (pid,) = children(cold)
        os.kill(pid, signal.SIGSTOP)  # a new one would take guests
        found = [one.result() for one in requests]
        os.kill(pid, signal.SIGKILL)
    refusals = [one for one in found if isinstance(one, str)]
    assert 1 <= len(refusals) <= 3 and {0, 1} <= set(found)
    assert set(refusals) == {"503: there is no receiver for this sequence any more, and no room in the KV cache"}
    assert isinstance(request(PROMPTS[0]), int)
    lost = (value for name, value in metrics(port, hot).items() if name.startswith("lost_guests_total"))
    assert sum(lost) >= len(refusals)


def test_settings_of_single_models(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The hot model has its own context, slots and threads; the cold one is placed by a plan for another context."""
    hot, cold, port = tiny("llama", "F16"), tiny("qwen2", "F16"), free_port()
    sizes = Settings(n_ctx=768, n_batch=128, n_ubatch=128, n_seq_max=3, n_threads=1)
    made_profile(cold, None, sizes, own=2.0).save(tmp_path / "profile.json")
    options = ["--ctx", "768", "--batch", "128", "--ubatch", "128", "--parallel", "3", "--threads", "1"]
    options += ["--device", "CPU", "--profile", tmp_path / "profile.json", "-o", tmp_path / "plan.json"]
    assert oallama("plan", cold, *options).returncode == 0
    config = tmp_path / "models.toml"
    config.write_text(f'[{hot.stem}]\nctx = 1024\nparallel = 5\nthreads = 1\n[{cold.stem}]\nplan = "plan.json"\n')
    arguments = ["--hot", hot, "--cold", cold, "--guests", "0", "--ctx", "512", "--parallel", "2", "--no-plan"]
    with start(*arguments, "--model-config", config, "--port", str(port)) as server:
        until(lambda: answers(port, hot) and answers(port, cold))
        shown = {model: call(port, f"/props?model={model.stem}") for model in (hot, cold)}
        table = Path(variable(cold, BACKEND_MAP.name)).read_text()
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=60)
    assert server.returncode == 0, said
    assert [props["total_slots"] for props in shown.values()] == [5, 3]
    # The slots of a model without a plan share its context; those of one with a plan have their parts.
    assert [props["default_generation_settings"]["n_ctx"] for props in shown.values()] == [1024, 256]
    plan = PlacementPlan.load(tmp_path / "plan.json")
    assert table == plan.to_backend_map() and f"by plan {plan.hash[:8]}" in said


def test_a_hot_model_with_a_plan_has_guests(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """All by the plan. Its slots share the cache, as without a plan."""
    hot, cold, port = tiny("llama", "F16"), tiny("qwen2", "F16"), free_port()
    made_profile(hot, None, Settings(n_ctx=2048, n_seq_max=2, n_threads=1), own=2.0).save(tmp_path / "profile.json")
    options = ["--ctx", "2048", "--parallel", "2", "--threads", "1", "--device", "CPU"]
    options += ["--profile", tmp_path / "profile.json", "-o", tmp_path / "plan.json"]
    assert oallama("plan", hot, *options).returncode == 0
    plan = PlacementPlan.load(tmp_path / "plan.json")
    assert plan.context.attention == "oallama"
    (tmp_path / "models.toml").write_text(f'["{hot.stem}"]\nplan = "plan.json"\n')
    arguments = ["--hot", hot, "--cold", cold, "--guests", "3", "--ctx", "2048", "--parallel", "2", "--threads", "1"]
    arguments += ["--model-config", tmp_path / "models.toml", "--no-plan", "--deadline", "5", "--port", str(port)]
    with start(*arguments) as server:
        until(lambda: answers(port, hot) and answers(port, cold))
        with ThreadPoolExecutor(5) as pool:
            texts = list(pool.map(lambda prompt: complete(port, hot, prompt, 200), PROMPTS[:5]))
        props = call(port, f"/props?model={hot.stem}")
        found = metrics(port, hot)
        table = Path(variable(hot, BACKEND_MAP.name)).read_text()
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
    assert all(texts) and found["guests_total"] > 0 and found["rows_total"] > 0
    assert props["total_slots"] == 5 and props["default_generation_settings"]["n_ctx"] == 2048
    assert table == plan.to_backend_map() and "attention oallama\n" in table


def test_models_are_planned_without_being_asked(tiny: Callable[..., Path]) -> None:
    """Both for the CPU. The slots of either model share its context, as they do without a plan."""
    hot, cold, port = tiny("llama"), tiny("qwen2"), free_port()
    arguments = ["--hot", hot, "--cold", cold, "--guests", "3", "--ctx", "1024", "--parallel", "2", "--threads", "1"]
    with start(*arguments, "--no-verify", "--deadline", "5", "--port", str(port)) as server:
        until(lambda: answers(port, hot) and answers(port, cold), 300)
        with ThreadPoolExecutor(5) as pool:

            def has_guests() -> bool:  # a receiver that is too busy to attach in time is tried again
                assert all(pool.map(lambda prompt: complete(port, hot, prompt, 100), PROMPTS[:5]))
                return metrics(port, hot)["guests_total"] > 0

            until(has_guests, 120)
        contexts = [
            call(port, f"/props?model={model.stem}")["default_generation_settings"]["n_ctx"] for model in (hot, cold)
        ]
        tables = [Path(variable(model, BACKEND_MAP.name)).read_text() for model in (hot, cold)]
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=60)
    assert contexts == [1024, 1024] and all(tables)
    for model in (hot, cold):
        assert f"{model.stem}: planning for the CPU" in said and f"{model.stem} by plan " in said


def test_all_models_are_measured_before_plans_are_made(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is kept for the profile that it was made from: what is measured after it would void it."""
    done: list[str] = []
    monkeypatch.setattr(autoplan, "profile_for", lambda *_: done.append("measured"))
    monkeypatch.setattr(serve, "make_plan", lambda *given: done.append("planned") or given[-1])
    models = [hot_cold.Unplanned(tiny("llama"), Settings(n_ctx=512), ())]
    models.append(hot_cold.Unplanned(tiny("qwen2"), Settings(n_ctx=512), ("n_ubatch",)))
    first, second = serve._plan_for_cpu(Placing(), Sizes(batch=512), models)
    assert done == ["measured", "measured", "planned", "planned"]
    assert first == Choices(device="CPU", fixed_batch=True)
    assert second == Choices(device="CPU", fixed_batch=True, fixed_ubatch=True)


def test_what_is_wrong_is_said_before_plans_are_made(tiny: Callable[..., Path], tmp_path: Path) -> None:
    asked: list[str] = []

    def planner(models: Sequence[hot_cold.Unplanned]) -> list[PlacementPlan]:
        asked.extend(each.model.name for each in models)
        raise OallamaError("planned")

    settings = Settings(n_ctx=512, n_seq_max=2, n_threads=1)
    request = hot_cold.HotCold(tiny("llama"), [tiny("qwen2")], Limits(), guests=2, planner=planner)
    wrong = [replace(request, lend="much"), replace(request, cold=[tmp_path / "none.gguf"])]
    wrong += [replace(request, margin="1GiB"), replace(request, plan=tmp_path / "none.json")]
    for each in wrong:
        with pytest.raises(OallamaError) as raised:
            hot_cold.planned(each, settings)
        assert str(raised.value) != "planned" and not asked
    with pytest.raises(OallamaError, match="planned"):
        hot_cold.planned(request, settings)
    assert asked == [tiny("llama").name, tiny("qwen2").name]
    hot, cold = hot_cold.planned(replace(request, planner=None), settings)
    assert hot.plan is None and cold[0].plan is None


def test_no_more_is_lent_than_there_is(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is available, a twentieth and the models' own memory is kept; two cold models share the rest."""
    said: list[str] = []
    monkeypatch.setattr(hot_cold, "say", said.append)
    settings = Settings(n_ctx=4096, n_seq_max=2, n_threads=1, flash_attn="on")
    request = hot_cold.HotCold(tiny("llama"), [tiny("qwen2")], Limits(), guests=2)
    monkeypatch.setattr(hot_cold, "available_bytes", lambda: 1 << 40)
    _, (cold,) = hot_cold.planned(request, settings)
    wanted = cold.lend_nbytes
    assert wanted > 0 and not said
    taken = 0
    for model in (request.hot, *request.cold):
        taken += sum(skeleton.dry_run(model, replace(settings, devices=()))["CPU"].values())
    available = int((taken + wanted // 2) / 0.95) + 1
    monkeypatch.setattr(hot_cold, "available_bytes", lambda: available)
    _, (cold,) = hot_cold.planned(request, settings)
    assert abs(cold.lend_nbytes - wanted // 2) < 100 and "left for guests, who might take" in said.pop()
    _, colds = hot_cold.planned(replace(request, cold=[tiny("qwen2"), tiny("qwen2", "F16")], lend="1GiB"), settings)
    assert [cold.lend_nbytes for cold in colds] == [1 << 30] * 2 and "less than --lend 1GiB" in said.pop()
    monkeypatch.setattr(hot_cold, "available_bytes", lambda: taken)
    with pytest.raises(OallamaError, match="the machine has no memory left for guests"):
        hot_cold.planned(request, settings)


def test_what_serve_refuses(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model, other = tiny("llama"), tmp_path / tiny("llama").name
    other.symlink_to(model)
    config, planned = tmp_path / "config.toml", tmp_path / "planned.toml"
    config.write_text("[nobody]\nctx = 512\n")
    make().save(tmp_path / "plan.json")
    planned.write_text(f'[{model.stem}]\nplan = "plan.json"\n')
    for arguments, reason in (
        (["--hot", model, "--cold", other], "two models are called llama-Q8_0"),
        ([model, "--hot", model], "--hot takes the place of MODEL"),
        (["--cold", model], "give MODEL, or --hot MODEL with --cold MODEL"),
        (["--hot", model, "--cold", tmp_path / "none.gguf"], "none.gguf"),
        (["--hot", model, "--cold", tiny("qwen2"), "--lend", "much"], "cannot read the memory budget 'much'"),
        (["--hot", model, "--cold", tiny("qwen2"), "--model-config", config], "no model is called 'nobody'"),
        (["--hot", model, "--cold", tiny("qwen2"), "--model-config", planned], "the plan of llama-Q8_0 uses GPU0"),
        ([model, "--model-config", config], "--model-config is for --hot MODEL with --cold MODEL"),
    ):
        done = oallama("serve", *arguments)
        assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr, done.stderr
