"""What a user may write as a memory budget, and what it means in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation

from ..errors import OallamaError

# "K" to "T" alone are binary, as in `ls -h` and Docker; "KB" to "TB" are decimal, as on the boxes of drives and cards.
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_FORM = re.compile(r"^\s*([+-]?[\d.]+)\s*([KMGT]?)(I?B?)\s*$", re.IGNORECASE)
_SHARE = re.compile(r"^\s*([+-]?[\d.]+)\s*%\s*$")
# What stays free of a GPU under the budget "auto": drivers and libraries take memory that no dry run knows (kernels
# loaded at their first use, cuBLAS's workspace, instances of CUDA graphs). llama.cpp's --fit keeps 1 GiB.
RESERVE_BYTES, RESERVE_SHARE = 1 << 30, 0.05
AUTO = "auto"  # what is free
_EXPECTED = 'expected bytes, "8GiB", "8GB", "512MiB", "1.5G", "75%" (of the weights) or "auto"'


@dataclass(frozen=True)
class Budget:
    """Device memory a plan may use.

    Exactly one limit is set. `bytes_total` bounds weights + KV cache + compute buffers together. `weights_bytes` bounds
    the weights alone, KV cache and compute buffers come on top: the paper's "75 % of the weights on the GPU".
    `text` is what the user wrote. `margin`: bytes of the device's free memory that "auto" leaves free.
    """

    bytes_total: int | None
    weights_bytes: int | None
    text: str
    margin: int = 0

    @property
    def limit(self) -> int:
        """The one limit that is set, in bytes."""
        return self.bytes_total if self.bytes_total is not None else self.weights_bytes or 0

    @property
    def is_auto(self) -> bool:
        """Whether it stands for the free memory of the device less the margin."""
        return self.text == AUTO

    def less(self, reserve: int) -> Budget:
        """What is left when others hold `reserve` bytes of it; a limit of the weights alone stays.

        Raises OallamaError when nothing is left, and for negative bytes.
        """
        if reserve < 0:
            raise OallamaError(f"reserved device memory is {reserve} bytes; expected 0 or more")
        if not reserve or self.bytes_total is None:
            return self
        if reserve >= self.bytes_total:
            raise OallamaError(
                f"the budget {self.text} is taken by the {format_bytes(reserve)} reserved for others; raise the budget"
            )
        text = self.text if self.is_auto else f"{self.text} less {format_bytes(reserve)}"
        return replace(self, bytes_total=self.bytes_total - reserve, text=text)


def gpu_reserve(total_bytes: int) -> int:
    """Bytes of a GPU with `total_bytes` of memory that a plan for all of its free memory leaves alone.

    >>> gpu_reserve(24 << 30) / 2**30
    1.2
    """
    return max(RESERVE_BYTES, int(RESERVE_SHARE * total_bytes))


def parse_margin(value: str | int) -> int:
    """Bytes that the budget "auto" leaves free: an int, or a text such as "512MiB" or "0".

    Raises OallamaError for what is negative or not understood.
    """
    nbytes = _bytes(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
    if nbytes is None or nbytes < 0:
        raise OallamaError(f'cannot read the margin {value!r}: expected bytes, "512MiB", "1.5G" or "0"')
    return nbytes


def parse_budget(value: str | int | float, *, weights_bytes: int, free_bytes: int, margin: int = 0) -> Budget:
    """Turn a user's budget into a limit in bytes.

    An int or a whole float is bytes. Units: KiB/MiB/GiB/TiB and bare K/M/G/T are binary, KB/MB/GB/TB decimal, case
    does not matter; a bare number in a text is bytes. "75%" limits the weights to that share of `weights_bytes` (100%
    at most). "auto" is `free_bytes`, the free memory of the device, less `margin`, which other budgets ignore.

    Raises OallamaError for a budget that is zero, negative or not understood.

    >>> parse_budget("8GiB", weights_bytes=0, free_bytes=0).bytes_total
    8589934592
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise OallamaError(f"cannot read the memory budget {value!r}: {_EXPECTED}")
    text = str(value).strip()
    if text.lower() == AUTO:
        if free_bytes <= 0:
            raise OallamaError(
                'memory budget "auto": the device reports no free memory; give bytes, for example "8GiB"'
            )
        if margin >= free_bytes:
            raise OallamaError(
                f'memory budget "auto": the device has {format_bytes(free_bytes)} free, and {format_bytes(margin)} are '
                "to stay free; set another margin (--margin), or give a budget in bytes"
            )
        return Budget(free_bytes - margin, None, AUTO, margin)
    if share := _SHARE.match(text):
        percent = _number(share[1], value)
        if not 0 < percent <= 100:
            raise OallamaError(f"memory budget {value!r} must be above 0% and at most 100% of the weights")
        return Budget(None, int(percent * weights_bytes / 100), text)
    if isinstance(value, float):
        nbytes = _whole(value)
    elif (found := _bytes(value)) is None:
        raise OallamaError(f"cannot read the memory budget {value!r}: {_EXPECTED}")
    else:
        nbytes = found
    if nbytes <= 0:
        raise OallamaError(f"memory budget {value!r} must be at least one byte; to use no device take planner='cpu'")
    return Budget(nbytes, None, text)


def format_bytes(nbytes: int) -> str:
    """Bytes for people, binary units: "16.0 GiB", "512.0 MiB", "12 B"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _bytes(value: str | int) -> int | None:
    """Bytes of "8GiB", "512MB", "1.5G" or 77; None for what is no size."""
    match = _FORM.match(str(value).strip())
    if not match:
        return None
    prefix, suffix = match[2].upper(), match[3].upper()
    if suffix == "I" or (suffix == "IB" and not prefix):
        return None
    scale = (_DECIMAL if suffix == "B" else _BINARY)[prefix] if prefix else 1
    try:
        return int(Decimal(match[1]) * scale)
    except InvalidOperation:
        return None


def _number(text: str, value: str | int | float) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise OallamaError(f"cannot read the memory budget {value!r}: {_EXPECTED}") from None


def _whole(value: float) -> int:
    """A float counts bytes, so 0.75 is a mistake for "75%" and not a fraction of a byte."""
    if value != value or value in (float("inf"), float("-inf")) or (value > 0 and value != int(value)):
        raise OallamaError(f'memory budget {value!r} is not whole bytes; a share of the weights is written "75%"')
    return int(value)
