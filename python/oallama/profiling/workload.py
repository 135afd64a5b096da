"""Which measurements a model needs: every distinct target operator, attention shape, link size. Pure; no engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from oallama.data.entries import FEED_FORWARD, KERNELS, padded_rows
from oallama.data.fusion import chains
from oallama.data.operators import Operator, OperatorGraph

# KV rows at which attention is measured. GPU kernels change at 8192.
DEPTHS = (256, 1024, 4096, 8192, 16384)
LINK_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
SMALL_OP_TIERS = (1, 32, 512)
# Fused attention changes its form between 32 tokens and a full micro-batch; a straight line would miss it by half.
ATTENTION_TIER = 128
# Without flash attention llama.cpp keeps V transposed, which it cannot do with a quantised cache.
UNFUSED_V_TYPES = ("f16", "bf16", "f32")


@dataclass(frozen=True)
class Task:
    """One call of a probe. `cost` is an estimate for the progress bar, in multiply-adds."""

    kind: str  # "mul_mat", "attention", "small", "chain", "shape", "links", "switch", "overlap" or "concurrency"
    arguments: tuple[tuple[str, Any], ...]
    cost: float

    @property
    def args(self) -> dict[str, Any]:
        return dict(self.arguments)

    def describe(self) -> str:
        a = self.args
        if self.kind == "mul_mat":
            return f"{a['type']} {a['k']}x{a['m']} n={a['n_tokens']} {a['realisation']}".rstrip()
        if self.kind == "attention":
            form = {True: "", False: " unfused"}[a["flash"]] if a["kernel"] == "ggml" else " of oallama"
            return f"attention n={a['n_tokens']} depth={a['depth']}{form}"
        if self.kind == "chain":
            return f"{a['chain']} {a['type']} {a['ne0']}x{a['ne1']} n={a['n_tokens']}"
        if self.kind == "shape":
            return str(a["shape"].key)
        return {
            "small": "norms and adds",
            "links": "links",
            "switch": "device change",
            "overlap": "copies beside computing",
            "concurrency": "computing beside the host",
        }[self.kind]


def _forms(type_v: str) -> list[dict[str, Any]]:
    """Forms of attention that a cache of this type allows."""
    unfused = [{"flash": False, "kernel": "ggml"}] if type_v in UNFUSED_V_TYPES else []
    return [{"flash": True, "kernel": kernel} for kernel in KERNELS] + unfused


def _task(kind: str, cost: float, **arguments: Any) -> Task:
    return Task(kind, tuple(sorted(arguments.items())), cost)


# Of mul_mat arguments (type, k, m, n_expert): whether the device repacks such a weight, or our kernels compute it.
Takes = Callable[[Mapping[str, Any]], bool]
# Of attention arguments without n_tokens and depth: whether the device has all operators of this form.
Attends = Callable[[Mapping[str, Any]], bool]


def depths_for(n_ctx: int) -> list[int]:
    """The depths worth measuring for a context of this size: up to all of its cache."""
    size = padded_rows(n_ctx)
    return sorted({min(depth, size) for depth in DEPTHS})


def _realisations(repacks: bool, tiles: bool) -> list[str]:
    """What is measured of a weight."""
    others = ["repacked"] * repacks + ["tiled"] * tiles
    return ["plain", *others] if others else [""]


def tasks_for(
    graph: OperatorGraph,
    *,
    depths: Sequence[int],
    type_k: str,
    type_v: str,
    accelerator: bool,
    repacks: Takes = lambda weight: False,
    tiles: Takes = lambda weight: False,
    attends: Attends = lambda attention: True,
) -> list[Task]:
    """The tasks of one device in the order they are best measured: those that read the same operands one after another,
    and of these the cheap and decisive ones first.

    Token counts are those of the graph's tiers. Operators that see one row of a prompt (the output head, and the last
    layer's feed-forward) are measured for one row and for as many as sequences may generate at once. `depths` are KV
    rows, rounded up to what llama.cpp pads them to; a prefill tier is measured at depths of at least its own token
    count. Attention is measured fused, by each of KERNELS, and, where the cache allows it, unfused, each where the
    device `attends` in that form. Weights are measured plain, where the device `repacks` them repacked, and where our
    kernels compute them there (`tiles`) tiled: the plan chooses.
    """
    shapes: dict[Task, None] = {}
    for tier in graph.tiers:
        for op in graph.targets(tier):
            k, m, n_expert = (*graph.tensor[op.weight or ""].ne, 1, 1)[:3]
            moe = op.op == "MUL_MAT_ID"
            weight = {
                "type": graph.tensor[op.weight or ""].type,
                "k": k,
                "m": m,
                "n_expert": n_expert if moe else 0,
            }
            n_used = op.n_used if moe else 0
            for n_tokens in token_counts(graph, op, tier):
                work = float(k) * m * n_tokens * max(1, n_used)
                counts = {"n_tokens": n_tokens, "n_used": n_used}
                for realisation in _realisations(repacks(weight), tiles(weight)):
                    shapes[_task("mul_mat", work, **weight, **counts, realisation=realisation)] = None
    tiers = {*graph.tiers, min(ATTENTION_TIER, max(graph.tiers))}
    few = {min(depths), max(depths)}  # large batches grow evenly with depth
    points = {(tier, padded_rows(max(depth, tier))) for tier in tiers for depth in (depths if tier == 1 else few)}
    for attention in {a: None for a in graph.attention if a is not None}:
        heads = {"type_k": type_k, "type_v": type_v, **attention._asdict()}
        forms = [form for form in _forms(type_v) if attends({**heads, **form})]
        for (tier, depth), form in product(sorted(points), forms):
            work = float(attention.n_head) * (attention.head_dim_k + attention.head_dim_v) * tier * depth
            shapes[_task("attention", work, **heads, n_tokens=tier, depth=depth, **form)] = None
    n_embd = graph.tensor["token_embd.weight"].ne[0]
    small = [_task("small", 1e6, n_embd=n_embd, n_tokens=n) for n in SMALL_OP_TIERS]
    links = [_task("links", 1e9), *(_task(kind, 1e8) for kind in ("switch", "overlap", "concurrency"))]
    rest = small + _shaped(graph)
    if not accelerator:
        return _by_operands(shapes) + rest
    return _by_operands(shapes) + rest + _chains(graph, type_k) + links


def _by_operands(tasks: Collection[Task]) -> list[Task]:
    """Tasks that read the same weight or cache together, the cheapest first: a probe fills memory for them once."""
    groups: dict[Any, list[Task]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: task.cost):
        a = task.args
        layout = a["realisation"] if task.kind == "mul_mat" else (a["depth"], a["flash"])
        varies = ("n_tokens", "n_used", "realisation", "depth", "flash", "kernel")
        same = tuple((name, value) for name, value in task.arguments if name not in varies)
        groups[task.kind, same, layout].append(task)
    return [task for group in groups.values() for task in group]


def token_counts(graph: OperatorGraph, op: Operator, tier: int) -> list[int]:
    """At which an operator of this tier is measured: behind the last layer's attention a prompt has the rows whose
    logits are wanted alone, but a decode step one of every sequence.
    """
    of_a_step = op.n_tokens < tier < max(graph.tiers)
    return [op.n_tokens, tier] if of_a_step else [op.n_tokens]


def _shaped(graph: OperatorGraph) -> list[Task]:
    """Operators that may not be small, in decode and in a full micro-batch: predictions read no other graph."""
    found = {
        op.shape.key: _task("shape", max(1e6, op.shape.nbytes), shape=op.shape, n_tokens=tier)
        for tier in (min(graph.tiers), max(graph.tiers))
        for op in graph.operators(tier)
        if op.shape is not None
    }
    return [*found.values()]


def _chains(graph: OperatorGraph, type_k: str) -> list[Task]:
    """Chains that a backend may compute in one piece: a feed-forward in decode, the others at all counts."""
    found = {(c.kind, c.type, c.ne): c for tier in graph.tiers for c in chains(graph, tier, type_k)}
    return [
        _task("chain", 1e6, chain=kind, type=type, ne0=ne[0], ne1=ne[1], n_tokens=n)
        for kind, type, ne in found
        for n in (SMALL_OP_TIERS[:1] if kind == FEED_FORWARD else SMALL_OP_TIERS)
    ]
