"""The documents point at what is there: every relative link, anchor and path, and nothing outside of the repository."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes import ran

PACKAGE = ROOT / "python" / "oallama"
RESULTS = ROOT / "bench" / "results"
DOCUMENTS = sorted(
    path
    for pattern in ("README.md", "CHANGELOG.md", "docs/**/*.md", "bench/README.md", "bench/*/README.md")
    for path in ROOT.glob(pattern)
    if path.parent != RESULTS
)
COLUMNS = 100  # of prose
MADE = ("docs/reference/", "docs/environment.md")  # by programs
FOLDERS = ("bench", "cmake", "csrc", "docs", "python", "scripts", "tests", "third_party")
SOURCES = {".py", ".cpp", ".h", ".cu", ".sh", ".cmake", ".patch"}
RECORDS = {".jsonl", ".md", ".csv", ".png"}
# Files of llama.cpp that the documents name.
UPSTREAM = {"llama.cpp", "common/fit.cpp", "ggml-backend.cpp", "ggml-cpu/repack.cpp", "ggml-cuda.cu", "mmvq.cu"}
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
OUTSIDE = re.compile(r"\.\./shared\b|\bSPEC\.md|\bDESIGN\.md|/work/")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Lines outside of code blocks, with their numbers."""
    in_code = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def anchors(path: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    titles = (line.lstrip("#").strip().lower() for _, line in prose(path) if line.startswith("#"))
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)).replace(" ", "-") for title in titles
    }


def all_files() -> set[str]:
    """Every file in the folders of the repository, and the name of each file alone."""
    found = {name(path) for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    return found | {path.rsplit("/", 1)[1] for path in found}


FILES = all_files()


def is_there(words: str, folder: Path = ROOT) -> bool:
    """Whether a text in backticks of a document in `folder` is no path, or the path of something that exists."""
    if not re.fullmatch(r"[\w.*/-]+", words) or words in UPSTREAM or words.startswith(("/", "DATE-")):
        return True
    if words.startswith("../"):
        return (folder / words).resolve().is_relative_to(ROOT) and (folder / words).exists()
    suffix = Path(words).suffix
    first = words.split("/")[0]
    if suffix in RECORDS and re.match(r"\*?-\w|\d{4}-\d\d-\d\d-\w", words):
        pattern = words if words.startswith(("*", "2")) else f"*{words}"
        return any(fnmatch(path.name, pattern) for path in RESULTS.iterdir())
    roots = [ROOT] * (first in FOLDERS) + [PACKAGE] * (PACKAGE / first).is_dir()
    if "/" in words and roots:
        return any(any(root.glob(words)) or any(root.glob(f"{words}.*")) for root in roots)
    if suffix in SOURCES:
        return any(fnmatch(file, words) or file.endswith(f"/{words}") for file in FILES)
    return True


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere_in_the_repository(document: Path) -> None:
    broken = []
    for number, line in prose(document):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            file, _, anchor = target.partition("#")
            path = (document.parent / file).resolve() if file else document
            if not path.is_relative_to(ROOT) or not path.exists():
                broken.append(f"{name(document)}:{number}: {target}: no such file in the repository")
            elif anchor and anchor not in anchors(path):
                broken.append(f"{name(document)}:{number}: {target}: no such heading")
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_paths_in_backticks_exist(document: Path) -> None:
    missing = [
        f"{name(document)}:{number}: `{word}`"
        for number, line in prose(document)
        for words in re.findall(r"(?<!`)`([^`]+)`", line)
        for word in words.split()
        if not is_there(word, document.parent)
    ]
    assert not missing, "\n".join(missing)


def test_missing_paths_are_seen() -> None:
    assert is_there("planning/divided.py") and is_there("docs/architecture.md") and is_there("plan.json")
    for words in ("planning/nowhere.py", "docs/nowhere.md", "csrc/nowhere", "nowhere.cpp", "2026-01-01-nowhere.jsonl"):
        assert not is_there(words)


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if not name(path).startswith(MADE)], ids=name)
def test_prose_is_narrow(document: Path) -> None:
    wide = []
    for number, line in prose(document):
        visible = re.sub(r"\]\([^)]*\)", "]", line)
        if len(visible) > COLUMNS and not line.lstrip().startswith("|"):
            wide.append(f"{name(document)}:{number}: {len(visible)} columns, expected at most {COLUMNS}")
    assert not wide, "\n".join(wide)


def test_nothing_points_outside_of_the_repository() -> None:
    kinds = SOURCES | {".md", ".toml", ".txt", ".json"}
    candidates = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in kinds}
    fetched = ROOT / "third_party" / "llama.cpp"
    ours = {
        path
        for path in candidates | set(ROOT.glob("*.*"))
        if path.is_file()
        and path != Path(__file__)
        and RESULTS not in path.parents
        and not any(fetched / folder in path.parents for folder in ("upstream", "patched", ".download"))
        and not path.name.endswith(".gguf")
    }
    found = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in sorted(ours)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if OUTSIDE.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_numbers_of_the_readme_are_those_of_the_results() -> None:
    ran(sys.executable, ROOT / "scripts" / "result_tables.py", "--check")
