"""Folders of source files: stamps, copies that spare ninja, differences (standard library only).

Invariants: a stamped folder is whole or says that it is not, for the stamp is written last; a file keeps its time of
change as long as its content stays, so that ninja rebuilds only what changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from patchset import PatchError, outside_git

STAMP = ".oallama-stamp.json"  # {"stamp": hash of what the folder was made from, "files": {path: sha256}}
INCOMPLETE = "incomplete"


@contextlib.contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, on the file system of the trees so that they can be renamed into place."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=folder) as work:
        yield Path(work)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """One process at a time changes the trees: a build and a developer may both call prepare."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for left_over in folder.glob("work-*"):  # of a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        yield


def hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def files_of(tree: Path) -> list[str]:
    """Relative paths of all files below tree but its stamp."""
    found = (path.relative_to(tree).as_posix() for path in tree.rglob("*") if not path.is_dir())
    return sorted(path for path in found if path != STAMP)


def manifest(tree: Path) -> dict[str, str]:
    return {path: hash_file(tree / path) for path in files_of(tree)}


def read_stamp(tree: Path) -> dict:
    try:
        return json.loads((tree / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"stamp": "", "files": {}}


def write_stamp(tree: Path, stamp: str, files: dict[str, str]) -> None:
    aside = tree / (STAMP + ".new")
    aside.write_text(json.dumps({"stamp": stamp, "files": files}, indent=0) + "\n", encoding="utf-8")
    os.replace(aside, tree / STAMP)


def edits(tree: Path) -> list[str]:
    """Files of a stamped tree that changed since it was made."""
    made, now = read_stamp(tree)["files"], manifest(tree)
    return sorted(path for path in made.keys() | now.keys() if made.get(path) != now.get(path))


def alike(one: Path, other: Path) -> bool:
    """Both are the same file in content and executable bit, or neither exists."""
    if not one.is_file() or not other.is_file():
        return not one.exists() and not other.exists()
    runs = (one.stat().st_mode ^ other.stat().st_mode) & 0o100 == 0
    return runs and filecmp.cmp(one, other, shallow=False)


def copy_file(source: Path, target: Path) -> None:
    # copy, not copy2: a file that came into being now must look newer than what was built before.
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def copy_tree(source: Path, target: Path) -> None:
    for path in files_of(source):
        copy_file(source / path, target / path)


def install(tree: Path, target: Path, stamp: str) -> None:
    """Makes target equal to tree and stamps it; files that are equal already are not touched."""
    files = manifest(tree)
    if not target.exists():
        write_stamp(tree, stamp, files)
        os.replace(tree, target)
        return
    write_stamp(target, INCOMPLETE, read_stamp(target)["files"])
    for path in set(files_of(target)) - set(files):
        (target / path).unlink()
    for folder in sorted((path for path in target.rglob("*") if path.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            folder.rmdir()
    for path in files:
        if not alike(tree / path, target / path):
            copy_file(tree / path, target / path)
    write_stamp(target, stamp, files)


def diff(before: Path, after: Path) -> str:
    """Differences between two trees as a git-style patch with a/ and b/ in front of the paths."""
    with tempfile.TemporaryDirectory() as folder:  # outside the checkout, whose .gitattributes could change the output
        work = Path(folder)
        for tree, other, side in ((before, after, "a"), (after, before, "b")):
            (work / side).mkdir()
            for path in files_of(tree):
                if not alike(tree / path, other / path):
                    copy_file(tree / path, work / side / path)
        command = ["git", "-c", "core.autocrlf=false", "diff", "--no-index", "--no-prefix", "--no-color"]
        command += ["--no-ext-diff", "--no-renames", "--histogram", "a", "b"]
        done = subprocess.run(command, cwd=work, env=outside_git(work), capture_output=True)
        if done.returncode > 1:
            raise PatchError(f"git diff failed: {done.stderr.decode().strip()}")
    return re.sub(r"^index [0-9a-f.]+( \d+)?\n", "", done.stdout.decode("utf-8"), flags=re.MULTILINE)
