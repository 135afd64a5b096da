"""What a server's counters tell of its plan."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from oallama.data.history import Run
from oallama.data.plan import PlacementPlan
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


@pytest.fixture
def address() -> Iterator[str]:
    """A server of counters."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(COUNTERS.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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


def test_the_means_of_a_server_are_one_run(address: str, kept: list[Run | None]) -> None:
    with recorded(planned(), address, 1):
        threading.Event().wait(0.5)
    (run,) = kept
    assert run is not None and (run.n_prompt, run.n_generate) == (200, 100)
    assert run.tpot_s == pytest.approx(0.06) and run.predicted_tpot_s == pytest.approx(0.05)
    assert run.prefill_s == pytest.approx(0.5) and run.predicted_prefill_s is None


@pytest.mark.parametrize("plan", [None, planned()])
def test_nothing_is_kept_without_counters(plan: PlacementPlan | None, kept: list[Run | None]) -> None:
    with recorded(plan, "http://127.0.0.1:9", 1):
        threading.Event().wait(0.1)
    assert kept == []


def test_a_server_without_requests_has_no_times() -> None:
    assert times_of({"prompt_tokens_total": 0.0}, planned()) is None
