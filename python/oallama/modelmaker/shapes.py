"""The sizes a model can have: the published ones, a tiny and a small one per architecture, and overrides.

Invariant: every row width of a named shape is a multiple of 256, so that Q4_K needs no fallback type; but not those of
gpt-oss-20b, 2880, which is published as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OallamaError


@dataclass(frozen=True)
class Shape:
    """The hyper-parameters of one model; names as in llama.cpp's hparams, counts in elements.

    head_dim is the width of a key (minicpm3: nope + rope). Zero means that the architecture has no such thing.
    """

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    rope_base: float
    norm_eps: float
    tied: bool = False  # no output.weight: the output matrix is token_embd.weight
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0
    v_head_dim: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_expert: int = 0
    sliding_window: int = 0  # tokens that every other layer attends to, from the first one


def _llama(n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab):
    return Shape("llama", n_layer, n_embd, n_ff, n_head, n_head_kv, n_embd // n_head, n_vocab, 8192, 500000.0, 1e-5)


def _minicpm3(n_layer, n_embd, n_ff, n_head, q_lora_rank, kv_lora_rank, n_vocab):
    base = Shape("minicpm3", n_layer, n_embd, n_ff, n_head, n_head, 96, n_vocab, 32768, 10000.0, 1e-5, tied=True)
    return replace(base, q_lora_rank=q_lora_rank, kv_lora_rank=kv_lora_rank, rope_dim=32, v_head_dim=64)


def _qwen2(n_layer, n_embd, n_ff, n_head, n_head_kv, n_vocab):
    return Shape("qwen2", n_layer, n_embd, n_ff, n_head, n_head_kv, n_embd // n_head, n_vocab, 40960, 1e6, 1e-5)


def _qwen3moe(n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim, n_expert, n_expert_used, n_ff_expert, n_vocab):
    base = Shape("qwen3moe", n_layer, n_embd, n_ff, n_head, n_head_kv, head_dim, n_vocab, 40960, 1e6, 1e-6)
    return replace(base, n_expert=n_expert, n_expert_used=n_expert_used, n_ff_expert=n_ff_expert)


def _gpt_oss(n_layer, n_embd, n_head, n_head_kv, n_expert, n_expert_used, n_ff_expert, n_vocab):
    base = Shape("gpt-oss", n_layer, n_embd, n_ff_expert, n_head, n_head_kv, 64, n_vocab, 131072, 150000.0, 1e-5)
    base = replace(base, n_expert=n_expert, n_expert_used=n_expert_used, n_ff_expert=n_ff_expert)
    return replace(base, sliding_window=128)


SHAPES: dict[str, dict[str, Shape]] = {
    "llama": {
        "tiny": _llama(4, 256, 512, 4, 2, 4096),
        "small": _llama(12, 768, 2048, 12, 4, 32768),
        "llama3-8b": _llama(32, 4096, 14336, 32, 8, 128256),
    },
    "minicpm3": {
        "tiny": _minicpm3(4, 256, 512, 4, 256, 256, 4096),
        "small": _minicpm3(12, 1024, 2560, 16, 512, 256, 32768),
        "minicpm3-4b": _minicpm3(62, 2560, 6400, 40, 768, 256, 73448),
    },
    "qwen2": {
        "tiny": _qwen2(4, 256, 512, 4, 2, 4096),
        "small": _qwen2(12, 1024, 2816, 16, 4, 32768),
        "qwq-32b": _qwen2(64, 5120, 27648, 40, 8, 152064),
    },
    "qwen3moe": {
        "tiny": _qwen3moe(2, 256, 512, 4, 2, 64, 16, 4, 256, 4096),
        "small": _qwen3moe(12, 768, 2048, 12, 4, 64, 32, 4, 256, 32768),
        "qwen3-30b-a3b": _qwen3moe(48, 2048, 6144, 32, 4, 128, 128, 8, 768, 151936),
        "qwen3-235b-a22b": _qwen3moe(94, 4096, 12288, 64, 4, 128, 128, 8, 1536, 151936),
    },
    "gpt-oss": {
        "tiny": _gpt_oss(2, 256, 4, 2, 16, 4, 256, 4096),
        "small": _gpt_oss(12, 768, 12, 4, 32, 4, 256, 32768),
        "gpt-oss-20b": _gpt_oss(24, 2880, 64, 8, 32, 4, 2880, 201088),
    },
}
ARCHITECTURES = tuple(SHAPES)

_COMMON = ("n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "n_vocab", "n_ctx_train")
OVERRIDES: dict[str, tuple[str, ...]] = {
    "llama": _COMMON,
    "minicpm3": (*_COMMON, "q_lora_rank", "kv_lora_rank"),
    "qwen2": _COMMON,
    "qwen3moe": (*_COMMON, "head_dim", "n_expert", "n_expert_used", "n_ff_expert"),
    "gpt-oss": (*_COMMON, "head_dim", "n_expert", "n_expert_used", "n_ff_expert", "sliding_window"),
}


def resolve(arch: str | None, shape: str, overrides: Mapping[str, int] | None = None) -> Shape:
    """Return the named shape with the overrides applied and checked.

    Args:
        arch: one of ARCHITECTURES; None takes the architecture of a published shape, else "llama".
        shape: a name in SHAPES[arch].
        overrides: hyper-parameter -> positive integer; OVERRIDES[arch] lists the names.
    Raises:
        OallamaError: an unknown name, or numbers that do not fit each other.
    """
    if arch is None:
        owners = [name for name, shapes in SHAPES.items() if shape in shapes]
        arch = owners[0] if owners else "llama"
    if arch not in SHAPES:
        raise OallamaError(f"unknown architecture {arch!r}: choose one of {', '.join(SHAPES)}")
    if shape not in SHAPES[arch]:
        raise OallamaError(f"unknown shape {shape!r} for {arch}: choose one of {', '.join(SHAPES[arch])}")
    return _override(SHAPES[arch][shape], dict(overrides or {}))


def _override(base: Shape, values: dict[str, Any]) -> Shape:
    for name, value in values.items():
        if name not in OVERRIDES[base.arch]:
            raise OallamaError(f"{base.arch} has no override {name!r}: choose from {', '.join(OVERRIDES[base.arch])}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OallamaError(f"override {name}: expected a positive integer, got {value!r}")
    shape = replace(base, **values)
    if base.arch == "minicpm3" and "n_head_kv" not in values:
        shape = replace(shape, n_head_kv=shape.n_head)
    if base.arch in ("llama", "qwen2"):
        if shape.n_embd % shape.n_head:
            raise OallamaError(f"n_embd ({shape.n_embd}) must be a multiple of n_head ({shape.n_head})")
        shape = replace(shape, head_dim=shape.n_embd // shape.n_head)
    _check(shape)
    return shape


def _check(shape: Shape) -> None:
    if shape.arch == "minicpm3" and shape.n_head_kv != shape.n_head:
        raise OallamaError(f"minicpm3 needs n_head_kv = n_head, got {shape.n_head_kv} and {shape.n_head}")
    if shape.n_head % shape.n_head_kv:
        raise OallamaError(f"n_head ({shape.n_head}) must be a multiple of n_head_kv ({shape.n_head_kv})")
    if shape.head_dim % 2:
        raise OallamaError(f"the head dimension ({shape.head_dim}) must be even, for RoPE")
    if shape.n_expert_used > shape.n_expert:
        raise OallamaError(f"n_expert_used ({shape.n_expert_used}) must not exceed n_expert ({shape.n_expert})")
    if shape.n_layer > 512:
        raise OallamaError(f"n_layer ({shape.n_layer}) must not exceed 512, the limit of llama.cpp")
