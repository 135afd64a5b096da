"""What a plan has to beat: llama.cpp from the same pin, unpatched where it is built."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oallama.base.environment import BASELINE_DIR, THREADS

from ..data.plan import HOST
from ..engine import runtime
from ..errors import OallamaError
from ..planning.stock import FAMILIES, family
from ..profiling.workload import UNFUSED_V_TYPES
from .engines import Engine, LoadParams
from .machine import REPOSITORY

ALL_LAYERS = -1  # n_gpu_layers as llama.h defines it: negative is all
BUILT = REPOSITORY / "build/baseline/bin"


def find_baseline_lib() -> Path:
    """Folder of the unpatched libllama: $OALLAMA_BASELINE_DIR, else build/baseline/bin of the checkout.

    Raises OallamaError when it is not there.
    """
    folder = Path(BASELINE_DIR.get() or BUILT)
    if not (folder / "libllama.so").exists():
        raise OallamaError(f"no unpatched llama.cpp in {folder}; run `make baseline` or set OALLAMA_BASELINE_DIR")
    return folder


def is_unpatched_here() -> bool:
    """Whether there is an unpatched libllama, or $OALLAMA_BASELINE_DIR says so. A wheel has none."""
    return bool(BASELINE_DIR.get()) or (BUILT / "libllama.so").exists()


def what_stands_in() -> str | None:
    """What readers of a comparison must know about llama.cpp there; None where it is unpatched.

    Raises OallamaError as find_baseline_lib() does where $OALLAMA_BASELINE_DIR has none.
    """
    if is_unpatched_here():
        find_baseline_lib()
        return None
    return (
        "llama.cpp is measured as this engine without a plan, which computes the same bits; unpatched it is not here "
        "(a checkout builds it: `make baseline`)"
    )


def stock_lib() -> tuple[Path, dict[str, str]]:
    """Folder of the libllama that is llama.cpp in a comparison, and the variables that it needs.

    Unpatched; where there is none this engine with upstream's threads. Raises OallamaError as find_baseline_lib().
    """
    return (find_baseline_lib(), {}) if is_unpatched_here() else (runtime.lib_dir(), {THREADS.name: "openmp"})


def _stock(
    name: str, lib_dir: str | os.PathLike[str] | None, params: LoadParams, placement: str, **more: Any
) -> Engine:
    """llama.cpp in `lib_dir`, by default as `stock_lib` finds it; reports say in `placement` what stands in."""
    lib, env = (lib_dir, {}) if lib_dir else stock_lib()
    return Engine(name, lib, params, placement + (", this engine" if env else ""), env=env, **more)


def layer_split(
    params: LoadParams,
    n_gpu_layers: int,
    predicted_bytes: dict[str, int] | None = None,
    lib_dir: str | os.PathLike[str] | None = None,
) -> Engine:
    """llama.cpp's own placement, whole layers: the caller gives the -ngl that fits the plan's device bytes.

    This is the engine that others are compared with.
    """
    return _stock(
        "llama.cpp",
        lib_dir,
        replace(params, n_gpu_layers=n_gpu_layers),
        placement=f"-ngl {n_gpu_layers}",
        predicted_bytes=predicted_bytes,
        baseline=True,
    )


def fitted(
    params: LoadParams,
    n_gpu_layers: int,
    overrides: Sequence[tuple[str, str]],
    predicted_bytes: dict[str, int] | None = None,
    lib_dir: str | os.PathLike[str] | None = None,
) -> Engine:
    """llama.cpp's --fit for the same bytes: `n_gpu_layers` and `overrides` are what common/fit.cpp answered."""
    tensors = f", {len(overrides)} tensor overrides" if overrides else ""
    return _stock(
        "llama.cpp --fit",
        lib_dir,
        replace(params, n_gpu_layers=n_gpu_layers, override_tensor=tuple((pattern, "CPU") for pattern, _ in overrides)),
        placement=f"--fit: -ngl {n_gpu_layers}{tensors}",
        predicted_bytes=predicted_bytes,
    )


def ffn_on_cpu(
    params: LoadParams,
    planner: str,
    n: int,
    n_layer: int,
    predicted_bytes: dict[str, int] | None = None,
    lib_dir: str | os.PathLike[str] | None = None,
) -> Engine:
    """--n-cpu-moe or --n-cpu-ffn n by its planner's name; with "-last" the same of the last n layers, by -ot."""
    overrides = tuple((pattern, HOST) for pattern, _ in family(planner, n, n_layer))
    return _stock(
        f"llama.cpp {planner}",
        lib_dir,
        replace(params, n_gpu_layers=ALL_LAYERS, override_tensor=overrides),
        placement=f"--n-{planner} {n}" if planner in FAMILIES else f"-ot as --n-{planner} {n} would",
        predicted_bytes=predicted_bytes,
    )


def cpu_forms(params: LoadParams, lib_dir: str | os.PathLike[str] | None = None) -> list[Engine]:
    """The CPU alone with -fa 1, llama.cpp's default there, and with -fa 0, which knows no quantised V.

    The first is the engine that others are compared with.
    """
    fused = replace(cpu_only(replace(params, flash_attn="on"), lib_dir), name="llama.cpp CPU -fa 1", baseline=True)
    if params.type_v not in UNFUSED_V_TYPES:
        return [fused]
    unfused = replace(cpu_only(replace(params, flash_attn="off"), lib_dir), name="llama.cpp CPU -fa 0")
    return [fused, unfused]


def cpu_only(params: LoadParams, lib_dir: str | os.PathLike[str] | None = None) -> Engine:
    """No device at all: with a device listed, llama.cpp would still upload weights to it for long prompts."""
    return _stock(
        "llama.cpp CPU",
        lib_dir,
        replace(params, n_gpu_layers=0, devices=(), rpc_servers=(), override_tensor=()),
        placement="--device none",
        predicted_bytes={},
    )


def all_on_device(params: LoadParams, lib_dir: str | os.PathLike[str] | None = None) -> Engine:
    """Every layer on the devices: the upper bound. Where it does not fit the report says so."""
    return _stock(
        "llama.cpp all on device",
        lib_dir,
        replace(params, n_gpu_layers=ALL_LAYERS),
        placement="-ngl all",
        optional=True,
    )


def baselines(
    params: LoadParams,
    n_gpu_layers: int,
    predicted_bytes: dict[str, int] | None = None,
    lib_dir: str | os.PathLike[str] | None = None,
) -> list[Engine]:
    """All three: the layer split at the same device bytes, the CPU alone, and everything on the device."""
    return [
        layer_split(params, n_gpu_layers, predicted_bytes, lib_dir),
        cpu_only(params, lib_dir),
        all_on_device(params, lib_dir),
    ]
