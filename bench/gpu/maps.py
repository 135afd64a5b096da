"""Ready-made backend maps: what memcheck and the virtual GPUs run, without a profile or a planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FROM = 32  # tokens from which weights are streamed


def mixed(graph: Any, device: str) -> str:
    """Every kind of hook at once: resident, host, upload, streamed and divided weights."""
    targets = [op.weight for op in graph.targets(1) if op.weight]
    modes = (f"{device} resident", "CPU host", f"CPU stream {FROM}", "CPU upload")
    lines = ["# oallama backend map v1", "slots 2", *(f"layer {il} {device}" for il in range(graph.n_layer + 1))]
    divided = False
    for tensor in graph.tensors:
        if tensor.name == "token_embd.weight":
            lines.append(f"tensor {tensor.name} CPU host")
        elif tensor.name not in targets:
            lines.append(f"tensor {tensor.name} {device} resident")
        elif not divided and "ffn_up" in tensor.name:
            divided = True
            lines += [f"tensor {tensor.name} CPU host", f"segment {tensor.name} {device} rows {tensor.ne[1] // 2}"]
        else:
            lines.append(f"tensor {tensor.name} {modes[targets.index(tensor.name) % len(modes)]}")
    return "\n".join(lines) + "\n"


def halves(graph: Any, devices: Sequence[str], streamed: str = "ffn_") -> str:
    """Layers dealt to the devices in order; weights with `streamed` in their names are streamed."""
    from oallama.data.operators import layer_of

    def home(il: int | None) -> str:
        return devices[-1] if il is None else devices[min(il, graph.n_layer - 1) * len(devices) // graph.n_layer]

    targets = {op.weight for op in graph.targets(1)}
    lines = ["# oallama backend map v1", "slots 3"]
    lines += [f"layer {il} {home(il)}" for il in range(graph.n_layer + 1)]
    for tensor in graph.tensors:
        if tensor.name == "token_embd.weight":
            lines.append(f"tensor {tensor.name} CPU host")
        elif streamed and tensor.name in targets and streamed in tensor.name:
            lines.append(f"tensor {tensor.name} CPU stream {FROM}")
        else:
            lines.append(f"tensor {tensor.name} {home(layer_of(tensor.name))} resident")
    return "\n".join(lines) + "\n"
