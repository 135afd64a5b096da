"""What Linux says of this host's processor; refuses x86-64 ones on which numpy's wheels would end the process."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from oallama.base.proc_file import fields
from oallama.errors import OallamaError

CPUINFO = Path("/proc/cpuinfo")
_NEEDED = "sse4_2"  # x86-64-v2: Intel from 2008 on, AMD from 2011 on
# Flags of x86-64 that decide which kernels run.
_SETS = ("avx", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


@dataclass(frozen=True)
class Processor:
    """A processor; model numbers and instruction sets are empty where Linux does not tell them."""

    name: str
    numbers: str = ""  # family and model: virtual machines give one name to several generations
    sets: tuple[str, ...] = ()

    def __str__(self) -> str:
        details = ", ".join(text for text in (self.numbers, " ".join(self.sets)) if text)
        return f"{self.name} ({details})" if details else self.name


def processor(cpuinfo: Path = CPUINFO) -> Processor:
    """The first processor of this host."""
    found = fields(cpuinfo)
    name = found.get("model name") or platform.processor() or platform.machine() or "unknown"
    numbers = [f"{word} {found[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in found]
    flags = found.get("flags", "").split()
    return Processor(name, " ".join(numbers), tuple(each for each in _SETS if each in flags))


def refuse_old_processor(cpuinfo: Path = CPUINFO) -> None:
    """Raise OallamaError on an x86-64 processor without SSE4.2; what cannot be read is taken for new enough."""
    if os.uname().machine != "x86_64":
        return
    flags = fields(cpuinfo).get("flags")
    if flags and _NEEDED not in flags.split():
        raise OallamaError(
            "this processor has no SSE4.2, which numpy's wheels need; build numpy for it: "
            "pip install --force-reinstall --no-binary numpy numpy"
        )
