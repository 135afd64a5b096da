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
    assert run is not None and (run.n_prompt, run.n_generate) == (200, 100)
    assert run.tpot_s == pytest.approx(0.06) and run.predicted_tpot_s == pytest.approx(0.05)
    assert run.prefill_s == pytest.approx(0.5) and run.predicted_prefill_s is None


@pytest.mark.parametrize("plan", [None, planned()])
def test_nothing_is_kept_without_counters(plan: PlacementPlan | None, kept: list[Run | None]) -> None:
    with recorded(plan, "http://127.0.0.1:9", 1):
        pass
    assert kept == []


def test_a_server_without_requests_has_no_times() -> None:
    assert times_of({"prompt_tokens_total": 0.0}, planned()) is None
