"""ggml's CUDA backend for oallama, which finds it by the entry point `oallama.modules`."""

from pathlib import Path


def folder() -> str:
    """Of the module, and of `engine_id`, which says of what sources it was made."""
    return str(Path(__file__).parent / "modules")
