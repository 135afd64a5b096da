"""`oallama top`: what servers say of their models, in looks, tables and JSON."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from rich.console import Console

from oallama.base.ports import free_port
from oallama.errors import OallamaError
from oallama.serving.live import ModelNow, Watch, as_json, model_now, series
from oallama.views.top import render_top
from support.cli import oallama

HOT = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 100
llamacpp:tokens_predicted_total 50
llamacpp:requests_processing 3
llamacpp:requests_deferred 1
llamacpp:weave_guests 2
llamacpp:weave_lost_guests_total{cause="receiver failed"} 1
llamacpp:weave_lost_guests_total{cause="no room"} 2
llamacpp:weave_waited_seconds_total 0.5
"""
COLD = """llamacpp:prompt_tokens_total 0
llamacpp:tokens_predicted_total 0
llamacpp:requests_processing 0
llamacpp:requests_deferred 0
llamacpp:weave_lent_bytes 2147483648
llamacpp:weave_used_bytes 1048576
llamacpp:weave_kept_guests 2
"""


class Router(ThreadingHTTPServer):
    """As llama-server's router: `models` are its models' states and metrics. What it was asked for is kept."""

    def __init__(self) -> None:
        self.models = {"hot": ("loaded", HOT), "cold": ("loaded", COLD), "third": ("loading", "")}
        self.asked: list[str] = []
        self.n_decoded = 0  # of each request that is served
        super().__init__(("127.0.0.1", 0), _Answers)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Router

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        asked = urlsplit(self.path)
        query = parse_qs(asked.query)
        if asked.path == "/v1/models":
            data = [{"id": name, "status": {"value": state}} for name, (state, _) in self.server.models.items()]
            return self._say(json.dumps({"data": data}))
        assert query["autoload"] == ["false"]
        _, text = self.server.models[query["model"][0]]
        slots = [{"is_processing": i < 3, "next_token": [{"n_decoded": self.server.n_decoded}]} for i in range(5)]
        return self._say(text if asked.path == "/metrics" else json.dumps(slots))

    def _say(self, text: str) -> None:
        self.send_response(200 if text else 500)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Not on a test's output."""


@pytest.fixture
def router() -> Iterator[Router]:
    with Router() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_two_looks_have_rates(router: Router) -> None:
    watch = Watch(router.url)
    first = watch.look()
    assert [(model.name, model.state) for model in first] == [
        ("hot", "loaded"),
        ("cold", "loaded"),
        ("third", "loading"),
    ]
    assert first[0].tokens_per_s is None and first[0].n_slots == 5 and first[2].n_slots is None
    router.models["hot"] = ("loaded", HOT.replace("total 50", "total 90"))
    hot, cold, _ = watch.look()
    assert hot.tokens_per_s is not None and hot.tokens_per_s > 0 == hot.prompt_per_s == cold.tokens_per_s
    assert (hot.n_busy, hot.n_waiting, hot.n_guests, hot.n_lost, hot.n_kept) == (3, 1, 2, 3, None)
    assert (cold.n_guests, cold.n_kept, cold.used_bytes, cold.lent_bytes) == (None, 2, 1 << 20, 1 << 31)
    assert not any("third" in path for path in router.asked), "what is not loaded is not asked"


def test_tokens_of_answers_under_way_count(router: Router) -> None:
    """llama-server's counter of tokens does not, before they have ended."""
    watch = Watch(router.url)
    watch.look()
    router.n_decoded = 40
    assert (watch.look()[0].tokens_per_s or 0) > 0
    router.n_decoded = 0  # they have ended, and the counter was read before
    assert watch.look()[0].tokens_per_s == 0


def test_rates_are_per_second() -> None:
    before = series(HOT)
    after = {**before, "tokens_predicted_total": 110.0, "weave_waited_seconds_total": 1.5}
    model = model_now("hot", "loaded", 5, after, before, 4.0)
    assert (model.tokens_per_s, model.prompt_per_s, model.waited) == (15.0, 0.0, 0.25)


