"""What Linux says of a processor, and processors that are too old for numpy's wheels."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from oallama.base.processor import processor, refuse_old_processor
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


ZEN4 = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu avx avx2 avx512f\n"
ZEN3 = ZEN4.replace(" 17", " 1").replace(" avx512f", "")


def test_generations_of_one_name_differ(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(ZEN4 + "\n" + ZEN3)  # all processors of a host are alike: the first one counts
    assert str(processor(cpuinfo)) == "AMD EPYC (family 25 model 17, avx avx2 avx512f)"
    cpuinfo.write_text(ZEN3)
    assert str(processor(cpuinfo)) == "AMD EPYC (family 25 model 1, avx avx2)"


def test_a_processor_without_details_has_a_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 243.75\n")  # as on aarch64
    assert str(processor(cpuinfo)) == (platform.processor() or platform.machine())
