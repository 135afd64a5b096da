"""Large blocks of the host's memory are in huge pages, where Linux gives them; OALLAMA_HUGE_PAGES=0 asks for none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
KIB_OF_A_ROW = 2  # of the tiny model's caches
# Prints the process's blocks of memory once the caches are there.
LOAD = """
import sys
from oallama import Llama
llm = Llama(sys.argv[1], n_ctx=int(sys.argv[2]), n_gpu_layers=0, verbose=False)
print(open("/proc/self/smaps").read())
"""

pytestmark = pytest.mark.skipif(not SETTING.exists(), reason="this kernel has no transparent huge pages")


def advised_kib(model: Path, n_ctx: int, **env: str) -> int:
    """KiB of blocks that the process asked huge pages for."""
    command = [sys.executable, "-c", LOAD, str(model), str(n_ctx)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    blocks = re.findall(r"^Size: +(\d+) kB\n(?:.*\n)*?VmFlags: (.*)$", done.stdout, re.MULTILINE)
    assert len(blocks) > 50
    return sum(int(size) for size, flags in blocks if "hg" in flags.split())


def test_caches_are_in_huge_pages(tiny: Callable[..., Path]) -> None:
    """numpy asks for some, too, for the logits."""
    model, rows = tiny("llama"), 16640
    cache_kib = KIB_OF_A_ROW * rows
    with_ours, without = advised_kib(model, rows), advised_kib(model, rows, OALLAMA_HUGE_PAGES="0")
    assert with_ours - without >= cache_kib > 16 << 10
