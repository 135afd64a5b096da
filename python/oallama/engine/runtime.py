"""Finds the engine's libraries and programs, and makes llama-cpp-python load our libllama.

Nothing here computes; importing this module loads no native code.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from oallama.base.environment import DEBUG, LIB_DIR
from oallama.engine.cuda_libraries import make_loadable
from oallama.errors import OallamaError

_LIBRARY = "libllama.so"


@cache
def lib_dir() -> Path:
    """Folder of libllama and libggml* (env `OALLAMA_LIB_DIR` beats the installed one).

    Raises:
        OallamaError: if the engine is not built.
    """
    override = LIB_DIR.get()
    folder = Path(override) if override else _package_dir() / "lib"
    if not (folder / _LIBRARY).is_file():
        raise OallamaError(f"no {_LIBRARY} in {folder}: build the engine with `make setup` (or pip install oallama)")
    return folder


def program(name: str) -> Path:
    """Path of a program built from the patched source, e.g. `llama-server`, `llama-bench`, `ggml-rpc-server`.

    Raises:
        OallamaError: if it was not built, or a CUDA library that it needs is missing.
    """
    make_loadable(lib_dir())
    for folder in (lib_dir().parent / "bin", lib_dir()):
        path = folder / name
        if path.is_file():
            return path
    raise OallamaError(f"the program {name} is not built (looked beside {lib_dir()}): build it with `make setup`")


def _package_dir() -> Path:
    # In an editable install the Python files lie in the checkout and the built ones in site-packages: ask for _core.
    spec = importlib.util.find_spec("oallama._core")
    if spec is None or spec.origin is None:
        raise OallamaError("the engine module oallama._core is not built: run `make setup` (or pip install oallama)")
    return Path(spec.origin).parent


@cache
def llama_cpp() -> ModuleType:
    """The module `llama_cpp` (llama-cpp-python) running on our libllama.

    Raises:
        OallamaError: if it was imported before with another library, has another version than ours, or a CUDA library
            that the engine needs is missing.
    """
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None and Path(loaded._base_path).resolve() != lib_dir().resolve():
        raise OallamaError(
            f"llama_cpp was imported before oallama and uses {loaded._base_path}; import oallama first in the program"
        )
    make_loadable(lib_dir())
    with _environment(LLAMA_CPP_LIB_PATH=str(lib_dir()), MTMD_CPP_LIB=str(lib_dir())):
        import llama_cpp

        if (lib_dir() / "libmtmd.so").is_file():  # `make demo` builds none
            import llama_cpp.mtmd_cpp  # reads its variable at import, too
    return llama_cpp


def quiet() -> None:
    """Keep llama.cpp's log off the terminal (OALLAMA_DEBUG=1 shows it)."""
    llama_cpp()._logger.set_verbose(debugging())


def debugging() -> bool:
    return DEBUG.get() is not None


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
