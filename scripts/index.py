#!/usr/bin/env python3
"""Writes a package index of the wheels in dist/ for pip. Any web server can serve the folder as it is.

The pages are those of PEP 503, with a hash in every link. A wheel's metadata lies beside it (PEP 658 and 714): pip
reads what a wheel needs before it downloads one. The same wheels give the same bytes. Standard library only.
"""

from __future__ import annotations

import argparse
import email.parser
import hashlib
import html
import re
import shutil
import sys
import urllib.parse
import zipfile
import zlib
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
# Name, version, perhaps a build number, then tags of Python, ABI and platform.
FILE_NAME = re.compile(r"(?P<name>[^-]+)-(?P<version>[^-]+)(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="pypi:repository-version" content="1.0">
<title>{title}</title>
</head>
<body>
{links}
</body>
</html>
"""


@dataclass(frozen=True)
class Wheel:
    path: Path
    project: str  # normalised
    version: str
    requires_python: str | None
    metadata: bytes
    sha256: str

    def link(self) -> str:
        """The line of its project's page."""
        attributes = {"href": f"{urllib.parse.quote(self.path.name)}#sha256={self.sha256}"}
        if self.requires_python:
            attributes["data-requires-python"] = self.requires_python
        of_metadata = f"sha256={hashlib.sha256(self.metadata).hexdigest()}"
        attributes |= {"data-dist-info-metadata": of_metadata, "data-core-metadata": of_metadata}
        said = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
        return f"<a {said}>{html.escape(self.path.name)}</a><br>"


def fail(message: str) -> NoReturn:
    sys.exit(f"index: error: {message}")


def normalised(name: str) -> str:
    """A project's name in URLs, by PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(path: Path) -> Wheel:
    """What the index says of a wheel."""
    named = FILE_NAME.fullmatch(path.name)
    if named is None or not path.is_file():
        fail(f"{path} is no wheel: expected NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    try:
        with zipfile.ZipFile(path) as archive:
            found = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            if len(found) != 1:
                fail(f"{path} is no wheel: expected one *.dist-info/METADATA in it, found {len(found)}")
            metadata = archive.read(found[0])
    except (zipfile.BadZipFile, zlib.error) as error:
        fail(f"{path} is no wheel: {error}")
    headers = email.parser.BytesHeaderParser().parsebytes(metadata)
    name, version = headers["Name"] or "", headers["Version"] or ""
    project = normalised(named["name"])
    if (normalised(name), version.replace("-", "_")) != (project, named["version"]):
        fail(f"{path} holds {name or 'no name'} {version or 'without version'}, not what its own name says")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel(path, project, version, headers["Requires-Python"], metadata, digest)


def read_all(dist: Path) -> list[Wheel]:
    """All wheels of a folder, those of one project together."""
    if not dist.is_dir():
        fail(f"no folder {dist}; scripts/release.sh makes a wheel there")
    paths = sorted(dist.iterdir())
    if not paths:
        fail(f"no wheels in {dist}; scripts/release.sh makes one")
    return sorted(map(read, paths), key=lambda wheel: (wheel.project, wheel.path.name))


def write(wheels: list[Wheel], simple: Path) -> list[str]:
    """Replaces the folder `simple`; returns its projects."""
    shutil.rmtree(simple, ignore_errors=True)
    projects = []
    for project, group in groupby(wheels, lambda wheel: wheel.project):
        folder = simple / project
        folder.mkdir(parents=True)
        links = []
        for wheel in group:
            shutil.copyfile(wheel.path, folder / wheel.path.name)
            (folder / f"{wheel.path.name}.metadata").write_bytes(wheel.metadata)
            links.append(wheel.link())
        (folder / "index.html").write_text(PAGE.format(title=project, links="\n".join(links)), encoding="utf-8")
        projects.append(project)
    links = [f'<a href="{project}/">{project}</a><br>' for project in projects]
    (simple / "index.html").write_text(PAGE.format(title="Simple index", links="\n".join(links)), encoding="utf-8")
    return projects


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a static package index of wheels.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder with the wheels (default: dist)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "index",
                        help="folder whose simple/ is replaced (default: build/index)")  # fmt: skip
    parser.add_argument("--url", help="where --out will be served (default: its file: URL)")
    arguments = parser.parse_args()
    wheels = read_all(arguments.dist)
    projects = write(wheels, arguments.out / "simple")
    for wheel in wheels:
        print(f"{wheel.path.stat().st_size / 1e6:8.2f} MB  {wheel.path.name}")
    url = (arguments.url or arguments.out.resolve().as_uri()).rstrip("/")
    print(f"index of {len(wheels)} {'wheels' if len(wheels) > 1 else 'wheel'} in {arguments.out}; to install from it:")
    print(f"pip install {' '.join(projects)} --extra-index-url {url}/simple/")


if __name__ == "__main__":
    main()
