"""Defaults of a user's own: `oallama.toml` in `$XDG_CONFIG_HOME`, by default in `~/.config`.

    vram = "auto"          # of every command that has --vram

    [serve]                # of one command
    port = 9000

    ["bench serve"]
    rate = 2.0

Keys are names of options without the dashes. What is given on the command line counts more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from oallama.errors import OallamaError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def config_file() -> Path:
    """Where it is looked for."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "oallama.toml"


def default_map(group: Any) -> dict[str, Any]:
    """What click takes in place of options that are not given, by command; empty without a file.

    Raises:
        OallamaError: the file cannot be read, is no TOML, or has a key that no command knows.
    """
    path = config_file()
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise OallamaError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OallamaError(f"{path} is no TOML: {error}") from None
    commands = dict(_commands(group))
    of_all = {key: value for key, value in content.items() if not isinstance(value, dict)}
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    _check(path, "command", tables, commands)
    known = {option: command for command in commands.values() for option in _options(command)}
    _check(path, "option", of_all, known)
    found: dict[str, Any] = {}
    for name, command in commands.items():
        options = _options(command)
        own = tables.get(name, {})
        _check(path, f"option of {name}", own, options)
        values = {options[key]: value for key, value in {**of_all, **own}.items() if key in options}
        if values:
            _place(found, name, values, group)
    return found


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its name, of a group's with the group's name before it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def _options(command: Any) -> dict[str, str]:
    """Of a command: the parameter by the option's name without dashes."""
    return {
        name.lstrip("-"): parameter.name or ""
        for parameter in command.params
        for name in parameter.opts
        if name.startswith("--") and name != "--help"
    }


def _check(path: Path, what: str, given: Mapping[str, object], known: Mapping[str, object]) -> None:
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OallamaError(f"{path}: there is no {what} {key!r}{hint}")


def _place(found: dict[str, Any], name: str, values: dict[str, Any], group: Any) -> None:
    """Put them where click looks: below the group that the command belongs to."""
    first, _, rest = name.partition(" ")
    inner = group.commands.get(first)
    if name in group.commands or not hasattr(inner, "commands"):
        found[name] = values
    else:
        _place(found.setdefault(first, {}), rest, values, inner)
