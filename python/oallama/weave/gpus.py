"""GPUs of a hot model and its cold ones: which, what is left for guests, and whether two processes may share one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oallama.data.budget import format_bytes, parse_margin
from oallama.data.plan import HOST
from oallama.engine import device_list
from oallama.errors import OallamaError
from oallama.loading.budgets import default_margin

BACKEND = "CUDA"  # whose devices can keep guests, and send them
_MPS_FOLDER = "/tmp/nvidia-mps"
START_MPS = "nvidia-cuda-mps-control -d"


@dataclass(frozen=True)
class Places:
    """Where the models run, by ggml's name of a device; None: on the CPU."""

    hot: str | None = None
    cold: str | None = None

    @property
    def on_gpus(self) -> bool:
        """Whether either runs on an accelerator."""
        return self.hot is not None or self.cold is not None


def parse_places(text: str | None) -> Places:
    """What "CUDA0" (all models) or "hot=CUDA0,cold=CUDA1" says; None: all on the CPU.

    Raises:
        OallamaError: a part that is neither, or a device that is not there.

    >>> parse_places("CPU")
    Places(hot=None, cold=None)
    """
    if text is None:
        return Places()
    parts = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if "=" not in text and len(parts) == 1:
        parts = {"hot": text.strip(), "cold": text.strip()}
    if set(parts) != {"hot", "cold"}:
        raise OallamaError(f'with --hot, --device is one device or "hot=CUDA0,cold=CUDA1", got {text!r}')
    hot, cold = (None if parts[who] == HOST else device_list.device(parts[who]).name for who in ("hot", "cold"))
    return Places(hot, cold)


def check_places(places: Places, n_cold: int, guests: int, environment: Mapping[str, str] = os.environ) -> None:
    """Whether these places can be: `guests` sequences of the hot model in the memory of `n_cold` cold ones.

    Raises:
        OallamaError: two processes would share a GPU without MPS, or there are to be guests where there cannot be.
    """
    names = [places.hot, *[places.cold] * n_cold]
    for name in sorted({name for name in names if name is not None}):
        check_sharing(name, names.count(name), environment)
    if not places.on_gpus or not guests or not n_cold:
        return
    for place in (places.hot, places.cold):
        if place is None or device_list.device(place).backend != BACKEND:
            raise OallamaError(
                "guests need both models on CUDA devices, or both on the CPU: here they are on "
                f"{places.hot or HOST} and {places.cold or HOST}; give other devices, or --guests 0"
            )
    if n_cold > 1:
        raise OallamaError("on GPUs one cold model lends memory to the hot one; give one --cold, or --guests 0")


def check_sharing(name: str, n: int, environment: Mapping[str, str] = os.environ) -> None:
    """Raises OallamaError where n processes on that device would have it in turns."""
    if n > 1 and device_list.device(name).backend == BACKEND and not mps_runs(mps_folder(environment)):
        raise OallamaError(
            f"{n} processes on {name} would take turns of milliseconds, since CUDA's MPS does not run here; start it "
            f"with: {START_MPS}"
        )


def mps_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where CUDA's multi-process service has its pipes."""
    return Path(environment.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER)


def mps_runs(folder: Path) -> bool:
    """Whether the control daemon of CUDA's multi-process service, with its pipes in that folder, lives."""
    if not (folder / "control").exists():
        return False
    try:
        os.kill(int((folder / "nvidia-cuda-mps-control.pid").read_text()), 0)
    except PermissionError:  # another user's
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def room_for_guests(name: str, models: Sequence[int], margin: str | None = None) -> int:
    """Bytes of a device that are free now and stay so with these models on it, of so many bytes each.

    margin: bytes that stay free; None: `default_margin` of the device.

    Raises:
        OallamaError: the models themselves have no room.
    """
    device = device_list.device(name)
    keep = default_margin(device) if margin is None else parse_margin(margin)
    left = device.memory_free - keep - sum(models)
    if left < 0:
        raise OallamaError(
            f"{name} has {format_bytes(device.memory_free)} free, of which {format_bytes(keep)} are to stay free; the "
            f"models on it take {format_bytes(sum(models))}: lower --ctx or --parallel, or take another device"
        )
    return left
