"""From llama.cpp's raw graph (csrc/probe/graph_reader.cpp) to operators without views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .op_shapes import FLOPS_PER_BYTE, OpShape, Part, worth_timing
from .operators import (
    CACHE_PREFIX,
    KEYS,
    OUTPUT,
    TARGET_OPS,
    TOKEN_EMBEDDING,
    AttentionShape,
    Operator,
    attention_chains,
    layer_of,
)

# Nodes that move no data: ggml only relabels the bytes of their first source (ggml_is_view_op, plus NONE).
VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})


@dataclass
class GraphReader:
    """Sees through the views of one tier's raw nodes.

    A state of a later layer that llama.cpp makes ready before an earlier layer has ended counts as made ready where its
    own layer begins: what is planned are layers one after the other.
    """

    nodes: Sequence[Mapping[str, Any]]
    tied: bool
    position: dict[int, int] = field(init=False)  # raw node index -> operator index

    def __post_init__(self) -> None:
        computing = [i for i, node in enumerate(self.nodes) if node["op"] not in VIEW_OPS]
        self.position = {raw: index for index, raw in enumerate(computing)}
        self.position = {raw: index for index, raw in enumerate(self._by_layer(computing))}

    def _by_layer(self, computing: Sequence[int]) -> list[int]:
        """Raw indices, what begins a later layer moved behind the end of an earlier one."""
        end: dict[int, int] = {}  # layer -> its last raw node that reads a weight or has a name
        layer = {raw: self._layer(raw) for raw in computing}
        for raw in computing:
            named = str(self.nodes[raw]["name"]).endswith(f"-{layer[raw]}")
            reads = any(o is not None and o.get("is_weight") for o in self._origins(raw))
            if layer[raw] >= 0 and (named or reads):
                end[layer[raw]] = raw
        due: dict[int, int] = {}  # raw node -> the one it comes after

        def place(raw: int) -> tuple[int, bool, int]:
            return due.get(raw, raw), raw in due, raw

        before: dict[int, int] = {}  # layer -> the last end of the layers before it
        latest = -1
        for il in sorted({il for il in layer.values() if il >= 0}):
            before[il], latest = latest, max(latest, end.get(il, -1))
        ends = set(end.values())
        for raw in computing:
            if before.get(layer[raw], -1) > raw and raw not in ends:
                due[raw] = before[layer[raw]]
        for raw in reversed(computing):  # what reads before what is read
            for o in self._origins(raw):
                if o is not None and o["kind"] == "node" and place(o["index"]) > place(raw):
                    del due[o["index"]]
        return sorted(computing, key=place)

    def _origins(self, raw: int) -> list[Mapping[str, Any] | None]:
        return [self.origin(src) for src in self.nodes[raw]["src"]]

    def _layer(self, raw: int) -> int:
        """Of its name, or of the layer whose weight it reads; -1: of none."""
        layer = int(self.nodes[raw].get("layer", -1))
        names = (o["name"] for o in self._origins(raw) if o is not None and o.get("is_weight"))
        return layer if layer >= 0 else next((il for name in names if (il := layer_of(name)) is not None), -1)

    def origin(self, src: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The computing node or the leaf behind a chain of views; None for a view of nothing."""
        while src["kind"] == "node" and src["index"] not in self.position:
            behind = self.nodes[src["index"]]["src"]
            if not behind:
                return None
            src = behind[0]
        return src

    def operators(self) -> tuple[Operator, ...]:
        consumers: list[list[int]] = [[] for _ in self.position]
        builder = []
        for raw, index in self.position.items():
            node = self.nodes[raw]
            origins = [o for src in node["src"] if (o := self.origin(src)) is not None]
            producers = tuple(dict.fromkeys(self.position[o["index"]] for o in origins if o["kind"] == "node"))
            for p in producers:
                consumers[p].append(index)
            builder.append((node, origins, producers))
        ops = [
            self._operator(index, node, origins, producers, tuple(consumers[index]))
            for index, (node, origins, producers) in enumerate(builder)
        ]
        attends = {index for chain in attention_chains(ops).values() for index in chain}
        parts = [self._part(op, node, op.index in attends) for op, (node, _, _) in zip(ops, builder, strict=True)]
        timed = worth_timing(parts)
        return tuple(
            replace(op, shape=shape) if shape is not None and shape.key in timed else op
            for op, (shape, _) in zip(ops, parts, strict=True)
        )

    def _part(self, op: Operator, node: Mapping[str, Any], attends: bool) -> Part:
        if op.is_target:
            weight = next(o for o in map(self.origin, node["src"]) if o is not None and o.get("is_weight"))
            active = min(1.0, op.n_tokens * op.n_used / weight["ne"][2]) if op.op == "MUL_MAT_ID" else 1.0
            return Part(None, weight["nbytes"] * active + op.flops / FLOPS_PER_BYTE)
        if attends:
            return Part(None, op.nbytes_out + op.flops / FLOPS_PER_BYTE)
        shape = OpShape.make(node, [self._tensor(src) for src in node["src"]], [*map(self._is_cold, node["src"])])
        return Part(shape, op.nbytes_out if shape is None else shape.nbytes)

    def _is_cold(self, src: Mapping[str, Any]) -> bool:
        origin = self.origin(src)
        leaf = origin is not None and origin["kind"] == "leaf"
        return leaf and origin is not None and (origin["is_weight"] or origin["name"].startswith(CACHE_PREFIX))

    def _operator(
        self,
        index: int,
        node: Mapping[str, Any],
        origins: Sequence[Mapping[str, Any]],
        producers: tuple[int, ...],
        consumers: tuple[int, ...],
    ) -> Operator:
        leaves = [o for o in origins if o["kind"] == "leaf"]
        weights = [o for o in leaves if o["is_weight"]]
        is_target = node["op"] in TARGET_OPS and bool(weights)
        weight = weights[0]["name"] if weights else None
        if is_target and self.tied and weight == TOKEN_EMBEDDING:
            weight = OUTPUT
        layer = node.get("layer", -1)
        if layer < 0:
            # Not every node is named after its layer, but a layer's weight says where it belongs.
            layer = layer_of(weight) if weight else None
        ne = tuple(node["ne"])
        n_tokens, n_used = _work(node["op"], ne, weights[0]["ne"] if weights else ())
        return Operator(
            index=index,
            name=node["name"],
            op=node["op"],
            weight=weight,
            src_types=tuple(self._type(src) for src in node["src"]),
            ne=ne,
            nbytes_out=node["nbytes"],
            flops=float(node.get("flops", 0)),
            layer=layer,
            producers=producers,
            consumers=consumers,
            is_target=is_target,
            leaves=tuple(dict.fromkeys(o["name"] for o in leaves if not o["is_weight"])),
            n_tokens=n_tokens,
            n_used=n_used,
        )

    def _tensor(self, src: Mapping[str, Any]) -> Mapping[str, Any]:
        return src if src["kind"] == "leaf" else self.nodes[src["index"]]

    def _type(self, src: Mapping[str, Any]) -> str:
        return str(self._tensor(src)["type"])

    def _ne(self, src: Mapping[str, Any]) -> Sequence[int]:
        return tuple(self._tensor(src)["ne"])

    @cached_property
    def of_layer(self) -> dict[int, list[Mapping[str, Any]]]:
        """Computing nodes by layer, in execution order."""
        found: dict[int, list[Mapping[str, Any]]] = {}
        for raw in self.position:
            found.setdefault(self.nodes[raw].get("layer", -1), []).append(self.nodes[raw])
        return found

    def attention(self, layer: int) -> AttentionShape | None:
        """Attention of a layer, from its fused operator or from the two products of the unfused form."""
        key = value = None
        for node in self.of_layer.get(layer, ()):
            if node["op"] == "FLASH_ATTN_EXT":
                q, k, v = (self._ne(src) for src in node["src"][:3])
                return AttentionShape(n_head=q[2], n_head_kv=k[2], head_dim_k=k[0], head_dim_v=v[0])
            if node["op"] == "MUL_MAT":
                leaves = [o for o in map(self.origin, node["src"]) if o is not None and o["kind"] == "leaf"]
                # K*q reads the cache and sees K as [head_dim, n_kv, n_head_kv]; the next product without a weight is
                # V*p, which sees V as [n_kv, head_dim, n_head_kv].
                if key is None and any(KEYS.match(o["name"]) for o in leaves):
                    key = node
                elif key is not None and value is None and not any(o["is_weight"] for o in leaves):
                    value = node
        if key is None or value is None:
            return None
        k, q = (self._ne(src) for src in key["src"][:2])
        v = self._ne(value["src"][0])
        return AttentionShape(n_head=q[2], n_head_kv=k[2], head_dim_k=k[0], head_dim_v=v[1])


def _work(op: str, ne: tuple[int, ...], weight_ne: Sequence[int]) -> tuple[int, int]:
    """(tokens, experts used per token) of an operator with output shape `ne`."""
    padded = (*ne, 1, 1, 1, 1)
    if op == "MUL_MAT_ID":
        return padded[2], padded[1]
    if op == "FLASH_ATTN_EXT":
        return padded[2], 1
    if op == "MUL_MAT" and len(weight_ne) > 2 and weight_ne[2] > 1:
        return padded[1], 1  # a batched weight (one matrix per head): ne[2] counts matrices, not tokens
    return padded[1] * padded[2] * padded[3], 1
