"""Backends of ggml that come in packages of their own, as oallama-cuda13 does (docs/wheels.md).

Such a package has an entry point of the group `oallama.modules`: a function that gives a folder. In it are modules that
the engine loads beside its own, and `engine_id`, which says of what sources they were made. Only the same sources have
the same functions and structures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from oallama.base.environment import MODULES
from oallama.base.printing import say

GROUP = "oallama.modules"
ENGINE_ID = "engine_id"


def is_modular(lib_dir: Path) -> bool:
    """Whether the backends of the engine in `lib_dir` are modules; else they are linked, and no others are loaded."""
    return any(lib_dir.glob("libggml-cpu-*.so"))


@cache
def add_packages(lib_dir: Path) -> tuple[Path, ...]:
    """Name the folders of packages that fit the engine in `lib_dir` in OALLAMA_MODULES; returns them.

    One that does not fit, or fails, is said and left out.
    """
    mark = lib_dir.parent / ENGINE_ID
    if not is_modular(lib_dir) or not mark.is_file():
        return ()
    found = tuple(_fitting(mark.read_text().strip()))
    named = (MODULES.get() or "").split(":")
    os.environ[MODULES.name] = ":".join(filter(None, [*named, *(str(f) for f in found if str(f) not in named)]))
    return found


def _fitting(engine_id: str) -> Iterator[Path]:
    for entry in metadata.entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else entry.value
        try:
            folder = Path(entry.load()())
            made_of = (folder / ENGINE_ID).read_text().strip()
        except Exception as error:  # whatever a package's own code raises costs its backend alone
            say(f"{package} is not used: {error}")
            continue
        if made_of == engine_id:
            yield folder
        else:
            say(f"{package} is not used: it is of another release; pip install --upgrade oallama {package}")
