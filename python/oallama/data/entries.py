"""What a profile is made of: a device, and one measured time or share. Times are seconds, sizes bytes.

median_s is of the clean repeats of a measurement, in which no thread waited for its CPU, and spread_s their median
absolute deviation. best_s is the fastest repeat (0: not recorded). clean is their share of all repeats: below
`CLEAN` the median is of the faster half of all, and other work may have made it longer.
"""

from __future__ import annotations

from dataclasses import dataclass

# Pseudo operator: the median time of one of the small operators (norm, add, rope, ...) at a token count.
OTHER = "OTHER"
# How a weight on the CPU may lie: as in the file, in a buffer type with a layout of its own (ggml-cpu's repacking,
# AMX), as in the file with our kernels for many tokens (docs/products.md), or in memory twice: repacked for few tokens,
# tiled for many. "" is what llama.cpp takes on a machine without accelerators: repacked where it can be.
REALISATIONS = ("", "plain", "repacked", "tiled", "repacked+tiled")
# Rows of activations, of a mixture for each expert, from which on our kernels for many rows compute a tiled weight's
# products. For fewer there are other kernels of ours (docs/decode.md), where the CPU has what they need.
TILED_FROM = 9
# Of fused attention on CPUs: llama.cpp's, and ours (docs/attention.md).
KERNELS = ("ggml", "oallama")
# Share of clean repeats from which on a measurement counts as taken alone.
CLEAN = 0.5
# CPUs that other work may keep busy while something is measured that counts as taken alone.
QUIET_CPUS = 0.1
# llama.cpp attends to a KV cache, whose size is a multiple of it too, in multiples of this many rows.
KV_ROWS = 256


