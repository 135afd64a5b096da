"""Imports point down: the folders of python/oallama are levels, and no module imports from its own level's neighbours
or from above. What only annotations need (`if TYPE_CHECKING`) is free."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGE = ROOT / "python" / "oallama"
# From the bottom up. Names on one line know nothing of each other.
LEVELS = (
    {"errors"},
    {"base"},
    {"netlab"},
    {"data"},
    {"views"},
    {"engine", "solving"},
    {"profiling", "modelmaker", "tracing"},
    {"planning", "storyteller"},
    {"bench"},
    {"loading"},
    {"llama"},
    {"doctor", "drafts", "quantizing", "studies", "weave"},
    {"serving"},
    {"cluster"},
    {"cli"},
    {"server"},
)
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
ROOT_FILES = {"__init__.py", "errors.py", "llama.py", "server.py"}
# Parts of cluster/, in the same way.
CLUSTER = {"allocation": 0, "ranks": 0, "pipeline": 1, "spread": 2, "join": 2}


def imports(path: Path) -> Iterator[str]:
    """Dotted names below oallama that a module imports when it runs, functions included."""
    package = ("oallama", *path.relative_to(PACKAGE).parts[:-1])
    tree = ast.parse(path.read_text())
    annotations = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in annotations:
            continue
        if isinstance(node, ast.Import):
            yield from (a.name.removeprefix("oallama.") for a in node.names if a.name.startswith("oallama."))
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else []
            if node.level:
                names = [*package[: len(package) - node.level + 1], *names]
            base = ".".join(names)
            if base == "oallama" or base.startswith("oallama."):
                yield from (f"{base}.{a.name}".removeprefix("oallama.") for a in node.names)


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def upward(path: Path) -> list[str]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    found = []
    for name in imports(path):
        first, *rest = name.split(".")
        if first == parts[0] == "cluster":
            levels, pair = CLUSTER, (rest[0], parts[1])
        else:
            levels, pair = LEVEL, (first, parts[0])
        above, mine = (levels.get(folder, -1) for folder in pair)
        if pair[0] != pair[1] and above >= mine:
            found.append(name)
    return found


def test_every_folder_has_a_level():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert folders | files == set(LEVEL)
    assert {path.name for path in PACKAGE.glob("*.py")} == ROOT_FILES


def test_imports_point_down():
    assert {str(path.relative_to(PACKAGE)): names for path in modules() if (names := upward(path))} == {}


@pytest.mark.parametrize(
    "line", ["from oallama.cli import main", "from ..cli.app import app", "import oallama.cli.app"]
)
def test_an_import_that_points_up_is_found(line, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    module = tmp_path / "data" / "plan.py"
    module.parent.mkdir()
    module.write_text(f"def f():\n    {line}\n")
    assert upward(module)


def test_no_file_is_long():
    long = {str(path.relative_to(PACKAGE)): n for path in modules() if (n := len(path.read_text().splitlines())) > 400}
    assert long == {}


def test_tables_and_pictures_are_in_views():
    """rich and matplotlib are imported there and by commands; elsewhere only annotations name them."""

    def foreign(path: Path) -> set[str]:
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        inner = [
            node
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        names = {
            (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
            for node in (*top, *inner)
            for alias in node.names
        }
        return {name.split(".")[0] for name in names} & {"rich", "matplotlib"}

    found = {path: foreign(path) for path in modules() if path.parts[-2] not in ("views", "cli")}
    assert {str(path): names for path, names in found.items() if names} == {}
