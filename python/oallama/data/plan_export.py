"""A plan in the words of the engine (backend map) and of stock llama.cpp (-ngl / -ot)."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..base.printing import say
from ..errors import OallamaError

if TYPE_CHECKING:
    from .plan import PlacementPlan, Segment, TensorPlacement

HOST = "CPU"
_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")
# Tensors without a block number that stock llama.cpp keeps on the CPU whatever -ngl says (its input layer), and those
# it loads with the first layer (LLM_TENSOR_INFOS in llama-arch.cpp). All others belong to the output layer.
_INPUT = {"token_embd.weight", "position_embd.weight", "token_types.weight", "per_layer_token_embd.weight"}
_FIRST = re.compile(r"^(rope_freqs|rope_factors_\w+|token_embd_norm)\.")


@lru_cache(maxsize=8192)
def home_layer(name: str, n_layer: int) -> int | None:
    """Layer whose device stock llama.cpp gives a tensor: 0..n_layer-1, n_layer for the output, None for always-CPU."""
    if match := _BLOCK.match(name):
        return min(int(match[1]), n_layer)
    if _FIRST.match(name):
        return 0
    return None if name in _INPUT else n_layer


def backend_map(plan: PlacementPlan, on: Mapping[str, str] = MappingProxyType({})) -> str:
    """The table the patched engine obeys (docs/architecture.md, "Backend map"); on: other devices for the plan's."""
    lines = ["# oallama backend map v1"]
    lines += [f"layer {il} {on.get(device, device)}" for il, device in enumerate(plan.layers)]
    segments = {name: t.segments[0] for name, t in plan.tensors.items()}
    if any(s.mode == "stream" for s in segments.values()):
        lines.append(f"slots {plan.stream_slots}")
    if any(s.slots for t in plan.tensors.values() for s in t.segments):
        lines.append(f"uploads {plan.slot_uploads}")
    if plan.stream_caches:
        lines.append("caches stream")
    if plan.offline_arenas:
        lines.append("arenas offline")
    if plan.context.attention == "oallama":
        lines.append("attention oallama")
    if plan.whole_layers:
        lines.append("layers whole")
    lines += [f"tensor {name} {on.get(s.device, s.device)} {_mode(s)}" for name, s in segments.items()]
    lines += [_part(name, s, on.get(s.device, s.device)) for name, t in plan.tensors.items() for s in t.segments[1:]]
    return "\n".join(lines) + "\n"


def llama_cpp_flags(plan: PlacementPlan, program: str = "llama.cpp") -> list[str]:
    """-ngl and -ot flags that give stock llama.cpp the same homes for layers and tensors.

    Says on stderr where the plan has our kernels of attention, which llama.cpp lacks.
    """
    if plan.stream_caches:
        raise OallamaError("stock llama.cpp cannot compute attention on another device than the KV cache's")
    if plan.offline_arenas:
        raise OallamaError("stock llama.cpp needs larger compute buffers than a plan with offline arenas")
    if plan.context.attention == "oallama":
        say("the plan's attention on the CPU is computed by oallama's kernels; llama.cpp has its own only")
    bench = program == "llama-bench"
    flags = ["-ngl", str(_gpu_layers(plan))]
    moved: dict[str, list[str]] = defaultdict(list)
    for name, tensor in plan.tensors.items():
        device = _single(name, tensor).device
        if plan.tied_output and name == "output.weight":
            # The loader asks for the tied matrix by its embedding's name, and the embedding is on the CPU anyway.
            name, default = "token_embd.weight", plan.layers[-1]
            if device == default:
                continue
            if device != HOST:
                raise OallamaError("stock llama.cpp cannot put a tied output on a device and its layer on the CPU")
        elif device == (default := _default_device(plan, name)):
            continue
        moved[device].append(name)
    patterns = [
        f"{pattern}={device}" for device, names in moved.items() for pattern in name_patterns(names, plan.tensors)
    ]
    if patterns:
        # llama-bench reads "," as "next test"; its separator inside one test is ";".
        flags += ["-ot", (";" if bench else ",").join(patterns)]
    if moved[HOST] and not any(t.mode in ("upload", "stream") for t in plan.tensors.values()):
        flags += ["-nopo", "1"] if bench else ["--no-op-offload"]
    return flags


