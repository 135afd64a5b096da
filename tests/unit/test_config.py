"""`oallama.toml`: defaults of a user's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from oallama.cli.app import app
from oallama.cli.config import config_file, default_map
from oallama.errors import OallamaError


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def write(text: str) -> dict[str, object]:
        config_file().write_text(text)
        group = typer.main.get_command(app)
        return default_map(group)

    return write


def test_a_key_counts_for_every_command_that_has_the_option(written) -> None:
    found = written('vram = "2GiB"\n')
    assert found["run"] == found["plan"] == {"vram": "2GiB"}
    assert "devices" not in found


def test_a_commands_table_counts_more(written) -> None:
    found = written('ctx = 1024\n[serve]\nport = 9000\nctx = 2048\n["bench serve"]\nrate = "2"\n')
    assert found["serve"] == {"ctx": 2048, "port": 9000} and found["run"] == {"ctx": 1024}


def test_switches_take_true_and_false(written) -> None:
    assert written("verify = false\n")["run"] == {"verify": False}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vran = 1", "no option 'vran'; did you mean 'vram'?"),
        ("[serv]\nport = 1", "no command 'serv'; did you mean 'serve'?"),
        ("[serve]\nprot = 1", "no option of serve 'prot'; did you mean 'port'?"),
        ("vram = ", "is no TOML"),
    ],
)
def test_what_nobody_knows_is_named(written, text: str, words: str) -> None:
    with pytest.raises(OallamaError, match=words.replace("?", r"\?")):
        written(text)


def test_without_a_file_there_are_no_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    group = typer.main.get_command(app)
    assert default_map(group) == {}
