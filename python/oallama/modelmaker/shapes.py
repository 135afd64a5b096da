"""The sizes a model can have: the published ones, a tiny and a small one per architecture, and overrides.

Invariant: every row width of a named shape is a multiple of 256, so that Q4_K needs no fallback type; but not those
that are published otherwise: 2880 of gpt-oss-20b, parts of a head in deepseek2, 1408 and 10944 of DeepSeek-V2-Lite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..errors import OallamaError


@dataclass(frozen=True)
class Shape:
    """The hyper-parameters of one model; names as in llama.cpp's hparams, counts in elements.

    head_dim is the width of a key (minicpm3, deepseek2: nope + rope). Zero means that the architecture has no such
    thing.
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
    n_layer_dense: int = 0  # first layers without experts
    n_expert_shared: int = 0  # beside the experts a feed-forward as wide as so many of them, for all tokens
    expert_scale: float = 0.0  # of the chosen experts' weights
    sigmoid_router: bool = False  # experts by sigmoid and bias, with weights that sum to expert_scale
    yarn: tuple[float, int, float] | None = None  # factor, trained context, log multiplier
    full_attn_interval: int = 0  # every so many layers one with attention, the others recurrent (gated delta net)
    ssm_dt_rank: int = 0  # heads of a recurrent layer's values
    ssm_n_group: int = 0  # heads of its keys
    ssm_d_state: int = 0  # width of these heads

    @property
    def n_ff_shared(self) -> int:
        """Width of the feed-forward that all tokens use beside the experts."""
        return self.n_expert_shared * self.n_ff_expert


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
    return replace(base, sliding_window=128, yarn=(32.0, 4096, 0.0))


def _deepseek2(n_layer, n_embd, n_ff, n_head, widths, ranks, experts, n_vocab):
    """widths: of a head's part without RoPE, with RoPE, and of its values. ranks: of queries, of keys and values."""
    nope, rope, value = widths
    base = Shape("deepseek2", n_layer, n_embd, n_ff, n_head, 1, nope + rope, n_vocab, 202752, 1e6, 1e-5)
    base = replace(base, rope_dim=rope, v_head_dim=value, q_lora_rank=ranks[0], kv_lora_rank=ranks[1], n_layer_dense=1)
    n_expert, n_expert_used, n_ff_expert, n_expert_shared = experts
    base = replace(base, n_expert=n_expert, n_expert_used=n_expert_used, n_ff_expert=n_ff_expert)
    return replace(base, n_expert_shared=n_expert_shared, expert_scale=1.8, sigmoid_router=True)


def _deepseek_v2_lite():
    base = _deepseek2(27, 2048, 10944, 16, (128, 64, 128), (0, 512), (64, 6, 1408, 2), 102400)
    base = replace(base, n_ctx_train=163840, rope_base=10000.0, norm_eps=1e-6, yarn=(40.0, 4096, 0.0707))
    return replace(base, expert_scale=1.0, sigmoid_router=False)


def _qwen35moe(n_layer, n_embd, n_head, n_head_kv, head_dim, recurrent, experts, n_vocab):
    """recurrent: heads of values, heads of keys, their width. experts: how many, used, width."""
    n_expert, n_expert_used, n_ff_expert = experts
    base = Shape("qwen35moe", n_layer, n_embd, n_ff_expert, n_head, n_head_kv, head_dim, n_vocab, 262144, 1e7, 1e-6)
    base = replace(base, n_expert=n_expert, n_expert_used=n_expert_used, n_ff_expert=n_ff_expert, n_expert_shared=1)
    n_values, n_keys, width = recurrent
    base = replace(base, ssm_dt_rank=n_values, ssm_n_group=n_keys, ssm_d_state=width)
    return replace(base, full_attn_interval=4, rope_dim=64)


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
    "deepseek2": {  # without MTP heads
        "tiny": _deepseek2(3, 256, 512, 4, (64, 32, 64), (256, 256), (16, 4, 256, 1), 4096),
        "small": _deepseek2(12, 768, 2048, 12, (64, 32, 64), (256, 256), (32, 4, 256, 1), 32768),
        # huggingface.co/zai-org/GLM-4.7-Flash, config.json
        "glm-4.7-flash": _deepseek2(47, 2048, 10240, 20, (192, 64, 256), (768, 512), (64, 4, 1536, 1), 154880),
        # huggingface.co/deepseek-ai/DeepSeek-V2-Lite, config.json
        "deepseek-v2-lite": _deepseek_v2_lite(),
    },
    "qwen35moe": {  # without MTP heads and vision
        "tiny": replace(_qwen35moe(2, 256, 4, 2, 64, (4, 2, 64), (16, 4, 256), 4096), full_attn_interval=2),
        "small": _qwen35moe(12, 768, 12, 4, 64, (12, 4, 64), (32, 4, 256), 32768),
        # huggingface.co/Qwen/Qwen3.6-35B-A3B, model card and config.json
        "qwen3.6-35b-a3b": _qwen35moe(40, 2048, 16, 2, 256, (32, 16, 128), (256, 8, 512), 248320),
    },
}
ARCHITECTURES = tuple(SHAPES)

_COMMON = ("n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "n_vocab", "n_ctx_train")
_EXPERTS = ("n_expert", "n_expert_used", "n_ff_expert")


def _without(name: str) -> tuple[str, ...]:
    return tuple(other for other in _COMMON if other != name)


OVERRIDES: dict[str, tuple[str, ...]] = {
    "llama": _COMMON,
    "minicpm3": (*_COMMON, "q_lora_rank", "kv_lora_rank"),
    "qwen2": _COMMON,
    "qwen3moe": (*_COMMON, "head_dim", *_EXPERTS),
    "gpt-oss": (*_COMMON, "head_dim", *_EXPERTS, "sliding_window"),
    "deepseek2": (*_without("n_head_kv"), "q_lora_rank", "kv_lora_rank", *_EXPERTS),
    "qwen35moe": (*_without("n_ff"), "head_dim", *_EXPERTS, "full_attn_interval"),
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
    if shape.n_expert and shape.n_layer <= shape.n_layer_dense:
        raise OallamaError(f"n_layer ({shape.n_layer}) must exceed {shape.n_layer_dense}: the first has no experts")
    if shape.n_layer < shape.full_attn_interval:
        raise OallamaError(
            f"n_layer ({shape.n_layer}) must be at least full_attn_interval ({shape.full_attn_interval}), "
            "or no layer has attention"
        )
    if shape.arch == "deepseek2" and shape.q_lora_rank and _is_lite_to_llama_cpp(shape):
        raise OallamaError(
            f"llama.cpp takes a deepseek2 of {shape.n_layer} layers for one without q_lora_rank: choose another n_layer"
        )
    if shape.n_layer > 512:
        raise OallamaError(f"n_layer ({shape.n_layer}) must not exceed 512, the limit of llama.cpp")


def _is_lite_to_llama_cpp(shape: Shape) -> bool:
    return shape.n_layer in (26, 27) or (shape.n_layer == 48 and shape.n_vocab == 128256)