def name_patterns(names: Iterable[str], universe: Iterable[str]) -> list[str]:
    """Anchored regular expressions that match exactly `names` among the tensor names in `universe`.

    Layers with the same kinds share one pattern: `^blk\\.(0|3)\\.ffn_(gate|up)\\.weight$`.
    """
    existing: dict[str, set[int]] = defaultdict(set)
    for name in universe:
        if match := _BLOCK.match(name):
            existing[match[2]].add(int(match[1]))
    layers: dict[str, set[int]] = defaultdict(set)
    patterns = []
    for name in dict.fromkeys(names):
        if match := _BLOCK.match(name):
            layers[match[2]].add(int(match[1]))
        else:
            patterns.append(f"^{_escape(name)}$")
    # Group kinds by their set of layers; every layer that exists is written [0-9]+.
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for rest, numbers in layers.items():
        block = "[0-9]+" if numbers == existing[rest] else _either([str(n) for n in sorted(numbers)])
        stem, dot, suffix = rest.rpartition(".")
        groups[block, dot + suffix].append(stem)
    for (block, suffix), stems in groups.items():
        patterns.append(f"^blk\\.{block}\\.{_kinds(sorted(stems))}{_escape(suffix)}$")
    return patterns


def _kinds(stems: list[str]) -> str:
    shared = os.path.commonprefix(stems) if len(stems) > 1 else ""  # noqa: RUF071 (names, not paths)
    shared = shared[: shared.rfind("_") + 1]
    return _escape(shared) + _either([_escape(s[len(shared) :]) for s in stems])


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"


def _escape(text: str) -> str:
    return re.sub(r"([.^$|()\[\]{}*+?\\])", r"\\\1", text)


def _gpu_layers(plan: PlacementPlan) -> int:
    """-ngl counts from the last layer (the output) backwards."""
    on_device = [device != HOST for device in plan.layers]
    n = sum(on_device)
    if not all(on_device[len(on_device) - n :]):
        raise OallamaError("stock llama.cpp cannot follow this plan: its device layers are not the last ones")
    if len({device for device in plan.layers if device != HOST}) > 1:
        raise OallamaError("this plan uses several devices; flags for stock llama.cpp can be written for one")
    return n


def _default_device(plan: PlacementPlan, name: str) -> str:
    """Where stock llama.cpp puts a tensor under the plan's -ngl."""
    layer = home_layer(name, len(plan.layers) - 1)
    return HOST if layer is None else plan.layers[layer]


def _mode(segment: Segment) -> str:
    mode = f"stream {segment.stream_from}" if segment.mode == "stream" else segment.mode
    return f"{mode} {segment.realisation}".rstrip()


def _part(name: str, segment: Segment, device: str) -> str:
    if segment.slots:
        first = f" experts {ranges(segment.experts)}" if segment.experts else ""
        return f"segment {name} {device} slots {segment.slots}{first}"
    if segment.experts:
        return f"segment {name} {device} experts {ranges(segment.experts)}"
    if segment.rows is None or segment.rows[0] != 0:
        raise OallamaError(f"{name}: the segment on {segment.device} must begin with the tensor's first row or column")
    axis = "columns" if is_divided_by_columns(name) else "rows"
    return f"segment {name} {device} {axis} {segment.rows[1]}"


def is_divided_by_columns(name: str) -> bool:
    """Whether a weight's parts are columns: the last matrix of a feed-forward; rows else.

    >>> is_divided_by_columns("blk.0.ffn_down_exps.weight")
    True
    """
    return ".ffn_down" in name


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in short.

    >>> ranges((0, 3, 4, 5))
    '0,3-5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    return ",".join("-".join(map(str, run)) for run in runs)


def _single(name: str, tensor: TensorPlacement) -> Segment:
    if len(tensor.segments) != 1:
        raise OallamaError(f"{name} is divided between two devices, which stock llama.cpp cannot do")
    return tensor.segments[0]
