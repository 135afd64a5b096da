"""scripts/index.py: pip installs from the index that it writes, and takes nothing else than what was indexed."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.paths import ROOT

FILES = ("index.html", "some-thing/index.html")


def make_wheel(folder: Path, version: str, name: str = "Some.Thing", requires_python: str = ">=3.8, <99") -> Path:
    """A wheel that holds nothing but metadata."""
    folder.mkdir(exist_ok=True)
    stem = f"{name.lower().replace('.', '_')}-{version}"
    said = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: {requires_python}\n\nText.\n"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(f"{stem}.dist-info/METADATA", said)
        wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "")
    return path


def index(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Runs the script on folder/dist; the index is in folder/out."""
    command = [sys.executable, ROOT / "scripts/index.py", "--dist", folder / "dist", "--out", folder / "out", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A web server of a folder: its URL, and the paths it is asked for."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def download(url: str, to: Path, *what: str) -> subprocess.CompletedProcess[str]:
    """pip download from this index alone: no setting of the machine counts."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command = [*pip, "--dest", str(to), "--index-url", f"{url}/simple/", *what]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_pip_downloads_from_a_served_index(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "dist", "1.0+cpu")
    make_wheel(tmp_path / "dist", "2.0", requires_python=">=99")
    done = index(tmp_path, "--url", "https://here/")
    assert done.returncode == 0, done.stderr
    assert "pip install some-thing --extra-index-url https://here/simple/" in done.stdout and wheel.name in done.stdout
    with served(tmp_path / "out") as (url, asked):
        got = download(url, tmp_path / "got", "Some_Thing")
        assert got.returncode == 0, got.stderr
    (came,) = (tmp_path / "got").iterdir()  # 2.0 is for another Python
    assert came.name == wheel.name
    digest = hashlib.sha256(came.read_bytes()).hexdigest()
    assert digest == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert f"#sha256={digest}" in (tmp_path / "out/simple/some-thing/index.html").read_text()
    fetched = [path.rsplit("/", 1)[1] for path in asked if ".whl" in path]
    assert fetched == ["some_thing-1.0%2Bcpu-py3-none-any.whl.metadata", "some_thing-1.0%2Bcpu-py3-none-any.whl"]


@pytest.mark.parametrize("suffix", ["", ".metadata"])
def test_pip_refuses_what_was_not_indexed(tmp_path: Path, suffix: str) -> None:
    make_wheel(tmp_path / "dist", "1.0")
    assert index(tmp_path).returncode == 0
    (file,) = (tmp_path / "out/simple/some-thing").glob(f"*.whl{suffix}")
    with file.open("ab") as end:
        end.write(b"more")
    with served(tmp_path / "out") as (url, _):
        got = download(url, tmp_path / "got", "some-thing")
    assert got.returncode != 0 and "DO NOT MATCH THE HASHES" in got.stderr, got.stderr
    assert not list((tmp_path / "got").glob("*.whl"))


def test_the_same_wheels_give_the_same_index_and_old_ones_go(tmp_path: Path) -> None:
    old = make_wheel(tmp_path / "dist", "1.0")
    make_wheel(tmp_path / "dist", "1.1")
    make_wheel(tmp_path / "dist", "3.0", name="another")
    simple = tmp_path / "out/simple"
    assert index(tmp_path).returncode == 0
    first = {name: (simple / name).read_bytes() for name in FILES}
    assert index(tmp_path).returncode == 0
    assert first == {name: (simple / name).read_bytes() for name in FILES}
    assert first["index.html"].index(b'href="another/"') < first["index.html"].index(b'href="some-thing/"')
    old.unlink()
    assert index(tmp_path).returncode == 0
    left = sorted(path.name for path in (simple / "some-thing").iterdir())
    stem = "some_thing-1.1-py3-none-any.whl"
    assert left == ["index.html", stem, f"{stem}.metadata"]


def without_dist(dist: Path) -> None:
    dist.rmdir()


def with_nothing(dist: Path) -> None:
    pass


def with_a_source_distribution(dist: Path) -> None:
    (dist / "some_thing-1.0.tar.gz").write_bytes(b"")


def with_text(dist: Path) -> None:
    (dist / "some_thing-1.0-py3-none-any.whl").write_text("not a zip file")


def damaged(dist: Path) -> None:
    wheel = make_wheel(dist, "1.0")
    content = bytearray(wheel.read_bytes())
    content[content.index(b"METADATA") + len("METADATA")] = 0xFF  # the first compressed byte
    wheel.write_bytes(content)


def without_metadata(dist: Path) -> None:
    with zipfile.ZipFile(dist / "some_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_thing.py", "")


def renamed(dist: Path) -> None:
    make_wheel(dist, "1.0").rename(dist / "some_thing-1.1-py3-none-any.whl")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_dist, "no folder"),
        (with_nothing, "no wheels in"),
        (with_a_source_distribution, "some_thing-1.0.tar.gz is no wheel: expected NAME-VERSION-"),
        (with_text, "is no wheel: File is not a zip file"),
        (damaged, "is no wheel: Error -3 while decompressing data"),
        (without_metadata, "expected one *.dist-info/METADATA in it, found 0"),
        (renamed, "some_thing-1.1-py3-none-any.whl holds Some.Thing 1.0, not what its own name says"),
    ],
)
def test_what_cannot_be_indexed_is_said_in_a_line_and_leaves_the_index_alone(
    tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    wheel = make_wheel(tmp_path / "dist", "0.9")
    assert index(tmp_path).returncode == 0
    wheel.unlink()
    spoil(tmp_path / "dist")
    done = index(tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("index: error: ") and said in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "out/simple/some-thing/index.html").exists()
