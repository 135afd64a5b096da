"""Vulkan on lavapipe, a software device."""

from __future__ import annotations

import glob

from oallama.engine import runtime

# Software Vulkan devices are hidden unless named; the worker process alone sees this one.
VULKAN = {"GGML_VK_VISIBLE_DEVICES": "0"}


def has_vulkan() -> bool:
    return (runtime.lib_dir() / "libggml-vulkan.so").exists() and bool(
        glob.glob("/usr/share/vulkan/icd.d/lvp_icd*.json")
    )
