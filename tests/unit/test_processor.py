"""Processors that are too old for numpy's wheels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oallama.base.processor import refuse_old_processor
from oallama.errors import OallamaError


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other processors have other flags")
def test_only_a_processor_that_is_known_to_be_old_is_refused(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    refuse_old_processor(cpuinfo)  # there is none
    cpuinfo.write_text("processor\t: 0\nmodel name\t: x\n")
    refuse_old_processor(cpuinfo)
    cpuinfo.write_text("flags\t\t: fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt\n")
    refuse_old_processor(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse sse2 ssse3 sse4_1\n")
    with pytest.raises(OallamaError, match=r"no SSE4\.2, .*: pip install --force-reinstall --no-binary numpy"):
        refuse_old_processor(cpuinfo)
