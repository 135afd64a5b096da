"""How a model is loaded: settings as a person would say them, and llama.cpp's parameter structures made from them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from oallama.engine import device_list, native, runtime
from oallama.errors import OallamaError

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30, "iq4_nl": 20}
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
MTP_CONTEXT = 1  # LLAMA_CONTEXT_TYPE_MTP
# llama.cpp's --load-mode, by Settings.use_mmap.
LOAD_MODES = {None: "auto", True: "mmap", False: "none"}


@dataclass(frozen=True)
class Settings:
    """How a model is loaded and its context made; the defaults are llama.cpp's.

    Attributes:
        n_ctx: tokens of context; 0 takes the model's own.
        n_batch: most tokens of one decode call.
        n_ubatch: most tokens of one graph (micro-batch).
        n_seq_max: parallel sequences.
        type_k, type_v: types of the KV cache, a key of KV_TYPES.
        flash_attn: "auto", "on" or "off".
        attention: whose kernels compute fused attention on CPUs; the plan's backend map says it to the engine.
        devices: names of the accelerators to use, in order; None takes all of them, () none.
        n_gpu_layers: llama.cpp's -ngl; -1 all. Without effect on layers and tensors a backend map lists.
        tensor_split: llama.cpp's -ts, the shares of the layers each device takes; () deals by free memory.
        override_tensor: llama.cpp's -ot as (pattern, device name), the first match wins.
        n_outputs_max: most rows of one micro-batch with logits; 0 is n_batch.
        use_mmap: None leaves it to llama.cpp (mapped unless a device cannot).
        n_threads: 0 takes llama.cpp's default.
        heads: of MTP heads in the file (multi-token prediction): "" leaves them there; "loaded" loads them with the
            model; "fed" is the model's own context, without their weights, while they guess; "run" loads them, and the
            context is their own.
        n_rs_seq: earlier recurrent states kept of each sequence, which a wrong guess is taken back to.
    """

    n_ctx: int = 4096
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    attention: str = "ggml"
    devices: tuple[str, ...] | None = None
    n_gpu_layers: int = -1
    tensor_split: tuple[float, ...] = ()
    override_tensor: tuple[tuple[str, str], ...] = ()
    n_outputs_max: int = 0
    offload_kqv: bool = True
    op_offload: bool = True
    use_extra_bufts: bool = True
    use_mmap: bool | None = None
    n_threads: int = 0
    heads: Literal["", "loaded", "fed", "run"] = ""
    n_rs_seq: int = 0

    @property
    def heads_guess(self) -> bool:
        """Whether MTP heads guess beside the context, or in it."""
        return self.heads in ("fed", "run")


@dataclass
class Params:
    """llama.cpp's two parameter structures, kept alive together with what they point to."""

    model: Any
    context: Any
    _keep: list[Any] = field(default_factory=list)

    @property
    def addresses(self) -> tuple[int, int]:
        return ctypes.addressof(self.model), ctypes.addressof(self.context)


class _TensorOverride(ctypes.Structure):
    """`llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def override_array(overrides: Sequence[tuple[str, str]]) -> Any:
    """`llama_model_tensor_buft_override[]` that ends with an empty entry, for `tensor_buft_overrides`."""
    entries = [
        _TensorOverride(pattern.encode(), native.core().buffer_type_address(device_list.device(name).name))
        for pattern, name in overrides
    ]
    return (_TensorOverride * (len(entries) + 1))(*entries)


def make_params(settings: Settings) -> Params:
    """Build the structures.

    Raises:
        OallamaError: for a name that is not among the choices, or a tensor_split with too many entries.
    """
    llama_cpp = runtime.llama_cpp()
    model, context = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    params = Params(model, context)
    model.n_gpu_layers = settings.n_gpu_layers
    model.use_extra_bufts = settings.use_extra_bufts
    model.load_mtp = settings.heads in ("loaded", "run")
    if settings.use_mmap is not None:
        model.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if settings.use_mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
    if settings.devices is not None:
        array = device_list.device_array(settings.devices)
        params._keep.append(array)
        model.devices = ctypes.addressof(array)
    if settings.tensor_split:
        most = llama_cpp.llama_max_devices()
        if len(settings.tensor_split) > most:
            raise OallamaError(f"tensor_split has {len(settings.tensor_split)} entries; llama.cpp takes {most} devices")
        model.tensor_split = (ctypes.c_float * most)(*settings.tensor_split)
    if settings.override_tensor:
        overrides = override_array(settings.override_tensor)
        params._keep.append(overrides)
        model.tensor_buft_overrides = ctypes.addressof(overrides)
    context.n_ctx = settings.n_ctx
    context.n_batch = settings.n_batch
    context.n_ubatch = settings.n_ubatch
    context.n_seq_max = settings.n_seq_max
    context.n_rs_seq = settings.n_rs_seq
    context.ctx_type = MTP_CONTEXT if settings.heads == "run" else context.ctx_type
    context.n_outputs_max = settings.n_outputs_max
    context.type_k = _choice("KV type", settings.type_k, KV_TYPES)
    context.type_v = _choice("KV type", settings.type_v, KV_TYPES)
    context.flash_attn_type = _choice("flash_attn", settings.flash_attn, FLASH_ATTN)
    context.offload_kqv = settings.offload_kqv
    context.op_offload = settings.op_offload
    if settings.n_threads:
        context.n_threads = context.n_threads_batch = settings.n_threads
    return params


def _choice(what: str, value: str, choices: dict[str, int]) -> int:
    if value not in choices:
        raise OallamaError(f"unknown {what} {value!r}; expected one of {', '.join(choices)}")
    return choices[value]
