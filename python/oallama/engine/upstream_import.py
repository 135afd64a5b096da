"""`import llama_cpp` behind `import oallama` gives the llama-cpp-python that comes with the engine, on our libllama.

So a program that imports llama-cpp-python itself, as LangChain does, needs one line before: `import oallama`. Nothing
is loaded before somebody imports it. Another llama-cpp-python that is installed is left alone. A LLAMA_CPP_LIB_PATH of
the user's stays in force.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from oallama.engine import runtime
from oallama.errors import OallamaError

NAME = "llama_cpp"


class _Loader(Loader):
    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._own  # for who asks the module for its source or its files
        with runtime.our_libraries():
            self._own.exec_module(module)
            runtime.import_mtmd()


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != NAME:
            return None
        given = os.environ.get(runtime.LIBRARY_VARIABLE)
        try:
            runtime.lib_dir()
            folder = runtime.bindings_dir()
        except OallamaError:
            return None  # nothing is built
        if given and not runtime.is_ours(given) and (own := PathFinder.find_spec(fullname, path, target)):
            return own  # the llama-cpp-python that goes with that library
        found = PathFinder.find_spec(fullname, [str(folder)], target)
        if found is not None and found.loader is not None and not given:
            found.loader = _Loader(found.loader)
        return found


def take_ours() -> None:
    """From now on `import llama_cpp` takes our libraries."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
