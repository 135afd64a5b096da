"""Modules that documents of earlier versions name: the old name works, with one line that tells the new one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {"oallama.plan": "oallama.data.plan", "oallama.runtime": "oallama.engine.runtime"}


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is {new} now", FutureWarning, stacklevel=2)
        found = vars(import_module(new))
        vars(module).update({name: value for name, value in found.items() if not name.startswith("__")})


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Loader()) if fullname in MOVED else None


def keep_old_names() -> None:
    """Let the import system find MOVED, after all that is really there."""
    sys.meta_path.append(_Finder())
