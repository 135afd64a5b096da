#!/usr/bin/env python3
"""docs/reference/: a page for every command, made from the command line itself. Needs oallama with its engine.

.venv/bin/python scripts/reference.py --write    # makes the pages anew
.venv/bin/python scripts/reference.py --check    # exit code 1 when a page is not what it should be
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from oallama.cli.app import app

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
KINDS = {"Path": "file", "str": "text", "int": "number", "float": "number"}


def commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    """All that can be called, by its full name."""
    for each, command in getattr(group, "commands", {}).items():
        yield f"{name} {each}", command
        yield from commands(command, f"{name} {each}")


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def takes(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return ""
    kind = KINDS.get(getattr(parameter.type_descriptor.annotation, "__name__", ""), "text")
    return f"{kind}, repeatable" if parameter.multiple or parameter.nargs == -1 else kind


def default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.opts[0] if parameter.default is True else parameter.default
    return "" if value is None or value is False or value in ("", (), []) else f"`{value}`"


def page(name: str, command: Any) -> str:
    words = [line.strip() for line in (command.help or "").split("\n\n")]
    lines = [f"# {name}", "", *(f"{cell(text)}\n" for text in words)]
    shown = [each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
    if shown:
        lines += ["| | takes | default | what |", "|---|---|---|---|"]
    for each in shown:
        names = ", ".join(f"`{option}`" for option in (*each.opts, *each.secondary_opts))
        names = names if names.startswith("`-") else names.upper()
        lines.append(f"| {names} | {takes(each)} | {default(each)} | {cell(each.help or '')} |")
    inner = sorted(getattr(command, "commands", {}))
    if inner:
        lines += ["", "Commands: " + ", ".join(f"[{each}]({file_of(f'{name} {each}')})" for each in inner) + "."]
    return "\n".join(lines).rstrip() + "\n"


def file_of(name: str) -> str:
    return "-".join(name.split()[1:]) + ".md"


def pages() -> dict[str, str]:
    """Names of files, and what is in them."""
    found = dict(commands(typer.main.get_command(app), "oallama"))
    made = {file_of(name): page(name, command) for name, command in found.items()}
    index = [
        "# Commands",
        "",
        "`scripts/reference.py` makes these pages from the command line.",
        "",
        "| command | what |",
    ]
    index.append("|---|---|")
    for name, command in found.items():
        first = cell((command.help or "").split("\n\n")[0])
        index.append(f"| [{name}]({file_of(name)}) | {first} |")
    return {"README.md": "\n".join(index) + "\n", **made}


def main() -> int:
    made = pages()
    if sys.argv[1:] == ["--write"]:
        FOLDER.mkdir(exist_ok=True)
        for old in FOLDER.glob("*.md"):
            old.unlink()
        for file, text in made.items():
            (FOLDER / file).write_text(text)
        return 0
    here = {path.name: path.read_text() for path in FOLDER.glob("*.md")}
    wrong = sorted(file for file in here.keys() | made.keys() if here.get(file) != made.get(file))
    if wrong:
        print(f"docs/reference is stale ({', '.join(wrong)}): scripts/reference.py --write", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