def padded_rows(n: int) -> int:
    """KV rows that llama.cpp attends to when `n` of them are used."""
    return max(1, -(-n // KV_ROWS)) * KV_ROWS


def is_tiled(n_tokens: int, n_expert: int = 1, n_used: int = 1) -> bool:
    """Whether our kernels for many rows compute a tiled weight's product: there are enough for each expert."""
    return n_tokens * n_used >= TILED_FROM * n_expert


def form_at(realisation: str, n_tokens: int, n_expert: int = 1, n_used: int = 1) -> str:
    """The realisation that computes a weight for so many tokens: one in memory twice has another for few."""
    if realisation != "repacked+tiled":
        return realisation
    return "tiled" if is_tiled(n_tokens, n_expert, n_used) else "repacked"


@dataclass(frozen=True)
class DeviceInfo:
    """A device of the profiled machine. `op_offload`: uploads host weights for large batches (upstream's rule)."""

    name: str
    description: str
    type: str
    memory_total: int
    backend: str
    op_offload: bool = False


@dataclass(frozen=True)
class OperatorTime:
    """One matrix multiplication: `ne` = (k, m, n_expert) of its weight, n_expert and n_used are 1 for dense.

    realisation: of REALISATIONS; "" where the device has only one.
    """

    device: str
    op: str
    type: str
    ne: tuple[int, ...]
    n_used: int
    n_tokens: int
    median_s: float
    spread_s: float = 0.0
    repeats: int = 1
    realisation: str = ""
    best_s: float = 0.0
    clean: float = 1.0


# Chains of operators that a backend may fuse: norm and multiplication; RoPE and the write to the KV cache; gate, up
# and GLU of a feed-forward.
NORM, ROPE_STORE, FEED_FORWARD = CHAINS = ("norm+mul", "rope+set_rows", "gate+up+glu")


@dataclass(frozen=True)
class ChainTime:
    """A chain of operators in one graph, in one piece where the backend fuses it; kind: of CHAINS.

    type and ne: "f32" and (width, rows per token) of a norm; the K cache's type and (width, number) of its heads;
    type and (k, m) of the gate's matrix.
    """

    device: str
    kind: str
    type: str
    ne: tuple[int, int]
    n_tokens: int
    median_s: float
    spread_s: float = 0.0
    repeats: int = 1
    best_s: float = 0.0
    clean: float = 1.0


@dataclass(frozen=True)
class ShapeTime:
    """An operator that is neither a matrix multiplication with a weight nor attention; shape: `OpShape.key`."""

    device: str
    shape: str
    median_s: float
    spread_s: float = 0.0
    repeats: int = 1
    best_s: float = 0.0
    clean: float = 1.0


@dataclass(frozen=True)
class AttentionTime:
    """Attention of one layer for `n_tokens` queries over `depth` cached positions.

    flash: one fused operator; else K*q, softmax and V*p one after the other. A device that has no fused operator for a
    shape has times of the other form alone. kernel: of the fused operator on a CPU, one of KERNELS.
    """

    device: str
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    type_k: str
    type_v: str
    n_tokens: int
    depth: int
    median_s: float
    spread_s: float = 0.0
    flash: bool = True
    best_s: float = 0.0
    clean: float = 1.0
    kernel: str = "ggml"


@dataclass(frozen=True)
class Note:
    """What a reader of the times should know of one measurement: why it is missing, or how it differs from the rest."""

    device: str
    task: str
    text: str


@dataclass(frozen=True)
class LinkTime:
    """One copy of `bytes` between the host and `device`; direction "h2d" or "d2h", memory "pageable" or "pinned"."""

    device: str
    direction: str
    memory: str
    bytes: int
    median_s: float
    spread_s: float = 0.0
    best_s: float = 0.0
    clean: float = 1.0


@dataclass(frozen=True)
class SwitchTime:
    """What one change of device inside a graph costs beyond the copies themselves."""

    device: str
    median_s: float


@dataclass(frozen=True)
class Overlap:
    """How far copies to `device` from another thread hide behind what it computes: 0 not at all, 1 fully."""

    device: str
    share: float


@dataclass(frozen=True)
class Concurrency:
    """How far the computing of `device` and of the host hide behind each other: 0 not at all, 1 fully."""

    device: str
    share: float


@dataclass(frozen=True)
class OtherLoad:
    """What slowed the machine down while times of `device` were last measured.

    cpus: that other programs kept busy. memory_stall: share of the time in which a program waited for memory.
    throttled: times that heat or power limits slowed a CPU. frequency: of the CPUs at the end, as a share of their
    highest; None where the machine does not tell.
    """

    device: str
    cpus: float
    memory_stall: float = 0.0
    throttled: int = 0
    frequency: float | None = None


# Kinds of work whose times tend to be off together. Few tokens are bound by memory, prompts by arithmetic.
MATRICES, ATTENTION, TRANSFERS, CHANGES, SMALL = "matrices", "attention", "transfers", "changes", "small"
OF_PROMPTS = {MATRICES: "matrices of prompts", ATTENTION: "attention of prompts"}
KINDS = (MATRICES, ATTENTION, *OF_PROMPTS.values(), TRANSFERS, CHANGES, SMALL)
_PROMPT = 16  # tokens


def kind_of(entry: OperatorTime | AttentionTime | ChainTime | ShapeTime | LinkTime | SwitchTime) -> str:
    """The kind of work that an entry times."""
    kind = _kind_at_any_length(entry)
    return OF_PROMPTS.get(kind, kind) if getattr(entry, "n_tokens", 1) >= _PROMPT else kind


def _kind_at_any_length(entry: OperatorTime | AttentionTime | ChainTime | ShapeTime | LinkTime | SwitchTime) -> str:
    if isinstance(entry, OperatorTime):
        return SMALL if entry.op == OTHER else MATRICES
    if isinstance(entry, ChainTime):
        return MATRICES if entry.kind == FEED_FORWARD else SMALL
    return {AttentionTime: ATTENTION, ShapeTime: SMALL, LinkTime: TRANSFERS, SwitchTime: CHANGES}[type(entry)]
