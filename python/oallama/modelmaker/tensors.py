"""The tensors of each architecture, with the distribution of their random weights.

Names and dimensions follow llama.cpp's src/models/<arch>.cpp. The distributions keep a forward pass well-conditioned:
matrices have a standard deviation of 1/sqrt(fan-in), so every activation has a variance of about 1 at any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .shapes import Shape

LOGIT_STD = 3.0  # that of trained models; the two best of a vocabulary are then a good part of 1 apart
ROUTER_GAIN = 4.0  # peaked routing: a rounding error that swaps the last chosen expert then hardly shows
SSM_CONV = 4  # tokens that a recurrent layer's convolution sees
_BIAS_STD = 0.1
_CHOICE_STD = 0.01  # of biases that are added to chances
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
        """Whether the tensor stays F32 in every file type, as in convert_hf_to_gguf: vectors, routers, convolutions."""
        return len(self.ne) == 1 or self.name.endswith((".bias", "ffn_gate_inp.weight", "ssm_conv1d.weight"))

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
        specs += _layer(shape, layer)
    # With tied embeddings the input token would score highest, for ever; random signs take away that correlation.
    specs.append(TensorSpec("output_norm.weight", (shape.n_embd,), 0.02 * gain, mean=gain, random_sign=shape.tied))
    if not shape.tied:
        specs.append(_matrix("output.weight", shape.n_embd, shape.n_vocab, logits=True))
    return specs


def router_gain(shape: Shape) -> float:
    """Return the standard deviation of a router's results: softmax peaks, and sigmoid has no room for that."""
    return 1.0 if shape.sigmoid_router else ROUTER_GAIN


def _layer(shape: Shape, number: int) -> list[TensorSpec]:
    n_embd = shape.n_embd
    ffn_norm = "post_attention_norm.weight" if shape.arch in ("gpt-oss", "qwen35moe") else "ffn_norm.weight"
    specs = [_norm("attn_norm.weight", n_embd), *_mixer(shape, number), _norm(ffn_norm, n_embd)]
    specs += _mixture(shape) if shape.n_expert and number >= shape.n_layer_dense else _dense(shape)
    return [replace(spec, name=f"blk.{number}.{spec.name}") for spec in specs]


def _mixer(shape: Shape, number: int) -> list[TensorSpec]:
    if shape.full_attn_interval and (number + 1) % shape.full_attn_interval:
        return _delta_net(shape)
    return _mla(shape) if shape.kv_lora_rank else _gqa(shape)


def _dense(shape: Shape) -> list[TensorSpec]:
    return [
        _matrix("ffn_gate.weight", shape.n_embd, shape.n_ff),
        _matrix("ffn_up.weight", shape.n_embd, shape.n_ff),
        _matrix("ffn_down.weight", shape.n_ff, shape.n_embd),
    ]


def _mixture(shape: Shape) -> list[TensorSpec]:
    n_embd, n_ff, n_expert, n_shared = shape.n_embd, shape.n_ff_expert, shape.n_expert, shape.n_ff_shared
    specs = [
        TensorSpec("ffn_gate_inp.weight", (n_embd, n_expert), router_gain(shape) / math.sqrt(n_embd)),
        _matrix("ffn_gate_exps.weight", n_embd, n_ff, n_expert),
        _matrix("ffn_up_exps.weight", n_embd, n_ff, n_expert),
        _matrix("ffn_down_exps.weight", n_ff, n_embd, n_expert),
    ]
    if shape.arch == "gpt-oss":
        specs += [TensorSpec("ffn_gate_inp.bias", (n_expert,), _BIAS_STD)]
        widths = {"gate": n_ff, "up": n_ff, "down": n_embd}
        specs += [TensorSpec(f"ffn_{x}_exps.bias", (n, n_expert), _BIAS_STD) for x, n in widths.items()]
    if shape.sigmoid_router:
        specs += [TensorSpec("exp_probs_b.bias", (n_expert,), _CHOICE_STD)]
    if n_shared:
        specs += [_matrix(f"ffn_{x}_shexp.weight", n_embd, n_shared) for x in ("gate", "up")]
        specs += [_matrix("ffn_down_shexp.weight", n_shared, n_embd)]
    if shape.arch == "qwen35moe":
        specs += [_matrix("ffn_gate_inp_shexp.weight", n_embd)]
    return specs


