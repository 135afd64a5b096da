"""Refuses x86-64 processors on which numpy's wheels would end the process without a word."""

from __future__ import annotations

import os
from pathlib import Path

from oallama.errors import OallamaError

_NEEDED = "sse4_2"  # x86-64-v2: Intel from 2008 on, AMD from 2011 on


def refuse_old_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise OallamaError on an x86-64 processor without SSE4.2; what cannot be read is taken for new enough."""
    if os.uname().machine != "x86_64":
        return
    try:
        with cpuinfo.open() as lines:  # only as far as the first processor
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return
    if flags and _NEEDED not in flags.split():
        raise OallamaError(
            "this processor has no SSE4.2, which numpy's wheels need; build numpy for it: "
            "pip install --force-reinstall --no-binary numpy numpy"
        )
