"""Finds the engine's libraries and programs, and llama-cpp-python's Python part, which it makes load our libllama.

Nothing here computes; importing this module loads no native code.
"""

from __future__ import annotations

import importlib.util
import logging
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

LIBRARY_VARIABLE = "LLAMA_CPP_LIB_PATH"
_LIBRARY = "libllama.so"
_GGML_WARNING = 3


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


def bindings_dir() -> Path:
    """Folder of the module `llama_cpp`: llama-cpp-python of the pinned version, which comes with the engine."""
    return _package_dir() / "bindings"


def is_ours(folder: str) -> bool:
    """Whether a folder is that of the engine's libraries."""
    return Path(folder).resolve() == lib_dir().resolve()


def pin_file() -> Path:
    """JSON file that says which llama-cpp-python and llama.cpp the engine was made from."""
    return _package_dir() / "pin.json"


def with_bindings(python_path: str | None = None) -> str:
    """A PYTHONPATH by which a program without oallama imports that module, before `python_path`."""
    return os.pathsep.join(filter(None, (str(bindings_dir()), python_path)))


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
        OallamaError: if it was imported before with another library, or a CUDA library that the engine needs is
            missing.
    """
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None and Path(loaded._base_path).resolve() != lib_dir().resolve():
        raise OallamaError(
            f"llama_cpp was imported before oallama and uses {loaded._base_path}; import oallama first in the program"
        )
    with our_libraries():
        import llama_cpp

        import_mtmd()
    return llama_cpp


@contextmanager
def our_libraries() -> Iterator[None]:
    """Within the block llama-cpp-python is imported with our libraries."""
    make_loadable(lib_dir())
    with _environment(**{LIBRARY_VARIABLE: str(lib_dir()), "MTMD_CPP_LIB": str(lib_dir())}):
        yield


def import_mtmd() -> None:
    """Import llama-cpp-python's part for images, which reads its variable at import, too."""
    if (lib_dir() / "libmtmd.so").is_file():  # `make demo` builds none
        import llama_cpp.mtmd_cpp  # noqa: F401


def quiet() -> None:
    """Keep llama.cpp's log off the terminal (OALLAMA_DEBUG=1 shows it)."""
    log = llama_cpp()._logger
    log.set_verbose(debugging())
    # Its table takes ggml's warnings for errors, and shows them. Errors of ggml end in messages of ours.
    log.GGML_LOG_LEVEL_TO_LOGGING_LEVEL[_GGML_WARNING] = logging.WARNING


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
