"""The operators of a model's forward graph, as planners see them.

`OperatorGraph.from_engine` turns the raw graph of llama.cpp (csrc/probe/graph_reader.cpp) into operators without
views, so that producers and consumers are the operators that really compute. Data only: nothing here knows a device or
a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..base.jsonfile import parse_json_object
from ..errors import OallamaError

SCHEMA = "oallama.graph/1"
TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

# Nodes that move no data: ggml only relabels the bytes of their first source (ggml_is_view_op, plus NONE).
VIEW_OPS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
TARGET_OPS = frozenset({"MUL_MAT", "MUL_MAT_ID"})
# llama.cpp names the leaves of its KV (and recurrent state) caches cache_k_l0, cache_v_l0, cache_r_l0, ...
CACHE_PREFIX = "cache_"

_BLOCK = re.compile(r"^blk\.(\d+)\.(.+)$")


def layer_of(tensor_name: str) -> int | None:
    """Layer number of a tensor: 3 for "blk.3.ffn_up.weight", None for "output.weight"."""
    match = _BLOCK.match(tensor_name)
    return int(match[1]) if match else None


def kind_of(tensor_name: str) -> str:
    """What a tensor is in its layer: "ffn_up" for "blk.3.ffn_up.weight"; biases keep ".bias"."""
    match = _BLOCK.match(tensor_name)
    return (match[2] if match else tensor_name).removesuffix(".weight")


class AttentionShape(NamedTuple):
    """Shape of one layer's attention: heads, heads of the KV cache, values per head of K and of V."""

    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int


@dataclass(frozen=True)
class TensorInfo:
    """A weight in the model file. `ne` is ggml's order (ne[0] = row length); `type` a ggml type name ("q4_K")."""

    name: str
    type: str
    ne: tuple[int, ...]
    nbytes: int
    layer: int | None
    kind: str

    @classmethod
    def make(cls, name: str, type: str, ne: Sequence[int], nbytes: int) -> TensorInfo:
        """A tensor whose layer and kind follow from its name."""
        return cls(name, type, tuple(ne), nbytes, layer_of(name), kind_of(name))


@dataclass(frozen=True)
class Operator:
    """One computing node of the forward graph at one tier.

    `index` is the position in execution order within the tier; `producers`/`consumers` are such positions, with views
    seen through. `weight` is the weight it reads and `leaves` the other graph leaves (caches, inputs). `nbytes_out` are
    the bytes of its result: what a transfer to another device costs. `n_tokens` and `n_used` (experts per token, 1 for
    dense) describe the work of a matrix multiplication.
    """

    index: int
    name: str
    op: str
    weight: str | None
    src_types: tuple[str, ...]
    ne: tuple[int, ...]
    nbytes_out: int
    flops: float
    layer: int | None
    producers: tuple[int, ...]
    consumers: tuple[int, ...]
    is_target: bool
    leaves: tuple[str, ...] = ()
    n_tokens: int = 1
    n_used: int = 1

    @property
    def touches_cache(self) -> bool:
        """Whether it reads or writes the KV cache (or a recurrent state)."""
        return any(leaf.startswith(CACHE_PREFIX) for leaf in self.leaves)


