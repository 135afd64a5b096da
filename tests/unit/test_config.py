"""`oallama.toml`: defaults of a user's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from oallama.cli.app import app
from oallama.cli.config import config_file, default_map, giving_way
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


def test_a_switch_and_a_number_of_one_name_are_told_apart(written) -> None:
    found = written("verify = true\n")
    assert found["run"] == {"verify": True} and "verify" not in found.get("plan", {})
    assert written("[plan]\nverify = 3\n")["plan"] == {"verify": 3}


def test_one_value_of_a_repeatable_option_is_a_list(written) -> None:
    assert written('vram = "2GiB"\n')["bench"] == {"budget": ["2GiB"]}
    assert written('[bench]\nvram = ["25%", "50%"]\n')["bench"] == {"budget": ["25%", "50%"]}


@pytest.mark.parametrize(
    "args", [["--plan", "p.json"], ["--plan=p.json"], ["--no-plan"], ["--hot", "m"], ["--device", "CPU"], ["--cpu"]]
)
def test_a_default_gives_way_to_what_excludes_it(args: list[str]) -> None:
    assert giving_way({"vram": "2GiB", "ctx": 8}, ["m.gguf", *args]) == {"ctx": 8}


def test_it_stays_beside_others() -> None:
    assert giving_way({"vram": "2GiB"}, ["m.gguf", "--device", "CUDA0"]) == {"vram": "2GiB"}


@pytest.mark.parametrize("home", ["/dev/null", "/nowhere"])
def test_a_home_that_is_none_has_no_defaults(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", home)
    assert default_map(typer.main.get_command(app)) == {}


def test_a_file_that_cannot_be_read_is_said(written, capsys: pytest.CaptureFixture[str]) -> None:
    config_file().mkdir()
    assert default_map(typer.main.get_command(app)) == {}
    assert "no defaults are taken from" in capsys.readouterr().err


def test_the_commands_obey(written, tmp_path: Path) -> None:
    written("[doctor]\njson = true\n")
    asked = subprocess.run(
        [sys.executable, "-c", "from oallama.cli import main; main()", "doctor", "--help"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    group = typer.main.get_command(app)
    context = group.make_context("oallama", ["doctor"])
    with context:
        context.default_map = default_map(group)
        name, command, rest = group.resolve_command(context, ["doctor"])
        assert command.make_context(name, rest, parent=context).params["json"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vran = 1", "no option 'vran'; did you mean 'vram'?"),
        ("[serv]\nport = 1", "no command 'serv'; did you mean 'serve'?"),
        ("[serve]\nprot = 1", "no option of serve 'prot'; did you mean 'port'?"),
        ("vram = ", "is no TOML"),
        ("[plan]\nverify = true", "takes a value that is neither true nor false"),
        ("[plan]\nstreams = 3", "takes true or false, got 3"),
    ],
)
def test_what_nobody_knows_is_named(written, text: str, words: str) -> None:
    with pytest.raises(OallamaError, match=words.replace("?", r"\?")):
        written(text)


def test_without_a_file_there_are_no_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    group = typer.main.get_command(app)
    assert default_map(group) == {}
