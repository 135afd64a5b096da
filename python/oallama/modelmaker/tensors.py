"""The tensors of each architecture, with the distribution of their random weights.

Names and dimensions follow llama.cpp's src/models/<arch>.cpp. The distributions keep a forward pass well-conditioned:
matrices have a standard deviation of 1/sqrt(fan-in), so every activation has a variance of about 1 at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .shapes import Shape

LOGIT_STD = 3.0  # that of trained models; the two best of a vocabulary are then a good part of 1 apart
ROUTER_GAIN = 4.0  # peaked routing: a rounding error that swaps the last chosen expert then hardly shows
_BIAS_STD = 0.1
# Published factors of MiniCPM3-4B; long and short are the same.
# fmt: off
_LONGROPE = (
    1.0591234, 1.1241891, 1.2596936, 1.5380380, 2.0939825, 3.1446935, 4.9379526, 7.5245420,
    10.475458, 13.062047, 14.855306, 15.906018, 16.461962, 16.740306, 16.875811, 16.940877,
)
# fmt: on


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: ggml dimensions (row width first) and how to fill it.

    std, mean: of normally distributed values; values: the literal content instead. random_sign: multiply by +-1.
    logits: the rows are scored against the hidden state, one row a token. zero_rows: of every matrix the first rows
    that are zero. rows: gives the content of rows start to stop, float32 [stop - start, ne[0]], instead of all this.
    """

    name: str
    ne: tuple[int, ...]
    std: float
    mean: float = 0.0
    random_sign: bool = False
    logits: bool = False
    values: tuple[float, ...] | None = None
    zero_rows: int = 0
    rows: Callable[[int, int], NDArray[np.float32]] | None = None

    @property
    def is_float32(self) -> bool:
        """Whether the tensor stays F32 in every file type: vectors, biases and the router, as in convert_hf_to_gguf."""
        return len(self.ne) == 1 or self.name.endswith((".bias", "ffn_gate_inp.weight"))

    @property
    def n_rows(self) -> int:
        """Rows of ne[0] elements, those of all experts counted."""
        return math.prod(self.ne[1:])


def tensors_of(shape: Shape) -> list[TensorSpec]:
    """List the tensors of a model in the order in which they are written."""
    embd_std, logit_scale = 1.0, 1.0
    if shape.arch == "minicpm3":  # its graph multiplies embeddings by 12 and the last hidden state by 256/n_embd
        embd_std, logit_scale = 1.0 / 12.0, 256.0 / shape.n_embd
    out_std = embd_std if shape.tied else 1.0 / math.sqrt(shape.n_embd)
    gain = LOGIT_STD / (out_std * math.sqrt(shape.n_embd) * logit_scale)

    specs = [TensorSpec("token_embd.weight", (shape.n_embd, shape.n_vocab), embd_std, logits=shape.tied)]
    if shape.arch == "minicpm3":
        factors = tuple(_LONGROPE[i % len(_LONGROPE)] for i in range(shape.rope_dim // 2))
        for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
            specs.append(TensorSpec(name, (len(factors),), 0.0, values=factors))
    for layer in range(shape.n_layer):
        specs += _layer(shape, f"blk.{layer}.")
    # With tied embeddings the input token would score highest, for ever; random signs take away that correlation.
    specs.append(TensorSpec("output_norm.weight", (shape.n_embd,), 0.02 * gain, mean=gain, random_sign=shape.tied))
    if not shape.tied:
        specs.append(_matrix("output.weight", shape.n_embd, shape.n_vocab, logits=True))
    return specs


def _layer(shape: Shape, prefix: str) -> list[TensorSpec]:
    n_embd = shape.n_embd
    attention = _mla(shape) if shape.q_lora_rank else _gqa(shape)
    ffn_norm = "post_attention_norm.weight" if shape.arch == "gpt-oss" else "ffn_norm.weight"
    specs = [_norm("attn_norm.weight", n_embd), *attention, _norm(ffn_norm, n_embd)]
    if shape.n_expert:
        n_ff, n_expert = shape.n_ff_expert, shape.n_expert
        specs += [
            TensorSpec("ffn_gate_inp.weight", (n_embd, n_expert), ROUTER_GAIN / math.sqrt(n_embd)),
            _matrix("ffn_gate_exps.weight", n_embd, n_ff, n_expert),
            _matrix("ffn_up_exps.weight", n_embd, n_ff, n_expert),
            _matrix("ffn_down_exps.weight", n_ff, n_embd, n_expert),
        ]
        if shape.arch == "gpt-oss":
            specs += [TensorSpec("ffn_gate_inp.bias", (n_expert,), _BIAS_STD)]
            widths = {"gate": n_ff, "up": n_ff, "down": n_embd}
            specs += [TensorSpec(f"ffn_{x}_exps.bias", (n, n_expert), _BIAS_STD) for x, n in widths.items()]
    else:
        specs += [
            _matrix("ffn_gate.weight", n_embd, shape.n_ff),
            _matrix("ffn_up.weight", n_embd, shape.n_ff),
            _matrix("ffn_down.weight", shape.n_ff, n_embd),
        ]
    return [TensorSpec(prefix + s.name, s.ne, s.std, s.mean) for s in specs]


def _gqa(shape: Shape) -> list[TensorSpec]:
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    specs = [_matrix(f"attn_{x}.weight", shape.n_embd, n) for x, n in (("q", n_q), ("k", n_kv), ("v", n_kv))]
    if shape.arch in ("qwen2", "gpt-oss"):
        specs += [TensorSpec(f"attn_{x}.bias", (n,), _BIAS_STD) for x, n in (("q", n_q), ("k", n_kv), ("v", n_kv))]
    if shape.arch == "qwen3moe":
        specs += [_norm("attn_q_norm.weight", shape.head_dim), _norm("attn_k_norm.weight", shape.head_dim)]
    if shape.arch == "gpt-oss":
        specs += [TensorSpec("attn_output.bias", (shape.n_embd,), _BIAS_STD)]
        specs += [TensorSpec("attn_sinks.weight", (shape.n_head,), 1.0)]
    return [*specs, _matrix("attn_output.weight", n_q, shape.n_embd)]


def _mla(shape: Shape) -> list[TensorSpec]:
    n_nope = shape.head_dim - shape.rope_dim
    return [
        _matrix("attn_q_a.weight", shape.n_embd, shape.q_lora_rank),
        _norm("attn_q_a_norm.weight", shape.q_lora_rank),
        _matrix("attn_q_b.weight", shape.q_lora_rank, shape.n_head * shape.head_dim),
        _matrix("attn_kv_a_mqa.weight", shape.n_embd, shape.kv_lora_rank + shape.rope_dim),
        _norm("attn_kv_a_norm.weight", shape.kv_lora_rank),
        _matrix("attn_kv_b.weight", shape.kv_lora_rank, shape.n_head * (n_nope + shape.v_head_dim)),
        _matrix("attn_output.weight", shape.n_head * shape.v_head_dim, shape.n_embd),
    ]


def _matrix(name: str, width: int, *rest: int, logits: bool = False) -> TensorSpec:
    return TensorSpec(name, (width, *rest), 1.0 / math.sqrt(width), logits=logits)


def _norm(name: str, width: int) -> TensorSpec:
    return TensorSpec(name, (width,), 0.02, mean=1.0)
