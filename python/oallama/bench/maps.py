"""Backend maps for measurements: a place for every weight, without a profile or a planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..data.operators import TOKEN_EMBEDDING, OperatorGraph, TensorInfo


def backend_map(
    graph: OperatorGraph,
    home: str | Callable[[int], str],
    place: Callable[[TensorInfo], str | tuple[str, str]],
    first: Iterable[str] = (),
) -> str:
    """The text of a map. The embedding is always on the host.

    home: the device of the layers' activations and caches, or of each layer. place: device and mode of a tensor, as in
    "CPU stream 32"; for a divided one also its segment, as in "CUDA0 rows 512". first: lines before the others.
    """
    lines = ["# oallama backend map v1", *first]
    for il in range(graph.n_layer_all + 1):
        lines.append(f"layer {il} {home if isinstance(home, str) else home(il)}")
    for tensor in graph.tensors:
        found = "CPU host" if tensor.name == TOKEN_EMBEDDING else place(tensor)
        where, *segments = (found,) if isinstance(found, str) else found
        lines += [f"tensor {tensor.name} {where}", *(f"segment {tensor.name} {segment}" for segment in segments)]
    return "\n".join(lines) + "\n"
