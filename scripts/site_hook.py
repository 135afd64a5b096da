"""A hook of mkdocs.yml: files beside docs/ that the site needs, and links that lead to them.

README.md is the site's first page. Other pages and pictures outside of docs/ are under repository/. A link to what the
site does not have (a folder, a JSON file) becomes its text, because the site must not point outside of itself.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CHANGELOG.md", "bench/README.md", "third_party/llama.cpp/README.md")
PICTURES = "bench/results/*.png"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s:]+)\)")


def extra() -> set[str]:
    return {*PAGES, *(path.relative_to(ROOT).as_posix() for path in ROOT.glob(PICTURES))}


def place(path: str) -> str | None:
    """Where a file of the repository is on the site; None: nowhere."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and (ROOT / path).is_file():
        return path.removeprefix("docs/")
    return f"repository/{path}" if path in extra() else None


def rewritten(text: str, path: str) -> str:
    """The text of the repository's file `path`, with links as they are on the site."""
    here = posixpath.dirname(place(path) or "")

    def link(match: re.Match[str]) -> str:
        picture, words, target = match.groups()
        file, hash_, anchor = target.partition("#")
        if not file:
            return match[0]
        target_path = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
        if not (ROOT / target_path).exists():
            return match[0]  # mkdocs reports it
        there = place(target_path)
        return f"{picture}[{words}]({posixpath.relpath(there, here or '.')}{hash_}{anchor})" if there else words

    parts = re.split(r"(```.*?```|`[^`]*`)", text, flags=re.DOTALL)
    return "".join(part if part.startswith("`") else LINK.sub(link, part) for part in parts)


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "index.md", content=rewritten((ROOT / "README.md").read_text(), "README.md")))
    for path in sorted(extra()):
        uri = f"repository/{path}"
        if path.endswith(".md"):
            made = File.generated(config, uri, content=rewritten((ROOT / path).read_text(), path))
        else:
            made = File.generated(config, uri, abs_src_path=str(ROOT / path))
        files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = f"docs/{page.file.src_uri}"
    return rewritten(markdown, path) if (ROOT / path).is_file() else markdown
