"""Placements stock llama.cpp can be told by flags, and what its loader makes of them.

Source: `load_tensors` in upstream's src/llama-model.cpp (which device a layer gets), `create_tensor` in
src/llama-model-loader.cpp (overrides), "FFN offload utils" in common/common.h (--n-cpu-moe, --n-cpu-ffn).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..data.operators import OUTPUT, TOKEN_EMBEDDING, OperatorGraph
from ..data.plan_export import HOST, home_layer
from ..errors import OallamaError

Overrides = tuple[tuple[str, str], ...]  # (pattern, device name)

# At the end of a planner's name: the last layers in place of the first.
LAST = "-last"
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_DENSE = r"\.ffn_(up|down|gate)\."


@dataclass(frozen=True)
class StockFlags:
    """Flags of stock llama.cpp that decide a placement.

    Attributes:
        n_gpu_layers: -ngl, counted from the output layer backwards; negative: all.
        tensor_split: -ts, the shares of those layers each accelerator takes; may be left out with one of them.
        overrides: -ot as (pattern, device name); the first pattern found anywhere in a tensor's name wins.
    """

    n_gpu_layers: int
    tensor_split: tuple[float, ...] = ()
    overrides: Overrides = ()


def cpu_moe(n: int, first: int = 0) -> Overrides:
    """Overrides of `--n-cpu-moe n`: the experts of n layers on the CPU, from layer `first` on.

    Raises OallamaError if n < 0.
    """
    return _layers(n, first, _EXPERTS)


def cpu_ffn(n: int, first: int = 0) -> Overrides:
    """Overrides of `--n-cpu-ffn n`: the dense FFN of n layers on the CPU, from layer `first` on.

    Raises OallamaError if n < 0.
    """
    return _layers(n, first, _DENSE)


# By the name of the planner that places their layers.
FAMILIES: Mapping[str, Callable[[int, int], Overrides]] = {"cpu-moe": cpu_moe, "cpu-ffn": cpu_ffn}


def family(planner: str, n: int, n_layer: int) -> Overrides:
    """Overrides of "cpu-moe" or "cpu-ffn" with n layers on the CPU; of "cpu-moe-last" and "cpu-ffn-last" the last n.

    llama.cpp has flags for the first n alone; the last ones need -ot.
    """
    return FAMILIES[planner.removesuffix(LAST)](n, n_layer - n if planner.endswith(LAST) else 0)


def stock_homes(
    graph: OperatorGraph, flags: StockFlags, devices: Sequence[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Where llama.cpp's loader puts every tensor and every layer under these flags.

    A tensor a device cannot compute with (llama.cpp then takes the CPU) is not known here: the dry run tells. Layers
    for multi-token prediction count for -ngl, whether they are loaded or not.

    Args:
        devices: accelerators in llama.cpp's order; the CPU may be among them and is passed over.

    Returns:
        Tensor name -> device name for all of `graph.tensors` (a tied output included, as `output.weight`), and the
        devices of all layers (KV cache and attention), MTP heads included, and of the output: n_layer_all + 1 entries.

    Raises:
        OallamaError: for several accelerators without a tensor_split (llama.cpp then deals by the free memory of the
            moment), an unknown device, or a pattern that is no regular expression.

    >>> homes(graph, StockFlags(-1, overrides=cpu_moe(4)), ["CUDA0"])
    """
    layers = _layer_homes(graph.n_layer_all, flags, [name for name in devices if name != HOST])
    overridden: dict[str, str] = {}
    for pattern, device in flags.overrides:
        if device != HOST and device not in devices:
            raise OallamaError(f"an override names device {device!r}; the devices are {', '.join(devices)} and {HOST}")
        for name in _matching(pattern, tuple(graph.tensor)):
            overridden.setdefault(name, device)

    def home(name: str) -> str:
        # The loader asks for a tied output by the name of the embedding it is.
        asked = TOKEN_EMBEDDING if graph.tied_output and name == OUTPUT else name
        if asked in overridden:
            return overridden[asked]
        layer = home_layer(name, graph.n_layer_all)
        return HOST if layer is None else layers[layer]

    return {t.name: home(t.name) for t in graph.tensors}, layers


def _layer_homes(n_layer: int, flags: StockFlags, accelerators: Sequence[str]) -> tuple[str, ...]:
    everything = n_layer + 1
    n_device = min(flags.n_gpu_layers if flags.n_gpu_layers >= 0 else everything, everything) if accelerators else 0
    if n_device == 0:
        return (HOST,) * everything
    # Single precision and the order of the operations are upstream's: they decide ties.
    shares = np.zeros(len(accelerators), np.float32)
    given = flags.tensor_split[: len(accelerators)]
    shares[: len(given)] = given
    if len(accelerators) == 1:
        shares[:] = 1
    elif not shares.any():
        raise OallamaError(f"{len(accelerators)} devices ({', '.join(accelerators)}) need a tensor_split with a share")
    ends = np.cumsum(shares, dtype=np.float32)
    ends /= ends[-1]
    dealt = np.arange(n_device, dtype=np.float32) / np.float32(n_device)
    chosen = np.searchsorted(ends, dealt, side="right")
    return (HOST,) * (everything - n_device) + tuple(accelerators[i] for i in chosen)


def _layers(n: int, first: int, regex: str) -> Overrides:
    if n < 0:
        raise OallamaError(f"expected a number of layers, 0 or more, got {n}")
    return tuple((rf"blk\.{il}{regex}", HOST) for il in range(first, first + n))


@lru_cache(maxsize=1024)
def _matching(pattern: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names in which the pattern is found."""
    try:
        compiled = re.compile(pattern)
    except re.error as err:
        raise OallamaError(f"the override pattern {pattern!r} is not a regular expression: {err}") from err
    return tuple(name for name in names if compiled.search(name))