def test_a_model_that_was_loaded_anew_has_no_rate() -> None:
    model = model_now("hot", "loaded", 5, {"tokens_predicted_total": 3.0}, {"tokens_predicted_total": 50.0}, 1.0)
    assert model.tokens_per_s is None


def test_a_model_that_does_not_answer_is_shown(router: Router) -> None:
    router.models["cold"] = ("loaded", "")
    assert [model.state for model in Watch(router.url).look()] == ["loaded", "no answer", "loading"]


@pytest.mark.parametrize("width", [60, 120])
def test_the_table_cuts_no_number(width: int) -> None:
    busy = ModelNow("a-model-of-a-long-name-Q4_K_M", "loaded", 12, 16, 103, 1234.5, 98.7, 3, 21, 0.17)
    lends = ModelNow("cold", "loaded", 0, 4, 0, 0.0, 0.0, n_kept=3, used_bytes=1 << 29, lent_bytes=1 << 31)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_top([busy, lends, ModelNow("third", "loading")], "http://127.0.0.1:8080"))
    text = console.export_text()
    assert "…" not in text and "12/16" in text and "99" in text and "3 away" in text and "loading" in text
    assert all((shown in text) == (width == 120) for shown in ("512.0 MiB of 2.0 GiB", "17%", "21"))


@contextmanager
def answering(bodies: dict[str, tuple[int, str]]) -> Iterator[str]:
    """The URL of a server that has these paths, with status and body."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = bodies[self.path]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Not on a test's output."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


ONE = {"/v1/models": (200, '{"data": [{"id": "only"}]}'), "/slots": (200, "[]"), "/metrics": (200, COLD)}


def test_a_server_of_one_model() -> None:
    with answering(ONE) as url:
        (model,) = Watch(url).look()
    assert (model.name, model.state, model.n_busy, model.n_kept) == ("only", "loaded", 0, 2)


@pytest.mark.parametrize(
    ("path", "status", "body", "said"),
    [
        ("/metrics", 501, "", "answers 501; the server must run with --metrics"),
        ("/slots", 501, "", "and without --no-slots"),
        ("/v1/models", 401, "", "set OPENAI_API_KEY"),
        ("/v1/models", 200, "<html>", "is no llama-server"),
        ("/v1/models", 200, "[]", "is no llama-server"),
        ("/v1/models", 200, '{"data": null}', "is no llama-server"),
        ("/v1/models", 200, '{"data": [{"id": "a", "status": "b"}]}', "is no llama-server"),
        ("/slots", 200, '[{"is_processing": true}]', "is no llama-server"),
        ("/metrics", 500, "", "answers 500"),
    ],
)
def test_servers_that_do_not_tell(path: str, status: int, body: str, said: str) -> None:
    with answering(ONE | {path: (status, body)}) as url, pytest.raises(OallamaError, match=said):
        Watch(url).look()


def test_json_has_what_there_is(router: Router) -> None:
    hot, cold, third = as_json(Watch(router.url).look())
    assert third == {"name": "third", "state": "loading"} and "lent_bytes" in cold and "lent_bytes" not in hot


def test_the_command_without_a_terminal(router: Router) -> None:
    shown = oallama("top", router.url, "--every", "0.1")
    assert shown.returncode == 0 and "hot" in shown.stdout and "3/5" in shown.stdout
    listed = json.loads(oallama("top", router.url, "--every", "0.1", "--json").stdout)
    assert [model["name"] for model in listed] == ["hot", "cold", "third"] and listed[0]["tokens_per_s"] == 0


def test_nobody_answers() -> None:
    port = free_port()
    with pytest.raises(
        OallamaError, match=f"no server answers at http://127.0.0.1:{port} .*`oallama serve` starts one"
    ):
        Watch(f"http://127.0.0.1:{port}").look()
    said = oallama("top", "nonsense")
    assert said.returncode == 2 and said.stderr.startswith("error: no server answers at nonsense")
