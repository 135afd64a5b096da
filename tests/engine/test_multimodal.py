"""Multimodal handlers of llama-cpp-python find the libmtmd that was built with our libllama."""

from __future__ import annotations

from pathlib import Path

from oallama.engine import runtime


def test_libmtmd_is_the_engines() -> None:
    mtmd = runtime.llama_cpp().mtmd_cpp
    assert Path(mtmd._libmtmd._name).parent == runtime.lib_dir()
    assert b"media" in mtmd.mtmd_default_marker()
