"""Models by their name on Hugging Face, from a server of ours that answers as theirs does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from oallama.cli.app import with_hub_models

REPO = "someone/model-GGUF"
FILES = {
    "README.md": b"# a model",
    "model-Q4_0.gguf": b"GGUF four",
    "model-Q8_0.gguf": b"GGUF eight",
    "mmproj-model-f16.gguf": b"GGUF eyes",
    "big-Q6_K-00001-of-00002.gguf": b"GGUF first",
    "big-Q6_K-00002-of-00002.gguf": b"GGUF second",
    "model-Q6_K_L.gguf": b"GGUF larger",
    "model-Q5_K_M.gguf": b"GGUF five",
}


class Hub(BaseHTTPRequestHandler):
    downloads: list[str]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPO}/tree/"):
            tree = [{"type": "file", "path": n, "size": len(c), "oid": n} for n, c in FILES.items()]
            self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body)
            return
        name = path.removeprefix(f"/{REPO}/resolve/main/")
        if name in FILES:
            if body:
                type(self).downloads.append(name)
            etag = hashlib.sha256(FILES[name]).hexdigest()
            self._send(200, FILES[name], {"ETag": f'"{etag}"', "X-Repo-Commit": "c" * 40}, body)
            return
        self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _send(self, code: int, content: bytes, headers: Mapping[str, str], body: bool) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[tuple[str, list[str]]]:
    """Its address, and the names of files as they are downloaded."""
    of_this = type("OfThis", (Hub,), {"downloads": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), of_this)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", of_this.downloads
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(name: str, endpoint: str, home: Path) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads its variables when it is imported, so each question has a process of its own."""
    code = (
        "import sys; from oallama.engine.model_hub import hub_model; from oallama.errors import OallamaError\n"
        "try: print(hub_model(sys.argv[1]))\n"
        "except OallamaError as error: sys.exit(str(error))"
    )
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
    command = [sys.executable, "-c", code, name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_files_are_found_by_name_and_by_quantisation(tmp_path: Path) -> None:
    with hub() as (endpoint, downloads):
        for name, file in (
            (f"hf:{REPO}:model-Q8_0.gguf", "model-Q8_0.gguf"),
            (f"hf:{REPO}:q4_0", "model-Q4_0.gguf"),
            (f"hf:{REPO}:Q6_K_L", "model-Q6_K_L.gguf"),  # it is there when its beginning is asked for
            (f"hf:{REPO}:Q6_K", "big-Q6_K-00001-of-00002.gguf"),
            (f"hf:{REPO}:Q5_K", "model-Q5_K_M.gguf"),
        ):
            asked = ask(name, endpoint, tmp_path)
            path = Path(asked.stdout.strip())
            assert path.name == file and path.read_bytes() == FILES[file], asked.stderr
        assert "big-Q6_K-00002-of-00002.gguf" in downloads
        assert (path.parent / "big-Q6_K-00002-of-00002.gguf").exists()


def test_what_is_there_needs_no_network(tmp_path: Path) -> None:
    with hub() as (endpoint, downloads):
        ask(f"hf:{REPO}:Q4_0", endpoint, tmp_path)
        assert ask(f"hf:{REPO}:Q4_0", endpoint, tmp_path).returncode == 0
        assert downloads == ["model-Q4_0.gguf"]
    again = ask(f"hf:{REPO}:Q4_0", endpoint, tmp_path)
    assert again.stdout.strip().endswith("model-Q4_0.gguf"), again.stderr
    assert ask(f"hf:{REPO}", endpoint, tmp_path).stdout == again.stdout  # the only one that is there
    other = ask(f"hf:{REPO}:Q8_0", endpoint, tmp_path)
    assert other.returncode == 1 and len(other.stderr.strip().splitlines()) == 1, other.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:nobody/nothing", "has no repository 'nobody/nothing'"),
        (f"hf:{REPO}:Q3_K_M", "no file fits; the repository has big-Q6_K-00001-of-00002.gguf, "),
        (f"hf:{REPO}", "5 files fit"),
        ("hf:model.gguf", "is no model on Hugging Face; expected hf:OWNER/REPO"),
        ("hf:a/b--c", "is no model on Hugging Face"),
        ("hf:a/b.git", "is no model on Hugging Face"),
        ("hf:a/b/c", "is no model on Hugging Face"),
    ],
)
def test_names_that_fit_nothing_are_said(name: str, words: str, tmp_path: Path) -> None:
    with hub() as (endpoint, _):
        asked = ask(name, endpoint, tmp_path)
        assert asked.returncode == 1 and words in asked.stderr


def test_the_option_stands_for_the_models_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oallama.cli.app.hub_model", lambda name: Path(f"/kept/{name}"))
    assert with_hub_models(["run", "--hf", "a/b:Q4_0", "hello"]) == ["run", "/kept/hf:a/b:Q4_0", "hello"]
    assert with_hub_models(["serve", "--hf=a/b", "--", "--hf", "c"]) == ["serve", "/kept/hf:a/b", "--", "--hf", "c"]
    assert with_hub_models(["serve", "m", "--draft", "hf:a/b"]) == ["serve", "m", "--draft", "/kept/hf:a/b"]
    assert with_hub_models(["run", "m", "hf: a/b"]) == ["run", "m", "hf: a/b"]  # a prompt


@pytest.mark.parametrize("variables", [{}, {"_OALLAMA_COMPLETE": "complete_bash", "COMP_CWORD": "4"}])
def test_help_and_completion_download_nothing(variables: dict[str, str], tmp_path: Path) -> None:
    with hub() as (endpoint, downloads):
        words = "oallama run --hf someone/model-GGUF:Q4_0 "
        environment = {
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path),
            "COMP_WORDS": words,
            **variables,
        }
        command = [sys.executable, "-c", "from oallama.cli import main; main()"]
        command += [] if variables else [*words.split()[1:], "--help"]
        ran = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=120)
        assert downloads == [] and "error" not in ran.stderr, ran.stderr