def _gqa(shape: Shape) -> list[TensorSpec]:
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    n_in = 2 * n_q if shape.arch == "qwen35moe" else n_q  # each head's query and its gate
    specs = [_matrix(f"attn_{x}.weight", shape.n_embd, n) for x, n in (("q", n_in), ("k", n_kv), ("v", n_kv))]
    if shape.arch in ("qwen2", "gpt-oss"):
        specs += [TensorSpec(f"attn_{x}.bias", (n,), _BIAS_STD) for x, n in (("q", n_q), ("k", n_kv), ("v", n_kv))]
    if shape.arch in ("qwen3moe", "qwen35moe"):
        specs += [_norm("attn_q_norm.weight", shape.head_dim), _norm("attn_k_norm.weight", shape.head_dim)]
    if shape.arch == "gpt-oss":
        specs += [TensorSpec("attn_output.bias", (shape.n_embd,), _BIAS_STD)]
        specs += [TensorSpec("attn_sinks.weight", (shape.n_head,), 1.0)]
    return [*specs, _matrix("attn_output.weight", n_q, shape.n_embd)]


def _mla(shape: Shape) -> list[TensorSpec]:
    n_embd, rank, n_head = shape.n_embd, shape.kv_lora_rank, shape.n_head
    n_q, n_nope = n_head * shape.head_dim, shape.head_dim - shape.rope_dim
    if shape.q_lora_rank:
        specs = [
            _matrix("attn_q_a.weight", n_embd, shape.q_lora_rank),
            _norm("attn_q_a_norm.weight", shape.q_lora_rank),
            _matrix("attn_q_b.weight", shape.q_lora_rank, n_q),
        ]
    else:
        specs = [_matrix("attn_q.weight", n_embd, n_q)]
    specs += [_matrix("attn_kv_a_mqa.weight", n_embd, rank + shape.rope_dim), _norm("attn_kv_a_norm.weight", rank)]
    if shape.arch == "deepseek2":  # keys and values are computed from the cache's rows: one matrix for each head
        specs += [TensorSpec("attn_k_b.weight", (n_nope, rank, n_head), 1.0 / math.sqrt(rank))]
        specs += [_matrix("attn_v_b.weight", rank, shape.v_head_dim, n_head)]
    else:
        specs += [_matrix("attn_kv_b.weight", rank, n_head * (n_nope + shape.v_head_dim))]
    return [*specs, _matrix("attn_output.weight", n_head * shape.v_head_dim, n_embd)]


def _delta_net(shape: Shape) -> list[TensorSpec]:
    n_embd, n_heads, width = shape.n_embd, shape.ssm_dt_rank, shape.ssm_d_state
    n_values, n_qkv = n_heads * width, (n_heads + 2 * shape.ssm_n_group) * width
    return [
        _matrix("attn_qkv.weight", n_embd, n_qkv),
        _matrix("attn_gate.weight", n_embd, n_values),
        _matrix("ssm_conv1d.weight", SSM_CONV, n_qkv),
        TensorSpec("ssm_dt.bias", (n_heads,), _BIAS_STD),
        TensorSpec("ssm_a", (n_heads,), 0.02, mean=-0.2),  # a state keeps most of itself at each token
        _matrix("ssm_beta.weight", n_embd, n_heads),
        _matrix("ssm_alpha.weight", n_embd, n_heads),
        _norm("ssm_norm.weight", width),
        _matrix("ssm_out.weight", n_values, n_embd),
    ]


def _matrix(name: str, width: int, *rest: int, logits: bool = False) -> TensorSpec:
    return TensorSpec(name, (width, *rest), 1.0 / math.sqrt(width), logits=logits)


def _norm(name: str, width: int) -> TensorSpec:
    return TensorSpec(name, (width,), 0.02, mean=1.0)
