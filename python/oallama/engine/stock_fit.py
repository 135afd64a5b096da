"""llama.cpp's own --fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from oallama.engine import device_list, load_settings, native
from oallama.engine.load_settings import Settings
from oallama.engine.model_file import check_gguf
from oallama.errors import OallamaError


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
    free = [device_list.device(name).memory_free for name in names]
    margins = [max(0, f - budgets[name]) for name, f in zip(names, free, strict=True)]
    params = load_settings.make_params(replace(settings, devices=names, tensor_split=(), override_tensor=()))
    found = native.core().fit(str(path), *params.addresses, margins, n_ctx_min)
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
