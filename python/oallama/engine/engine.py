"""The engine as Python sees it: devices, model graphs, dry runs and the backend map.

Thin: it builds llama.cpp's parameter structures from names a person would use, calls `oallama._core`, and turns what a
user can cause into OallamaError. The native module is loaded at the first use, not at import.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from oallama.engine import runtime
from oallama.errors import OallamaError

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30, "iq4_nl": 20}
RPC_TIMEOUT_S = 10.0
ACCELERATOR_TYPES = ("gpu", "igpu")
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


@cache
def core() -> ModuleType:
    """The native module, with llama-cpp-python bound to the same libllama.

    Raises:
        OallamaError: GGML_BACKEND_PATH names a library that is no backend; llama.cpp's programs load it, too.
    """
    runtime.llama_cpp()
    from oallama import _core

    path = os.environ.get("GGML_BACKEND_PATH")
    if path and not _core.load_backend(path):
        raise OallamaError(f"cannot load the backend that GGML_BACKEND_PATH names: {path}")
    return _core


@dataclass(frozen=True)
class Device:
    """One ggml device. `memory_*` in bytes; `op_offload`: takes large matmuls whose weight lies in host memory."""

    name: str
    description: str
    type: str
    backend: str
    memory_free: int
    memory_total: int
    op_offload: bool
    host_buffer: bool


def devices() -> list[Device]:
    """Every device of this process, CPU included, in ggml's order."""
    wanted = Device.__dataclass_fields__
    return [Device(**{k: v for k, v in d.items() if k in wanted}) for d in core().devices()]


def device(name: str) -> Device:
    """The device of that name.

    Raises:
        OallamaError: naming the devices there are.
    """
    known = devices()
    for dev in known:
        if dev.name == name:
            return dev
    raise OallamaError(f"unknown device {name!r}; devices here: {', '.join(d.name for d in known)}")


@cache  # the devices of a server can be registered once
def add_rpc_server(endpoint: str) -> list[str]:
    """Register the devices behind an RPC server at `host:port`; returns their names.

    Raises:
        OallamaError: if no RPC server of our version that knows our token (OALLAMA_RPC_TOKEN_FILE) answers there, or
            it is busy (ggml itself would abort the process or wait); or the build has no RPC.
    """
    try:
        core().rpc_hello(endpoint, RPC_TIMEOUT_S)
        return list(core().add_rpc_server(endpoint))
    except (RuntimeError, ValueError) as err:
        raise OallamaError(str(err)) from err


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
        devices: names of the accelerators to use, in order; None takes all of them, () none.
        n_gpu_layers: llama.cpp's -ngl; -1 all. Without effect on layers and tensors a backend map lists.
        tensor_split: llama.cpp's -ts, the shares of the layers each device takes; () deals by free memory.
        override_tensor: llama.cpp's -ot as (pattern, device name), the first match wins.
        n_outputs_max: most rows of one micro-batch with logits; 0 is n_batch.
        use_mmap: None leaves it to llama.cpp (mapped unless a device cannot).
        n_threads: 0 takes llama.cpp's default.
    """

    n_ctx: int = 4096
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
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


@dataclass
class Params:
    """llama.cpp's two parameter structures, kept alive together with what they point to."""

    model: Any
    context: Any
    _keep: list[Any] = field(default_factory=list)

    @property
    def addresses(self) -> tuple[int, int]:
        return ctypes.addressof(self.model), ctypes.addressof(self.context)


def device_array(names: Sequence[str]) -> Any:
    """NULL-terminated `ggml_backend_dev_t[]` for `llama_model_params.devices`."""
    addresses = [core().device_address(device(name).name) for name in names]
    return (ctypes.c_void_p * (len(addresses) + 1))(*addresses, None)


