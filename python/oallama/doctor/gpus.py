"""Checks of GPUs: those on the bus, their driver, and whether the engine can use them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from oallama.data.budget import format_bytes
from oallama.engine.cuda_libraries import OldDriver
from oallama.engine.device_list import ACCELERATOR_TYPES, Device

from .finding import Finding

VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_INSTALL_CUDA = "pip install oallama-cuda13"
_DISPLAY = "0x03"  # PCI classes of display controllers begin so
_BUILD_CUDA = "install NVIDIA's CUDA toolkit, then: make setup"
_VULKAN_DRIVERS = "apt-get install libvulkan1 mesa-vulkan-drivers"
_VULKAN = "apt-get install libvulkan1 mesa-vulkan-drivers libvulkan-dev glslc spirv-headers && make setup"


def gpus(
    root: Path,
    devices: Sequence[Device],
    cuda: bool,
    vulkan: bool,
    vulkan_loader: bool = True,
    modular: bool = False,
    old_driver: OldDriver | None = None,
) -> Iterator[Finding]:
    """root: of the file system. devices: of this process. cuda, vulkan: whether the engine has these backends.
    vulkan_loader: whether the library is there through which Vulkan's drivers are found. modular: backends may come in
    packages of their own. old_driver: NVIDIA's, if it is too old for the engine."""
    used = [d for d in devices if d.type in ACCELERATOR_TYPES]
    for device in used:
        size = format_bytes(device.memory_total)
        yield Finding(device.name, "ok", f"{device.description}, {size}")
    present = set(on_bus(root))
    driver = nvidia_driver(root)
    if ("NVIDIA" in present or driver) and not any(d.backend.startswith("CUDA") for d in used):
        if old_driver:
            effect = f"the GPU is not used: {old_driver.problem}"
            yield Finding("NVIDIA GPU", "broken", f"driver {driver}", effect, old_driver.remedy)
        else:
            yield _unused_nvidia(driver, cuda, _INSTALL_CUDA if modular else _BUILD_CUDA)
    elif present - {"NVIDIA"} and not used:
        yield _unused_other(sorted(present - {"NVIDIA"}), vulkan, vulkan_loader)
    elif not used:
        effect = "models run on the CPU alone; devices of other hosts can help (--rpc)"
        yield Finding("GPU", "note", "none", effect)


def on_bus(root: Path) -> Iterator[str]:
    """The vendor of each GPU on the PCI bus."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        with suppress(OSError):
            if (device / "class").read_text().startswith(_DISPLAY):
                vendor = (device / "vendor").read_text().strip()
                if vendor in VENDORS:
                    yield VENDORS[vendor]


def nvidia_driver(root: Path) -> str:
    """Version of NVIDIA's driver, empty where it is not loaded."""
    try:
        return (root / "sys/module/nvidia/version").read_text().strip()
    except OSError:
        return ""


def _unused_nvidia(driver: str, cuda: bool, remedy: str) -> Finding:
    if not driver:
        return Finding("NVIDIA GPU", "missing", "no driver is loaded", "the GPU is not used", "install NVIDIA's driver")
    if not cuda:
        found = f"driver {driver}, engine without CUDA"
        return Finding("NVIDIA GPU", "missing", found, "the GPU is not used, or by Vulkan alone", remedy)
    found = f"driver {driver}, engine with CUDA, no device"
    effect = "the GPU is not used: it may not be visible to this process, or the driver does not work"
    return Finding("NVIDIA GPU", "broken", found, effect, "nvidia-smi")


def _unused_other(vendors: Sequence[str], vulkan: bool, vulkan_loader: bool) -> Finding:
    name = f"{' and '.join(vendors)} GPU"
    if vulkan and not vulkan_loader:
        return Finding(name, "missing", "no libvulkan.so.1", "the GPU is not used", _VULKAN_DRIVERS)
    if vulkan:
        return Finding(name, "missing", "Vulkan finds no device", "the GPU is not used", "vulkaninfo --summary")
    return Finding(name, "missing", "engine built without Vulkan", "the GPU is not used", _VULKAN)