@dataclass(frozen=True)
class OperatorGraph:
    """A model's weights and the operators of its forward pass at several token counts (tiers).

    `tiers` maps a token count to the operators in execution order. `model` is the fingerprint of the file. A tied
    output matrix is listed as `output.weight` (`tied_output` is then True). `attention` has one entry per layer, None
    where a layer has no attention.
    """

    arch: str
    n_layer: int
    tensors: tuple[TensorInfo, ...]
    tiers: Mapping[int, tuple[Operator, ...]]
    model: Mapping[str, Any]
    tied_output: bool
    attention: tuple[AttentionShape | None, ...]
    n_ctx_train: int = 0

    @cached_property
    def tensor(self) -> Mapping[str, TensorInfo]:
        """Tensors by name."""
        return {t.name: t for t in self.tensors}

    @cached_property
    def derived(self) -> dict[tuple[Any, ...], Any]:
        """What others computed from this graph alone and find here again."""
        return {}

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights; a tied output counts once, as in the file."""
        return sum(t.nbytes for t in self.tensors if not (self.tied_output and t.name == OUTPUT))

    def targets(self, tier: int) -> tuple[Operator, ...]:
        """Target operators (mul_mat / mul_mat_id with a weight) of a tier, in execution order."""
        return tuple(op for op in self.operators(tier) if op.is_target)

    def operators(self, tier: int) -> tuple[Operator, ...]:
        """All operators of a tier. Raises OallamaError when the graph was not read at that token count."""
        try:
            return self.tiers[tier]
        except KeyError:
            have = ", ".join(map(str, sorted(self.tiers)))
            raise OallamaError(f"the operator graph has no tier of {tier} tokens, only {have}; read it again") from None

    @classmethod
    def from_engine(cls, raw: Mapping[str, Any], model: Mapping[str, Any] | None = None) -> OperatorGraph:
        """Build the graph from the engine's dictionary (docs: csrc/probe/graph_reader.cpp).

        `model` is the file's fingerprint; default `raw["model"]` or empty.
        """
        # An embedding that is the output too is there twice, if it is repacked as the output.
        by_name = {t["name"]: TensorInfo.make(t["name"], t["type"], t["ne"], t["nbytes"]) for t in raw["tensors"]}
        tensors, names = list(by_name.values()), by_name.keys()
        tied = OUTPUT not in names and any(
            node["op"] in TARGET_OPS and any(s.get("name") == TOKEN_EMBEDDING for s in node["src"])
            for nodes in raw["graphs"].values()
            for node in nodes
        )
        if tied:
            embedding = by_name[TOKEN_EMBEDDING]
            tensors.append(TensorInfo.make(OUTPUT, embedding.type, embedding.ne, embedding.nbytes))
        readers = {int(n): _GraphReader(nodes, tied) for n, nodes in raw["graphs"].items()}
        first = readers[min(readers)]
        return cls(
            arch=raw["arch"],
            n_layer=raw["n_layer"],
            tensors=tuple(tensors),
            tiers={n: readers[n].operators() for n in sorted(readers)},
            model=dict(model if model is not None else raw.get("model", {})),
            tied_output=tied,
            attention=tuple(first.attention(il) for il in range(raw["n_layer"])),
            n_ctx_train=raw.get("n_ctx_train", 0),
        )

    def to_json(self) -> str:
        """The graph as JSON text, for the cache of parsed models."""
        content = {
            "schema": SCHEMA,
            "arch": self.arch,
            "n_layer": self.n_layer,
            "n_ctx_train": self.n_ctx_train,
            "model": dict(self.model),
            "tied_output": self.tied_output,
            "attention": self.attention,
            "tensors": [asdict(t) for t in self.tensors],
            "tiers": {str(n): [asdict(op) for op in ops] for n, ops in self.tiers.items()},
        }
        return json.dumps(content)

    @classmethod
    def from_json(cls, text: str) -> OperatorGraph:
        """Read `to_json`'s text. Raises OallamaError when it is corrupt or of another version."""
        remedy = "delete it and run the command again to parse the model anew"
        content = parse_json_object(text, "cached operator graph", remedy)
        if content.get("schema") != SCHEMA:
            raise OallamaError(
                f"cached operator graph has schema {content.get('schema')!r}, expected {SCHEMA!r}; {remedy}"
            )
        try:
            return cls(
                arch=content["arch"],
                n_layer=content["n_layer"],
                tensors=tuple(TensorInfo(**_tuples(t)) for t in content["tensors"]),
                tiers={int(n): tuple(Operator(**_tuples(op)) for op in ops) for n, ops in content["tiers"].items()},
                model=content["model"],
                tied_output=content["tied_output"],
                attention=tuple(None if a is None else AttentionShape(*a) for a in content["attention"]),
                n_ctx_train=content["n_ctx_train"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise OallamaError(f"cached operator graph is incomplete ({e}); {remedy}") from None


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


@dataclass
class _GraphReader:
    """Sees through the views of one tier's raw nodes."""

    nodes: Sequence[Mapping[str, Any]]
    tied: bool
    position: dict[int, int] = field(init=False)  # raw node index -> operator index

    def __post_init__(self) -> None:
        computing = [i for i, node in enumerate(self.nodes) if node["op"] not in VIEW_OPS]
        self.position = {raw: index for index, raw in enumerate(computing)}

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
        return tuple(
            self._operator(index, node, origins, producers, tuple(consumers[index]))
            for index, (node, origins, producers) in enumerate(builder)
        )

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

    def _type(self, src: Mapping[str, Any]) -> str:
        return str((src if src["kind"] == "leaf" else self.nodes[src["index"]])["type"])

    def _ne(self, src: Mapping[str, Any]) -> Sequence[int]:
        return tuple((src if src["kind"] == "leaf" else self.nodes[src["index"]])["ne"])

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
                if key is None and any(o["name"].startswith(CACHE_PREFIX) for o in leaves):
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
