"""Synthetic graphs, profiles and dry runs for planner tests: real shapes, invented times, no engine.

`raw_graph` speaks the engine's dictionary (views included), so `OperatorGraph.from_engine` is always in the path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from oallama.data.entries import (
    OTHER,
    AttentionTime,
    ChainTime,
    Concurrency,
    DeviceInfo,
    LinkTime,
    OperatorTime,
    Overlap,
    SwitchTime,
)
from oallama.data.fusion import chains
from oallama.data.plan import HOST, ContextSettings, PlacementPlan
from oallama.data.profile import Profile
from oallama.data.workload import Workload
from oallama.planning import OperatorGraph, Space, parse_budget
from oallama.planning.plan_builder import MemoryDryRun
from oallama.planning.planner import DEFAULT_WORKLOAD

BYTES = {"f32": 4.0, "f16": 2.0, "q8_0": 34 / 32, "q4_K": 144 / 256}


@dataclass(frozen=True)
class Shape:
    """A llama-like model. n_expert = 0 is dense, n_ff = 0 has no feed-forward; one_qkv: a single matrix for q, k, v.

    indexed: fused attention reads a matrix more, which the unfused form has no use for (sparse attention).
    """

    n_layer: int = 4
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 16
    n_ff: int = 128
    n_vocab: int = 256
    type: str = "f16"
    tied: bool = False
    n_expert: int = 0
    n_used: int = 2
    fused: bool = True
    one_qkv: bool = False
    indexed: bool = False


SMALL = Shape()
QWQ_32B = Shape(64, 5120, 40, 8, 128, 27648, 152064, "q4_K")


@dataclass
class _Builder:
    """Appends raw nodes the way llama.cpp lists them: execution order, views as nodes."""

    shape: Shape
    tokens: int
    nodes: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)

    def weight(self, name: str, ne: Sequence[int], type: str | None = None) -> dict[str, Any]:
        kind = type or self.shape.type
        count = 1
        for d in ne:
            count *= d
        leaf = {"name": name, "type": kind, "ne": [*ne, 1, 1, 1][:4], "nbytes": int(count * BYTES[kind])}
        self.weights.setdefault(name, leaf)
        return {"kind": "leaf", "is_weight": True, **leaf}

    def leaf(self, name: str, ne: Sequence[int], type: str = "f32") -> dict[str, Any]:
        return {"kind": "leaf", "is_weight": False, "name": name, "type": type, "ne": [*ne, 1, 1, 1][:4], "nbytes": 0}

    def node(self, op: str, name: str, ne: Sequence[int], *src: Mapping[str, Any], layer: int = -1) -> dict[str, Any]:
        shape = [*ne, 1, 1, 1][:4]
        count = shape[0] * shape[1] * shape[2] * shape[3]
        self.nodes.append(
            {"name": name, "op": op, "type": "f32", "ne": shape, "nbytes": 4 * count, "flops": 0, "flags": 0,
             "src": list(src), "layer": layer}
        )  # fmt: skip
        return {"kind": "node", "index": len(self.nodes) - 1}

    def norm(self, x: Mapping[str, Any], weight: str, layer: int) -> dict[str, Any]:
        s, t = self.shape, self.tokens
        y = self.node("RMS_NORM", f"norm-{layer}", [s.n_embd, t], x, layer=layer)
        return self.node(
            "MUL", f"{weight}-{layer}", [s.n_embd, t], y, self.weight(weight, [s.n_embd], "f32"), layer=layer
        )

    def mul_mat(self, name: str, rows: int, x: Mapping[str, Any], k: int, layer: int) -> dict[str, Any]:
        return self.node("MUL_MAT", name, [rows, self.tokens], self.weight(name, [k, rows]), x, layer=layer)

    def attention(self, x: Mapping[str, Any], il: int) -> dict[str, Any]:
        s, t, b = self.shape, self.tokens, f"blk.{il}."
        heads, kv = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
        n_kv = 256
        if s.one_qkv:
            q = k = v = self.mul_mat(b + "attn_qkv.weight", heads + 2 * kv, x, s.n_embd, il)
        else:
            q = self.mul_mat(b + "attn_q.weight", heads, x, s.n_embd, il)
            k = self.mul_mat(b + "attn_k.weight", kv, x, s.n_embd, il)
            v = self.mul_mat(b + "attn_v.weight", kv, x, s.n_embd, il)
        if s.indexed:
            self.weight(b + "index_q.weight", [s.n_embd, s.head_dim])
            if s.fused:
                self.mul_mat(b + "index_q.weight", s.head_dim, x, s.n_embd, il)
        q = self.node("RESHAPE", f"q-{il}", [s.head_dim, s.n_head, t], q, layer=il)
        q = self.node("ROPE", f"q-{il}", [s.head_dim, s.n_head, t], q, self.leaf("inp_pos", [t]), layer=il)
        k = self.node("RESHAPE", f"k-{il}", [s.head_dim, s.n_head_kv, t], k, layer=il)
        k = self.node("ROPE", f"k-{il}", [s.head_dim, s.n_head_kv, t], k, self.leaf("inp_pos", [t]), layer=il)
        cache = {c: self.leaf(f"cache_{c}_l{il}", [kv, n_kv], "f16") for c in "kv"}
        for c, rows in (("k", k), ("v", v)):
            view = self.node("VIEW", f"cache_{c}_l{il} (view)", [kv, n_kv], cache[c], layer=il)
            self.node("SET_ROWS", f"cache_{c}_l{il} (view)", [kv, n_kv], rows, self.leaf("idx", [t]), view, layer=il)
        q = self.node("PERMUTE", f"q-{il}", [s.head_dim, t, s.n_head], q, layer=il)
        shape_k, shape_v = [s.head_dim, n_kv, s.n_head_kv], [n_kv, s.head_dim, s.n_head_kv]
        seen_k = self.node("VIEW", f"k-{il}", shape_k, cache["k"], layer=il)
        if s.fused:
            seen_v = self.node("VIEW", f"v-{il}", shape_k, cache["v"], layer=il)
            y = self.node("FLASH_ATTN_EXT", f"fa-{il}", [s.head_dim, s.n_head, t], q, seen_k, seen_v, layer=il)
        else:
            kq = self.node("MUL_MAT", f"kq-{il}", [n_kv, t, s.n_head], seen_k, q, layer=il)
            kq = self.node("SOFT_MAX", f"kq-{il}", [n_kv, t, s.n_head], kq, layer=il)
            seen_v = self.node("VIEW", f"v-{il}", shape_v, cache["v"], layer=il)
            y = self.node("MUL_MAT", f"kqv-{il}", [s.head_dim, t, s.n_head], seen_v, kq, layer=il)
            y = self.node("PERMUTE", f"kqv-{il}", [s.head_dim, s.n_head, t], y, layer=il)
            y = self.node("CONT", f"kqv-{il}", [heads, t], y, layer=il)
        y = self.node("RESHAPE", f"kqv_out-{il}", [heads, t], y, layer=il)
        return self.mul_mat(b + "attn_output.weight", s.n_embd, y, heads, il)

    def feed_forward(self, x: Mapping[str, Any], il: int) -> dict[str, Any]:
        s, t, b = self.shape, self.tokens, f"blk.{il}."
        if not s.n_expert:
            up = self.mul_mat(b + "ffn_up.weight", s.n_ff, x, s.n_embd, il)
            gate = self.mul_mat(b + "ffn_gate.weight", s.n_ff, x, s.n_embd, il)
            y = self.node("GLU", f"swiglu-{il}", [s.n_ff, t], gate, up, layer=il)
            return self.mul_mat(b + "ffn_down.weight", s.n_embd, y, s.n_ff, il)
        logits = self.node(
            "MUL_MAT", f"router-{il}", [s.n_expert, t],
            self.weight(b + "ffn_gate_inp.weight", [s.n_embd, s.n_expert], "f32"), x, layer=il,
        )  # fmt: skip
        ids = self.node("ARGSORT", f"top-{il}", [s.n_used, t], logits, layer=il)

        def experts(name: str, k: int, m: int, src: Mapping[str, Any]) -> dict[str, Any]:
            return self.node(
                "MUL_MAT_ID", name, [m, s.n_used, t], self.weight(b + name, [k, m, s.n_expert]), src, ids, layer=il
            )

        up = experts("ffn_up_exps.weight", s.n_embd, s.n_ff, x)
        gate = experts("ffn_gate_exps.weight", s.n_embd, s.n_ff, x)
        y = self.node("GLU", f"swiglu-{il}", [s.n_ff, s.n_used, t], gate, up, layer=il)
        y = experts("ffn_down_exps.weight", s.n_ff, s.n_embd, y)
        return self.node("ADD", f"moe_out-{il}", [s.n_embd, t], y, layer=il)

    def build(self) -> None:
        s, t = self.shape, self.tokens
        embedding = self.weight("token_embd.weight", [s.n_embd, s.n_vocab])
        x = self.node("GET_ROWS", "inp_embd", [s.n_embd, t], embedding, self.leaf("inp_tokens", [t], "i32"))
        for il in range(s.n_layer):
            y = self.attention(self.norm(x, f"blk.{il}.attn_norm.weight", il), il)
            x = self.node("ADD", f"ffn_inp-{il}", [s.n_embd, t], y, x, layer=il)
            if not s.n_ff:
                continue
            y = self.feed_forward(self.norm(x, f"blk.{il}.ffn_norm.weight", il), il)
            x = self.node("ADD", f"l_out-{il}", [s.n_embd, t], y, x, layer=il)
        x = self.norm(x, "output_norm.weight", -1)
        head = embedding if s.tied else self.weight("output.weight", [s.n_embd, s.n_vocab])
        self.node("MUL_MAT", "result_output", [s.n_vocab, t], head, x)


def raw_graph(shape: Shape = SMALL, tiers: Sequence[int] = (1, 512)) -> dict[str, Any]:
    """What the engine's graph reader returns for a model of this shape."""
    builders = [_Builder(shape, n) for n in tiers]
    for builder in builders:
        builder.build()
    return {
        "arch": "llama",
        "n_layer": shape.n_layer,
        "n_ctx_train": 32768,
        "tensors": list(builders[0].weights.values()),
        "graphs": {str(n): builder.nodes for n, builder in zip(tiers, builders, strict=True)},
        "model": {"name": "synthetic", "size": 123, "n_tensors": len(builders[0].weights)},
    }


