"""All checks, in the order in which they are shown."""

from __future__ import annotations

from pathlib import Path

from oallama.engine import device_list, runtime
from oallama.engine.cuda_libraries import old_driver
from oallama.engine.module_packages import is_modular
from oallama.errors import OallamaError
from oallama.profiling.other_work import cpus_of_others
from oallama.profiling.recorder import cache_dir

from . import installed, limits
from .finding import Finding
from .gpus import gpus


def examine() -> list[Finding]:
    """What of oallama works here. Nothing is changed, and no model is loaded."""
    try:
        runtime.quiet()
        devices = device_list.devices()
    except OallamaError as error:
        return [Finding("engine", "broken", str(error), "no model can be loaded", "make setup")]
    root = Path("/")
    return [
        installed.engine(),
        installed.kernels(),
        *gpus(
            root,
            devices,
            installed.has_backend("cuda"),
            installed.has_backend("vulkan"),
            installed.has_vulkan_loader(),
            is_modular(runtime.lib_dir()),
            old_driver(runtime.lib_dir()),
        ),
        installed.rpc(),
        installed.programs(),
        installed.packages(),
        limits.cpus(root, cpus_of_others()),
        limits.memory(root),
        limits.locked_memory(),
        limits.huge_pages(root),
        limits.shared_memory(root),
        limits.cache(cache_dir()),
    ]
