"""Shared fixtures: the four architectures as tiny models, the two builds of libllama, a loopback RPC device."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from oallama.engine import native, runtime
from oallama.modelmaker import make_model
from support.paths import ROOT

pytest_plugins = ("support.mpi_ranks", "support.fake_cuda")  # their fixtures


def pytest_configure(config: pytest.Config) -> None:
    """Hide NVIDIA GPUs from tests that are about other devices; `-m cuda` runs those that are about them.

    Profiles are quick, since no test asserts a time, and kept in the build folder. Plans and runs are not kept, and no
    first use is measured.

    AMX is off but for tests that ask for it: with it a CPU rounds differently, and more types have two layouts.

    A shell's background job (`make test &`) ignores Ctrl-C and hands that on: programs under test must not.

    Hypothesis has no deadline for one example: no test asserts a time.
    """
    settings.register_profile("oallama", settings.default, deadline=None)
    settings.load_profile("oallama")
    if config.getoption("-m") != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OALLAMA_AMX"] = "0"
    os.environ["OALLAMA_QUICK_PROFILE"] = "1"
    os.environ["OALLAMA_PLAN_CACHE"] = "0"
    os.environ["OALLAMA_HISTORY"] = "0"
    os.environ["OALLAMA_VERIFY"] = "0"
    os.environ["XDG_CACHE_HOME"] = str(ROOT / "build" / "test-cache")
    os.environ["XDG_CONFIG_HOME"] = str(ROOT / "build" / "test-config")  # nobody's own defaults
    # Programs under test import from tests/support, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    signal.signal(signal.SIGINT, signal.default_int_handler)


NEED_THE_ENGINE = {"tiny", "draft", "rpc", "lib", "baseline_lib"}  # fixtures
WITHOUT = [ROOT / "tests" / folder for folder in ("unit", "planning", "patches")]  # what `make check` runs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if NEED_THE_ENGINE & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(autouse=True)
def no_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of `make check` that are not marked `engine` have none."""
    if request.node.get_closest_marker("engine") or request.path.parent not in WITHOUT:
        return

    def refuse(*_: object) -> None:
        raise AssertionError("this test needs the mark `engine`")

    for name in ("lib_dir", "llama_cpp"):
        monkeypatch.setattr(runtime, name, refuse)
    monkeypatch.setattr(native, "core", refuse)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny(arch, file_type="Q8_0")`: path of a tiny model, made once a session."""
    folder = tmp_path_factory.mktemp("models")

    def get(arch: str, file_type: str = "Q8_0") -> Path:
        path = folder / f"{arch}-{file_type}.gguf"
        if not path.exists():
            make_model(path, arch=arch, shape="tiny", file_type=file_type)
        return path

    return get


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, with the vocabulary of the tiny ones."""
    path = tmp_path_factory.mktemp("draft") / "one-layer.gguf"
    make_model(path, arch="llama", shape="tiny", file_type="F16", overrides={"n_layer": 1})
    return path


@pytest.fixture(scope="session")
def baseline_lib() -> Path:
    """Folder of the unpatched libllama from the same pin."""
    folder = Path(os.environ.get("OALLAMA_BASELINE_DIR") or ROOT / "build" / "baseline" / "bin")
    if not (folder / "libllama.so").exists():
        pytest.fail(f"no unpatched llama.cpp in {folder}: run `make baseline`")
    return folder


@pytest.fixture(scope="session")
def lib() -> Path:
    """Folder of the patched libllama."""
    return runtime.lib_dir()


@pytest.fixture(scope="session")
def rpc() -> Iterator[Any]:
    """A loopback RPC device with two threads, registered in this process for the whole session."""
    from oallama.engine.rpc import LocalRpcServer

    with LocalRpcServer(threads=2) as server:
        yield server
