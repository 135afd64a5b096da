"""The devices of this process: those of ggml, and RPC servers that are added to them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from oallama.engine import native
from oallama.errors import OallamaError

RPC_TIMEOUT_S = 10.0
ACCELERATOR_TYPES = ("gpu", "igpu")


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
    return [Device(**{k: v for k, v in d.items() if k in wanted}) for d in native.core().devices()]


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
        native.core().rpc_hello(endpoint, RPC_TIMEOUT_S)
        return list(native.core().add_rpc_server(endpoint))
    except (RuntimeError, ValueError) as err:
        raise OallamaError(str(err)) from err


def rpc_server_answers(endpoint: str) -> bool:
    """Whether an RPC server as `add_rpc_server` wants it answers at `host:port`."""
    try:
        native.core().rpc_hello(endpoint, RPC_TIMEOUT_S)
    except (RuntimeError, ValueError):
        return False
    return True


def device_array(names: Sequence[str]) -> Any:
    """NULL-terminated `ggml_backend_dev_t[]` for `llama_model_params.devices`."""
    core = native.core()
    # Asking for a device as a whole asks it for its free memory, too.
    addresses = [core.device_address(name) or core.device_address(device(name).name) for name in names]
    return (ctypes.c_void_p * (len(addresses) + 1))(*addresses, None)
