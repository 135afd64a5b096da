"""What a plan's pictures draw: which weights, in which order, and what a cell of the terminal's picture shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from rich.text import Text

from ..data.operators import kind_of, layer_of
from ..data.plan import HOST, PlacementPlan, TensorPlacement

# Kinds of matrices in the order a layer computes them; others follow in the order of the plan.
_ORDER = (
    "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b", "attn_qkv", "attn_q", "attn_k", "attn_v", "attn_output",
    "ffn_gate_inp", "ffn_gate", "ffn_up", "ffn_down", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps",
)  # fmt: skip
_SHORT = {"attn_output": "o", "ffn_gate_inp": "route", "attn_kv_a_mqa": "kv_a", "output": "output"}


@dataclass(frozen=True)
class Symbols:
    """What a cell of the picture shows; `devices` are used in the order of the plan's accelerators.

    Terminals without these characters get the replacements in base/printing.py.
    """

    devices: tuple[str, ...] = ("█", "▓", "▒")
    host: str = "·"
    upload: str = "^"
    stream: str = "»"
    split: str = "/"
    absent: str = " "


SYMBOLS = Symbols()
_STYLES = ("bold green", "bold cyan", "bold magenta")


def cell(home: str, plan: PlacementPlan) -> Text:
    """What a home looks like: a device, "upload", "stream", "split", or "" for what is not there."""
    if home == "":
        return Text(SYMBOLS.absent)
    if home == "split":
        return Text(SYMBOLS.split, style="bold yellow")
    if home == "upload":
        return Text(SYMBOLS.upload, style="yellow")
    if home == "stream":
        return Text(SYMBOLS.stream, style="yellow")
    if home == HOST:
        return Text(SYMBOLS.host, style="dim")
    at = [device for device in plan.devices if device != HOST].index(home)
    return Text(SYMBOLS.devices[at % len(SYMBOLS.devices)], style=_STYLES[at % len(_STYLES)])


def span(values: Sequence[int] | Sequence[str]) -> str:
    """ "3" or "3 to 7": the least and the greatest of some."""
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def drawn(plan: PlacementPlan) -> dict[str, TensorPlacement]:
    """Matrices a planner decides on; where it weighed none (baselines, MTP heads) all but norms and biases."""
    weighed = {layer_of(name) for name, tensor in plan.tensors.items() if tensor.affinity is not None}
    return {
        name: tensor
        for name, tensor in plan.tensors.items()
        if tensor.affinity is not None or (_is_alone(layer_of(name), weighed) and not _is_small(kind_of(name)))
    }


def _is_alone(layer: int | None, weighed: Set[int | None]) -> bool:
    """Whether nothing of this layer was weighed; of what belongs to no layer: nothing at all."""
    return not weighed if layer is None else layer not in weighed


def _is_small(kind: str) -> bool:
    return kind.endswith((".bias", "_norm")) or "norm" in kind or kind.startswith("rope_")


def kinds_of(names: Iterable[str]) -> list[str]:
    """Kinds of these weights in the order of the picture."""
    found = dict.fromkeys(kind_of(name) for name in names)
    known = [kind for kind in _ORDER if kind in found]
    return known + [kind for kind in found if kind not in _ORDER]


def short_kind(kind: str) -> str:
    """As a label: "q" for "attn_q", "up*" for the experts' "ffn_up_exps"."""
    if kind in _SHORT:
        return _SHORT[kind]
    return kind.removeprefix("attn_").removeprefix("ffn_").replace("_exps", "*").removeprefix("ssm_")


def home_of(tensor: TensorPlacement) -> str:
    """A word for a cell: the device, "upload", "stream", "split"."""
    if len({segment.device for segment in tensor.segments}) > 1:
        return "split"
    return tensor.mode if tensor.mode in ("upload", "stream") else tensor.device