def graph(shape: Shape = SMALL, tiers: Sequence[int] = (1, 512)) -> OperatorGraph:
    return OperatorGraph.from_engine(raw_graph(shape, tiers))


@dataclass(frozen=True)
class Speed:
    """A device's roofline: bytes/s of weights, flop/s, seconds per operator."""

    bandwidth: float
    flops: float
    overhead: float = 5e-6


GPU = Speed(800e9, 80e12)
CPU = Speed(50e9, 1e12)
DEVICE = "GPU0"
CONTEXT = ContextSettings(n_ctx=4096)


def profile(
    model: OperatorGraph,
    *,
    gpu: Speed = GPU,
    cpu: Speed = CPU,
    link: float = 12e9,
    latency: float = 1e-5,
    op_offload: bool = True,
    memory_total: int = 0,
    host_memory: int = 64 * 2**30,
    more: Mapping[str, Speed] | None = None,
    flash: Sequence[bool] = (True,),
    overlap: float = 0.0,
    concurrency: float = 0.0,
    in_one_piece: Mapping[str, float] | None = None,
    own: float | None = None,
) -> Profile:
    """Times of every target operator of `model` by rooflines, attention, links and switches.

    more: further accelerators by name. flash: the forms of attention with times; fused is 1.25x as fast. overlap: of
    copies with computing. concurrency: of the accelerators' computing with the host's. in_one_piece: seconds of
    chains of operators on accelerators, by kind. own: how many times as fast our kernels of attention are on the host.
    """
    operators, attention, links = [], [], []
    accelerators = {DEVICE: gpu, **(more or {})}
    for device, speed in {**accelerators, HOST: cpu}.items():
        for tier in model.tiers:
            for op in model.targets(tier):
                tensor = model.tensor[op.weight or ""]
                k, m, experts = tensor.ne[:3]
                active = min(experts, op.n_tokens * op.n_used)
                moved = tensor.nbytes / experts * active
                flops = 2.0 * k * m * op.n_tokens * op.n_used
                seconds = max(moved / speed.bandwidth, flops / speed.flops) + speed.overhead
                operators.append(
                    OperatorTime(device, op.op, tensor.type, (k, m, experts), op.n_used, op.n_tokens, seconds)
                )
        for tier in model.tiers:
            operators.append(OperatorTime(device, OTHER, "f32", (64, 1, 1), 1, tier, 1e-6 * tier**0.5))
        for shape in {s for s in model.attention if s}:
            for tier in model.tiers:
                for depth in (1, 4096, 32768):
                    values = depth * shape.n_head_kv * (shape.head_dim_k + shape.head_dim_v) * 2
                    work = 2.0 * depth * shape.n_head * (shape.head_dim_k + shape.head_dim_v) * tier
                    seconds = max(values / speed.bandwidth, work / speed.flops) + speed.overhead
                    for fused in flash:
                        took = seconds if fused else 1.25 * seconds
                        attention.append(AttentionTime(device, *shape, "f16", "f16", tier, depth, took, flash=fused))
                    if own and device == HOST:
                        attention.append(replace(attention[-1], median_s=seconds / own, flash=True, kernel="oallama"))
    for name, direction in product(accelerators, ("h2d", "d2h")):
        for nbytes in (4, 2**12, 2**20, 2**28):
            links.append(LinkTime(name, direction, "pageable", nbytes, latency + nbytes / link))
            links.append(LinkTime(name, direction, "pinned", nbytes, latency + nbytes / (2 * link)))
    return Profile(
        created="2026-01-01T00:00:00Z",
        fingerprint={"cpu": "synthetic", "threads": 16, "engine": "1"},
        devices=(
            *(
                DeviceInfo(name, "synthetic accelerator", "gpu", memory_total, "SYN", op_offload)
                for name in accelerators
            ),
            DeviceInfo(HOST, "synthetic host", "cpu", host_memory, "CPU"),
        ),
        operators=tuple(operators),
        attention=tuple(attention),
        links=tuple(links),
        switches=tuple(SwitchTime(name, 2e-5) for name in accelerators),
        overlaps=tuple(Overlap(name, overlap) for name in accelerators),
        concurrency=tuple(Concurrency(name, concurrency) for name in accelerators),
        chains=tuple(
            ChainTime(name, chain.kind, chain.type, chain.ne, tier, (in_one_piece or {})[chain.kind])
            for name in accelerators
            for tier in model.tiers
            for chain in {replace(c, ops=()): c for c in chains(model, tier, "f16")}.values()
            if chain.kind in (in_one_piece or {})
        ),
    )


