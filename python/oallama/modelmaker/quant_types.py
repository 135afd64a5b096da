"""Which ggml type each tensor gets in a file of a given type: llama.cpp's rules, for the architectures made here.

Source: src/llama-quant.cpp (tensor_allows_quantization, llama_tensor_get_type_impl, tensor_type_fallback) without an
importance matrix. tests/engine/test_modelmaker.py compares the result with the real llama-quantize.
"""

from __future__ import annotations

from collections.abc import Sequence

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from .shapes import Shape
from .tensors import TensorSpec

_T = GGMLQuantizationType

# file type -> (general.file_type, type of a tensor that no rule names)
FILE_TYPES: dict[str, tuple[int, GGMLQuantizationType]] = {
    "F16": (int(LlamaFileType.MOSTLY_F16), _T.F16),
    "Q8_0": (int(LlamaFileType.MOSTLY_Q8_0), _T.Q8_0),
    "Q4_0": (int(LlamaFileType.MOSTLY_Q4_0), _T.Q4_0),
    "MXFP4": (int(LlamaFileType.MOSTLY_MXFP4_MOE), _T.MXFP4),
    "Q4_K_M": (int(LlamaFileType.MOSTLY_Q4_K_M), _T.Q4_K),
}
_FALLBACK = {_T.Q4_K: _T.Q5_0, _T.Q5_K: _T.Q5_1, _T.Q6_K: _T.Q8_0}


def choose_types(shape: Shape, specs: Sequence[TensorSpec], file_type: str) -> list[GGMLQuantizationType]:
    """Return the type of every tensor of specs in a file of type file_type (a key of FILE_TYPES)."""
    default = FILE_TYPES[file_type][1]
    types = []
    for spec in specs:
        if spec.is_float32:
            types.append(_T.F32)
        elif default == _T.F16:
            types.append(_T.F16)
        elif default == _T.MXFP4:  # experts alone
            types.append(_fit_width(_T.MXFP4 if len(spec.ne) == 3 else _T.Q8_0, spec.ne[0]))
        else:
            types.append(_fit_width(_rule(shape, spec, default, file_type == "Q4_K_M"), spec.ne[0]))
    return types


def n_bytes(spec: TensorSpec, ggml_type: GGMLQuantizationType) -> int:
    """Return the size of a tensor's data in ggml_type, without padding."""
    block, size = GGML_QUANT_SIZES[ggml_type]
    return spec.n_rows * spec.ne[0] // block * size


def _rule(shape: Shape, spec: TensorSpec, default: GGMLQuantizationType, k_m: bool) -> GGMLQuantizationType:
    name, eight_experts = spec.name, shape.n_expert == 8
    if spec.logits:  # output.weight, or token_embd.weight where it is both
        return _T.Q6_K if default != _T.Q8_0 and spec.ne[0] % _block(default) == 0 else _T.Q8_0
    if name.endswith(("attn_v.weight", "attn_kv_b.weight", "attn_qkv.weight")):
        if eight_experts:
            return _T.Q8_0
        if k_m and _more_bits(shape, name):
            return _T.Q6_K
        if k_m and _is_70b(shape):
            return _T.Q5_K
    elif "attn_k.weight" in name:
        return _T.Q8_0 if eight_experts else default
    elif "attn_output.weight" in name:
        return _T.Q5_K if k_m and eight_experts else default
    elif "ffn_down" in name and k_m and _more_bits(shape, name):
        return _T.Q6_K
    return default


def _more_bits(shape: Shape, name: str) -> bool:
    layer, n = int(name.split(".")[1]), shape.n_layer
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2


def _is_70b(shape: Shape) -> bool:
    # llama.cpp goes by the number of layers alone, and gives qwen2 the bits that were meant for LLaMA-2-70B, too.
    return shape.n_layer == 80 and (
        shape.arch == "qwen2" or (shape.arch == "llama" and shape.n_head != shape.n_head_kv)
    )


def _fit_width(wanted: GGMLQuantizationType, width: int) -> GGMLQuantizationType:
    if width % _block(wanted) == 0:
        return wanted
    fallback = _FALLBACK.get(wanted, wanted)
    return fallback if width % _block(fallback) == 0 else _T.F16


def _block(ggml_type: GGMLQuantizationType) -> int:
    return GGML_QUANT_SIZES[ggml_type][0]
