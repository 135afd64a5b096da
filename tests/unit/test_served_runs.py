"""What a server's counters tell of its plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import pytest

from oallama.data.history import Run
from oallama.data.plan import PlacementPlan
from oallama.loading.learning import run_of
from oallama.serving import served_runs
from oallama.serving.served_runs import recorded, times_of
from support.plans import make

COUNTERS = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 200
llamacpp:prompt_seconds_total 0.5
llamacpp:tokens_predicted_total 100
llamacpp:tokens_predicted_seconds_total 6.0
llamacpp:n_tokens_max 300
llamacpp:prompt_tokens_seconds 4e+02
"""


def planned() -> PlacementPlan:
    plan = make()
    terms = {"decode": {"CPU matrices": 0.04}, "prefill": {}}
    return replace(plan, predicted=replace(plan.predicted, tpot_s={0: 0.04, 300: 0.06}, ttft_s={}, terms=terms))


class Counters(NamedTuple):
    """A server of counters; read_once: set when the reader, having read them, asks again."""

    address: str
    read_once: threading.Event


@pytest.fixture
def server() -> Iterator[Counters]:
    asked, read_once = threading.Event(), threading.Event()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            (read_once if asked.is_set() else asked).set()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(COUNTERS.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield Counters(f"http://127.0.0.1:{http.server_port}", read_once)
        http.shutdown()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Run | None]:
    """The runs that are kept; no engine is asked for other work."""
    runs: list[Run | None] = []

    def keep(n_threads: int, found: Sequence[Run | None]) -> None:
        runs.extend(found)

    monkeypatch.setattr(served_runs, "keep_runs", keep)
    monkeypatch.setattr("oallama.profiling.other_work._others_s", lambda: 0.0)
    monkeypatch.setattr(served_runs, "_EVERY_S", 0.02)
    return runs


def test_the_means_of_a_server_are_one_run(server: Counters, kept: list[Run | None]) -> None:
    with recorded(planned(), server.address, 1):
        assert server.read_once.wait(60)
    (run,) = kept
    assert run is not None and (run.n_prompt, run.n_generate, run.depth) == (200, 100, 150)
    assert run.tpot_s == pytest.approx(0.06) and run.predicted_tpot_s == pytest.approx(0.05)
    assert run.prefill_s == pytest.approx(0.5) and run.predicted_prefill_s is None


def counters(busy: float, prompt_s: float) -> dict[str, float]:
    tokens = {"prompt_tokens_total": 200.0, "tokens_predicted_total": 100.0, "n_tokens_max": 300.0}
    seconds = {"prompt_seconds_total": prompt_s, "tokens_predicted_seconds_total": 6.0}
    return {**tokens, **seconds, "n_busy_slots_per_decode": busy}


def in_batches_of(n: int) -> PlacementPlan:
    plan = planned()
    return replace(plan, planner={**plan.planner, "params": {**plan.planner["params"], "n_parallel": n}})


def test_sequences_beside_each_other_wait_for_each_others_prompts() -> None:
    """Six seconds of four sequences, of which three waited for half a second of prompts."""
    times = times_of(counters(3.8, 0.5), in_batches_of(4))
    assert times is not None and times.tpot_s == pytest.approx((6.0 - 3 * 0.5) / 100) and times.prefill_s is None
    run = run_of(in_batches_of(4), times, 300, 0.0, batch=4)
    assert run is not None and run.batch == 4 and run.tpot_s == times.tpot_s
    assert run_of(in_batches_of(4), times, 300, 0.0) is None, "a single sequence says nothing of four"


@pytest.mark.parametrize(("busy", "prompt_s", "n"), [(3.0, 0.1, 4), (1.0, 0.1, 4), (1.5, 0.1, 1), (4.0, 1.5, 4)])
def test_another_batch_than_the_plans_is_not_kept(busy: float, prompt_s: float, n: int) -> None:
    assert times_of(counters(busy, prompt_s), in_batches_of(n)) is None


@pytest.mark.parametrize("plan", [None, planned()])
def test_nothing_is_kept_without_counters(plan: PlacementPlan | None, kept: list[Run | None]) -> None:
    with recorded(plan, "http://127.0.0.1:9", 1):
        pass
    assert kept == []


def test_a_server_without_requests_has_no_times() -> None:
    assert times_of({"prompt_tokens_total": 0.0}, planned()) is None
