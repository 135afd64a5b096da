"""The devices of this process: those of ggml, and RPC servers that are added to them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from oallama.engine import native
from oallama.errors import OallamaError

RPC_TIMEOUT_S = 10.0
ACCELERATOR_TYPES = ("gpu", "igpu")
NOBODY = "no RPC server answers at"  # csrc/rpc/rpc_client.cpp


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
    return [_device(each) for each in native.core().devices()]


def device(name: str) -> Device:
    """The device of that name; no other one is asked.

    Raises:
        OallamaError: naming the devices there are.
    """
    if found := native.core().device(name):
        return _device(found)
    raise OallamaError(f"unknown device {name!r}; devices here: {', '.join(native.core().device_names())}")


def _device(described: Mapping[str, Any]) -> Device:
    return Device(**{name: described[name] for name in Device.__dataclass_fields__})


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


def rpc_server_answers(endpoint: str, within_s: float) -> bool:
    """Whether an RPC server as `add_rpc_server` wants it answers at `host:port`.

    Where somebody listens, it may be busy with a client that has just gone: it is asked again for `within_s` seconds.
    """
    end = time.monotonic() + within_s
    while True:
        try:
            native.core().rpc_hello(endpoint, RPC_TIMEOUT_S)
            return True
        except (RuntimeError, ValueError) as error:
            if NOBODY in str(error) or time.monotonic() > end:
                return False
        time.sleep(0.2)


def device_array(names: Sequence[str]) -> Any:
    """NULL-terminated `ggml_backend_dev_t[]` for `llama_model_params.devices`."""
    core = native.core()
    # Asking for a device as a whole asks it for its free memory, too.
    addresses = [core.device_address(name) or core.device_address(device(name).name) for name in names]
    return (ctypes.c_void_p * (len(addresses) + 1))(*addresses, None)
