"""The pinned source distribution: where things lie, download, verification, extraction (standard library only).

Invariant: nothing is unpacked whose sha256 is not the one in pin.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trees import hash_file, workspace


class UpstreamError(Exception):
    """The pinned source cannot be had or used; the message says what to do."""


@dataclass(frozen=True)
class Layout:
    """Where things lie; the tests use a folder of their own."""

    root: Path

    @property
    def pin_file(self) -> Path:
        return self.root / "pin.json"

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def download(self) -> Path:
        return self.root / ".download"

    @property
    def upstream(self) -> Path:
        return self.root / "upstream"

    @property
    def patched(self) -> Path:
        return self.root / "patched"

    @property
    def repository(self) -> Path:
        return self.root.parent.parent

    def pin(self) -> dict:
        return json.loads(self.pin_file.read_text(encoding="utf-8"))


Downloader = Callable[[dict, Path], None]


def pip_download(pin: dict, folder: Path) -> None:
    """Downloads the source distribution into folder, trying twice. Raises UpstreamError with pip's last words."""
    requirement = f"{pin['package']}=={pin['version']}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", pin["package"], "--dest", str(folder), requirement]
    # Inside a pip build PYTHONPATH hides pip itself.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for wait in (2, 0):
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode == 0:
            return
        time.sleep(wait)
    raise UpstreamError("\n".join((done.stdout + done.stderr).strip().splitlines()[-3:]))


def ensure_sdist(layout: Layout, download: Downloader = pip_download) -> Path:
    """The verified source distribution, downloaded when it is not there."""
    pin = layout.pin()
    sdist = layout.download / pin["sdist"]
    if not sdist.is_file():
        with workspace(layout.download) as work:
            print(f"upstream.py: downloading {pin['package']} {pin['version']}", file=sys.stderr)
            try:
                download(pin, work)
            except UpstreamError as error:
                raise UpstreamError(
                    f"no network and no download; expected {sdist} (sha256 {pin['sha256']}).\n"
                    f"Put the file there, or let pip reach a package index. pip said:\n{error}"
                ) from None
            if not (work / pin["sdist"]).is_file():
                came = ", ".join(sorted(path.name for path in work.iterdir())) or "nothing"
                raise UpstreamError(f"expected {pin['sdist']} from pip, got {came}")
            os.replace(work / pin["sdist"], sdist)
    verify(sdist, pin["sha256"])
    return sdist


def verify(sdist: Path, expected: str) -> None:
    """Deletes sdist and raises UpstreamError unless its sha256 is as expected."""
    digest = hash_file(sdist)
    if digest != expected:
        sdist.unlink()
        raise UpstreamError(f"{sdist.name} is not the pinned file, deleted: sha256 is {digest}, expected {expected}")


def extract(sdist: Path, pin: dict, tree: Path, tests: Path) -> None:
    """Unpacks what the pin lists: llama.cpp into tree, llama-cpp-python's Python part into tree/python, its tests into
    tests."""
    top = pin["sdist"].removesuffix(".tar.gz")
    sources = f"{top}/{pin['path']}/"
    package_tests = f"{top}/{pin['package_tests']}/"
    unseen = set(pin["extract"])
    with tarfile.open(sdist, "r:gz") as tar:
        for member in tar:
            if member.name.startswith(sources):
                path = member.name[len(sources) :]
                wanted = [item for item in pin["extract"] if within(path, item)]
                if not wanted or any(within(path, item) for item in pin["exclude"]):
                    continue
                target = tree / path
                unseen.difference_update(wanted)
            elif any(within(member.name, f"{top}/{item}") for item in pin["package_python"]):
                target = tree / "python" / member.name[len(top) + 1 :]
            elif member.name.startswith(package_tests):
                target = tests / member.name[len(package_tests) :]
            else:
                continue
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isreg() else None
            if content is None or ".." in Path(member.name).parts:
                raise UpstreamError(f"{sdist.name} holds something that is not a plain file: {member.name}")
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, open(target, "wb") as out:
                shutil.copyfileobj(content, out)
            target.chmod(0o755 if member.mode & 0o100 else 0o644)
    if unseen:
        raise UpstreamError(f"pin.json asks for what {sdist.name} does not hold: {', '.join(sorted(unseen))}")


def within(path: str, item: str) -> bool:
    return path == item or path.startswith(item + "/")
