"""The ggml types a weight can be stored in, and the bytes it then takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import OallamaError

# ggml's names, as operator graphs and profiles have them, of all types that llama.cpp's quantiser can write.
_NAMES = (
    *("f32", "f16", "bf16", "q8_0", "q6_K", "q5_K", "q5_1", "q5_0", "q4_K", "q4_1", "q4_0", "iq4_nl", "iq4_xs"),
    *("mxfp4", "q3_K", "iq3_s", "iq3_xxs", "q2_K", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq2_0", "tq1_0"),
)
TYPES = {name: GGMLQuantizationType[name.upper()] for name in _NAMES}
FLOATS = ("f32", "f16", "bf16")
# Without an importance matrix the result is garbage (llama-quant.cpp, tensor_requires_imatrix).
NEED_IMATRIX = frozenset({"iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s"})
_BY_LOWER = {name.lower(): name for name in TYPES}


def type_named(text: str) -> str:
    """ggml's own spelling of a type, whatever the case; raises OallamaError naming the types there are."""
    try:
        return _BY_LOWER[text.lower()]
    except KeyError:
        raise OallamaError(f"unknown type {text!r}; expected one of {', '.join(TYPES)}") from None


def bits_per_weight(type: str) -> float:
    """Bits of one value, scales included: 4.5 for q4_0."""
    block, size = GGML_QUANT_SIZES[TYPES[type]]
    return 8 * size / block


def fits(type: str, ne: Sequence[int]) -> bool:
    """Whether rows of ne[0] values are whole blocks."""
    return ne[0] % GGML_QUANT_SIZES[TYPES[type]][0] == 0


def n_bytes(type: str, ne: Sequence[int]) -> int:
    """Bytes of a tensor of shape `ne` without padding; rows must be whole blocks."""
    block, size = GGML_QUANT_SIZES[TYPES[type]]
    return math.prod(ne) // block * size