@dataclass
class FakeMemory:
    """A dry run: KV cache by layer and context, compute buffers that follow the micro-batch. Keeps the plans it saw.

    compute: bytes on every device that computes, at a micro-batch of 512 tokens. logits: bytes more on the output
    layer's device per row with logits. split_extra: bytes more as soon as any target is on the host. What is uploaded
    takes the room of the largest such weight on the first accelerator, what is streamed that of its slots.
    """

    model: OperatorGraph
    compute: int = 2**20
    logits: int = 0
    split_extra: int = 0
    plans: list[PlacementPlan] = field(default_factory=list)

    def __call__(self, plan: PlacementPlan) -> dict[str, dict[str, int]]:
        self.plans.append(plan)
        context = plan.context
        result = {name: {"weights": 0, "kv": 0, "compute": 0} for name in plan.devices}
        for tensor in plan.tensors.values():
            result[tensor.device]["weights"] += tensor.nbytes
            for part in tensor.segments[1:]:
                result[part.device]["weights"] += part.nbytes
        for shape, home in zip(self.model.attention, plan.layers, strict=False):
            assert shape is not None
            result[home]["kv"] += 2 * context.n_ctx * shape.n_head_kv * (shape.head_dim_k + shape.head_dim_v)
        computing = {*plan.layers, *(t.device for t in plan.tensors.values() if t.mode == "resident")}
        mixed = any(plan.tensors[op.weight].device == HOST for op in self.model.targets(1) if op.weight)
        uploads = [t.nbytes for t in plan.tensors.values() if t.mode == "upload"]
        streams = [t.nbytes for t in plan.tensors.values() if t.mode == "stream"]
        slots = min(plan.stream_slots, len(streams)) * max(streams, default=0)
        for i, name in enumerate(plan.devices):
            if i == 0 and name != HOST:
                result[name]["compute"] += slots
            if name == HOST or name not in computing:
                continue
            buffers = self.compute * context.n_ubatch // 512 + self.split_extra * mixed
            result[name]["compute"] += buffers + (max(uploads, default=0) if i == 0 else 0)
        result[plan.layers[-1]]["compute"] += self.logits * (context.n_outputs_max or context.n_ubatch)
        return result


def space(
    model: OperatorGraph,
    budget: str | int | Mapping[str, str | int] = "auto",
    *,
    machine: Profile | None = None,
    memory: MemoryDryRun | None = None,
    context: ContextSettings = CONTEXT,
    workload: Workload = DEFAULT_WORKLOAD,
    accelerators: Sequence[str] = (DEVICE,),
    free: int = 10**12,
    **more: Any,
) -> Space:
    """A request for `model` on a synthetic machine; budget: for every accelerator, or by its name."""
    asked = budget if isinstance(budget, Mapping) else dict.fromkeys(accelerators, budget)
    return Space(
        graphs=more.pop("graphs", {context.flash_attn: model}),
        profile=machine or profile(model),
        accelerators=tuple(accelerators),
        budgets={
            name: parse_budget(asked[name], weights_bytes=model.weights_bytes, free_bytes=free) for name in accelerators
        },
        memory=memory or FakeMemory(model),
        context=context,
        workload=workload,
        **more,
    )