class _TensorOverride(ctypes.Structure):
    """`llama_model_tensor_buft_override`."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def override_array(overrides: Sequence[tuple[str, str]]) -> Any:
    """`llama_model_tensor_buft_override[]` that ends with an empty entry, for `tensor_buft_overrides`."""
    entries = [
        _TensorOverride(pattern.encode(), core().buffer_type_address(device(name).name)) for pattern, name in overrides
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
    if settings.use_mmap is not None:
        model.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP if settings.use_mmap else llama_cpp.LLAMA_LOAD_MODE_NONE
    if settings.devices is not None:
        array = device_array(settings.devices)
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


def check_gguf(path: str | Path) -> Path:
    """The path, if a GGUF file lies there.

    Raises:
        OallamaError: for a missing file, a directory, no read permission, or a file of another kind.
    """
    path = Path(path)
    if path.is_dir():
        raise OallamaError(f"{path} is a directory; expected a .gguf file")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except FileNotFoundError as err:
        raise OallamaError(f"no such model file: {path}") from err
    except OSError as err:
        raise OallamaError(f"cannot read {path}: {err.strerror}") from err
    if magic != b"GGUF":
        raise OallamaError(f"{path} is not a GGUF file (it begins with {magic!r}); convert or download it again")
    return path


@contextmanager
def backend_map(table: str | None) -> Iterator[None]:
    """Let the loads of this thread obey `table` (None: upstream's rules) inside the block.

    Raises:
        OallamaError: for a malformed table, or if a load inside the block was refused by it.
    """
    if table is None:
        yield
        return
    try:
        core().set_backend_map(table)
    except ValueError as err:
        raise OallamaError(str(err)) from err
    try:
        yield
    except (ValueError, RuntimeError) as err:
        refusal = core().backend_map_error()
        if refusal:
            raise OallamaError(refusal) from err
        raise
    finally:
        core().clear_backend_map()


def read_graphs(path: str | Path, settings: Settings, n_tokens: Sequence[int]) -> dict[str, Any]:
    """Operators of the real forward graph at several token counts, without loading a weight.

    Returns the raw dict `OperatorGraph.from_engine` takes. The graphs are those of a CPU-only load: which operators
    there are does not depend on the device, and no device memory is touched.

    Raises:
        OallamaError: with llama.cpp's own reason if the model cannot be loaded.
    """
    check_gguf(path)
    params = make_params(replace(settings, devices=(), tensor_split=(), override_tensor=()))
    with _engine_errors(path):
        return dict(core().read_graphs(str(path), *params.addresses, list(n_tokens)))


def dry_run(path: str | Path, settings: Settings, table: str | None = None) -> dict[str, dict[str, int]]:
    """Exact bytes per device, `{device: {"weights", "kv", "compute"}}`, by the allocators' dry run under `table`.

    Raises:
        OallamaError: with llama.cpp's own reason if the model cannot be loaded.
    """
    check_gguf(path)
    params = make_params(settings)
    with _engine_errors(path), backend_map(table):
        buffers = core().memory_dry_run(str(path), *params.addresses)
    return by_device(buffers)


def read_arenas(
    path: str | Path, settings: Settings, graphs: Sequence[tuple[int, int]], table: str | None = None
) -> list[dict[str, Any]]:
    """The compute buffers of graphs, each (tokens, rows with logits), under `table`, by the allocators' dry run.

    Returns the raw dicts `planning.arenas.Arena` is made of, in the order of the graphs.

    Raises:
        OallamaError: with llama.cpp's own reason if the model cannot be loaded.
    """
    check_gguf(path)
    params = make_params(settings)
    with _engine_errors(path), backend_map(table):
        return list(core().read_arenas(str(path), *params.addresses, list(graphs)))


@dataclass(frozen=True)
class FitResult:
    """What llama.cpp's --fit chose; `n_gpu_layers`, `tensor_split` and `overrides` are the fields of `StockFlags`.

    Attributes:
        status: "success", or "failure" when fit gave up; the other fields are then what it tried last.
        n_gpu_layers: -1 if everything fits.
        tensor_split: one entry a device; () with one device. Where fit leaves it, llama.cpp deals the layers by free
            memory, so that is what stands here.
        overrides: (pattern, device name), the first match wins.
        n_ctx: tokens of context: the settings', or what fit chose if they have 0.
        reason: why it is a failure.
        log: fit's own lines.
    """

    status: str
    n_gpu_layers: int
    tensor_split: tuple[float, ...]
    overrides: tuple[tuple[str, str], ...]
    n_ctx: int
    reason: str
    log: str


def fit(path: str | Path, settings: Settings, budgets: Mapping[str, int], n_ctx_min: int = 4096) -> FitResult:
    """What llama.cpp's own --fit (its common/fit.cpp) chooses when each device may take `budgets[device]` bytes.

    fit thinks in free memory: a device that reports less free than its budget is filled, and the RAM of the host is
    without limit. A "success" is not a promise: with no layer on a device fit does not look at its target any more.
    fit decides -ngl, -ts and -ot itself, so those of the settings are not looked at.

    Args:
        settings: `devices` are those to fit, in order; None takes those of the budgets.
        budgets: bytes of each device for weights, KV cache and compute buffers together.
        n_ctx_min: fewest tokens of context that fit may choose, only if `settings.n_ctx` is 0.

    Raises:
        OallamaError: if devices and budgets do not match, or with fit's own reason if the model cannot be loaded.
    """
    check_gguf(path)
    names = tuple(budgets) if settings.devices is None else settings.devices
    if not names or sorted(names) != sorted(budgets):
        raise OallamaError(f"fit needs a budget for each device: devices {list(names)}, budgets for {list(budgets)}")
    if negative := [name for name in names if budgets[name] < 0]:
        raise OallamaError(f"the budget of {negative[0]} is {budgets[negative[0]]} bytes; expected 0 or more")
    free = [device(name).memory_free for name in names]
    margins = [max(0, f - budgets[name]) for name, f in zip(names, free, strict=True)]
    params = make_params(replace(settings, devices=names, tensor_split=(), override_tensor=()))
    found = core().fit(str(path), *params.addresses, margins, n_ctx_min)
    reason = found["reason"].strip().removeprefix("common_fit_params: ")
    if found["status"] == "error":
        raise OallamaError(f"{path}: {'; '.join([reason, *found['errors'].splitlines()[:1]])}")
    split = found["tensor_split"] if any(found["tensor_split"]) else free
    return FitResult(
        status=found["status"],
        n_gpu_layers=found["n_gpu_layers"],
        tensor_split=tuple(map(float, split)) if len(names) > 1 else (),
        overrides=tuple((pattern, name) for pattern, _buffer_type, name in found["overrides"]),
        n_ctx=found["n_ctx"],
        reason=reason,
        log=found["log"],
    )


def by_device(buffers: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Sum buffer types by the memory they take: host buffers of any device count as CPU."""
    result: dict[str, dict[str, int]] = {}
    for buffer in buffers:
        name = "CPU" if buffer["is_host"] or buffer["device"].startswith("CPU") else buffer["device"]
        entry = result.setdefault(name, {"weights": 0, "kv": 0, "compute": 0})
        for kind in entry:
            entry[kind] += buffer[kind]
    return result


@contextmanager
def _engine_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OallamaError:
        raise
    except (RuntimeError, ValueError) as err:
        raise OallamaError(f"{path}: {_reason(str(err))}") from err


def _reason(text: str) -> str:
    # llama.cpp logs from the inside out; the first error names the cause.
    lines = [line for line in text.splitlines()[1:] if line.strip()] or text.splitlines()
    return lines[0].split("error loading model: ")[-1].strip()
