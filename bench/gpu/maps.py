"""Ready-made backend maps: what memcheck and the virtual GPUs run, without a profile or a planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oallama.bench.maps import backend_map
from oallama.data.operators import layer_of

FROM = 32  # tokens from which weights are streamed


def mixed(graph: Any, device: str) -> str:
    """Every kind of hook at once: resident, host, upload, streamed and divided weights."""
    targets = [op.weight for op in graph.targets(1) if op.weight]
    divided = next((t for t in graph.tensors if t.name in targets and "ffn_up" in t.name), None)
    modes = (f"{device} resident", "CPU host", f"CPU stream {FROM}", "CPU upload")

    def place(tensor: Any) -> str | tuple[str, str]:
        if tensor is divided:
            return "CPU host", f"{device} rows {tensor.ne[1] // 2}"
        return modes[targets.index(tensor.name) % len(modes)] if tensor.name in targets else modes[0]

    return backend_map(graph, device, place, ["slots 2"])


def halves(graph: Any, devices: Sequence[str], streamed: str = "ffn_") -> str:
    """Layers dealt to the devices in order; weights with `streamed` in their names are streamed."""
    targets = {op.weight for op in graph.targets(1)}

    def home(il: int | None) -> str:
        return devices[-1] if il is None else devices[min(il, graph.n_layer - 1) * len(devices) // graph.n_layer]

    def place(tensor: Any) -> str:
        moved = streamed and tensor.name in targets and streamed in tensor.name
        return f"CPU stream {FROM}" if moved else f"{home(layer_of(tensor.name))} resident"

    return backend_map(graph, home, place, ["slots 3"])
