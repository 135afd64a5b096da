"""Defaults of a user's own: `oallama.toml` in `$XDG_CONFIG_HOME`, by default in `~/.config`.

    vram = "auto"          # of every command that has --vram

    [serve]                # of one command
    port = 9000

    ["bench serve"]
    rate = 2.0

Keys are names of options without the dashes. What is given on the command line counts more, and a default gives way
where an option is given that excludes it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from oallama.base.printing import say_once
from oallama.errors import OallamaError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Parameters, and options beside which they are refused.
_EXCLUDED_BY = {"vram": {"--plan", "--no-plan", "--hot", "--cpu"}, "margin": {"--plan", "--no-plan"}}


def config_file() -> Path:
    """Where it is looked for."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "oallama.toml"


def default_map(group: Any) -> dict[str, Any]:
    """What click takes in place of options that are not given, by command; empty without a file.

    Raises:
        OallamaError: the file is no TOML, or has a key that no command knows, or a value that does not fit its option.
    """
    path = config_file()
    try:
        content = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:  # of another user, for one
        say_once(f"no defaults are taken from {path}: {error.strerror}")
        return {}
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
        wrong = [key for key, value in own.items() if not _fits(options[key], value)]
        if wrong:
            kind = "true or false" if options[wrong[0]].is_flag else "a value that is neither true nor false"
            raise OallamaError(f"{path}: {wrong[0]!r} of {name} takes {kind}, got {own[wrong[0]]!r}")
        fitting = {key: value for key, value in of_all.items() if key in options and _fits(options[key], value)}
        values = {options[key].name: _value(options[key], value) for key, value in {**fitting, **own}.items()}
        if values:
            _place(found, name, values, group)
    return found


def giving_way(values: Mapping[str, Any], args: Sequence[str]) -> dict[str, Any]:
    """The defaults of a command, by parameter, less those that its arguments exclude."""
    given = {arg.partition("=")[0] for arg in args}
    on_cpu = "--device=CPU" in args or ("--device", "CPU") in pairwise(args)
    excluded = {name for name, others in _EXCLUDED_BY.items() if on_cpu or given & others}
    return {name: value for name, value in values.items() if name not in excluded}


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its name, of a group's with the group's name before it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def _options(command: Any) -> dict[str, Any]:
    """Options of a command by their names without dashes."""
    return {
        name.lstrip("-"): parameter
        for parameter in command.params
        for name in parameter.opts
        if name.startswith("--") and name != "--help"
    }


def _fits(option: Any, value: object) -> bool:
    """Commands may have options of one name that are a switch here and a number there."""
    return isinstance(value, bool) == bool(option.is_flag)


def _value(option: Any, value: object) -> object:
    return [value] if option.multiple and not isinstance(value, list) else value


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
