"""The operators of a model's forward graph, as planners see them.

`OperatorGraph.from_engine` turns the raw graph of llama.cpp (csrc/probe/graph_reader.cpp) into operators without
views, so that producers and consumers are the operators that really compute. Data only: nothing here knows a device or
a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..base.jsonfile import parse_json_object
from ..errors import OallamaError
from .op_shapes import OpShape

SCHEMA = "oallama.graph/3"
TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"

TARGET_OPS = frozenset({"MUL_MAT", "MUL_MAT_ID"})
# llama.cpp names the leaves of its KV (and recurrent state) caches cache_k_l0, cache_v_l0, cache_r_l0, ...
CACHE_PREFIX = "cache_"
# Keys that attention multiplies with: not an indexer's, nor a recurrent state.
KEYS = re.compile(r"^cache_k_l\d+")

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
    """A weight in the model file. `ne` is ggml's order (ne[0] = row length); `type` a ggml type name ("q4_K").

    lazy: a table whose rows are read from the file when they are wanted; it takes no memory.
    """

    name: str
    type: str
    ne: tuple[int, ...]
    nbytes: int
    layer: int | None
    kind: str
    lazy: bool = False

    @classmethod
    def make(cls, name: str, type: str, ne: Sequence[int], nbytes: int, lazy: bool = False) -> TensorInfo:
        """A tensor whose layer and kind follow from its name."""
        return cls(name, type, tuple(ne), nbytes, layer_of(name), kind_of(name), lazy)


@dataclass(frozen=True)
class Operator:
    """One computing node of the forward graph at one tier.

    `index` is the position in execution order within the tier; `producers`/`consumers` are such positions, with views
    seen through. `weight` is the weight it reads and `leaves` the other graph leaves (caches, inputs). `nbytes_out` are
    the bytes of its result: what a transfer to another device costs. `n_tokens` and `n_used` (experts per token, 1 for
    dense) describe the work of a matrix multiplication. `shape` is of an operator that may cost more than a small one.
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
    shape: OpShape | None = None

    @property
    def touches_cache(self) -> bool:
        """Whether it reads or writes the KV cache (or a recurrent state)."""
        return any(leaf.startswith(CACHE_PREFIX) for leaf in self.leaves)


@dataclass(frozen=True)
class OperatorGraph:
    """A model's weights and the operators of its forward pass at several token counts (tiers).

    `tiers` maps a token count to the operators in execution order. `model` is the fingerprint of the file. A tied
    output matrix is listed as `output.weight` (`tied_output` is then True). `attention` has one entry per layer, None
    where a layer has no attention. Behind the `n_layer` layers of the model come `n_heads` for multi-token prediction
    (MTP heads), whose operators are in the graph of their own context only.
    """

    arch: str
    n_layer: int
    tensors: tuple[TensorInfo, ...]
    tiers: Mapping[int, tuple[Operator, ...]]
    model: Mapping[str, Any]
    tied_output: bool
    attention: tuple[AttentionShape | None, ...]
    n_ctx_train: int = 0
    n_heads: int = 0

    @property
    def n_layer_all(self) -> int:
        """Layers with MTP heads: all that llama.cpp counts when it deals them to devices."""
        return self.n_layer + self.n_heads

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
        """Bytes of all weights but lazy tables; a tied output counts once, as in the file."""
        return sum(t.nbytes for t in self.tensors if not (t.lazy or (self.tied_output and t.name == OUTPUT)))

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture: some operator reads only the experts that are chosen."""
        return any(op.op == "MUL_MAT_ID" for op in next(iter(self.tiers.values()), ()))

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
        from .raw_graph import GraphReader  # which makes operators

        # An embedding that is the output too is there twice, if it is repacked as the output.
        infos = (
            TensorInfo.make(t["name"], t["type"], t["ne"], t["nbytes"], t.get("lazy", False)) for t in raw["tensors"]
        )
        by_name = {info.name: info for info in infos}
        tensors, names = list(by_name.values()), by_name.keys()
        tied = OUTPUT not in names and any(
            node["op"] in TARGET_OPS and any(s.get("name") == TOKEN_EMBEDDING for s in node["src"])
            for nodes in raw["graphs"].values()
            for node in nodes
        )
        if tied:
            embedding = by_name[TOKEN_EMBEDDING]
            tensors.append(TensorInfo.make(OUTPUT, embedding.type, embedding.ne, embedding.nbytes))
        readers = {int(n): GraphReader(nodes, tied) for n, nodes in raw["graphs"].items()}
        first, n_heads = readers[min(readers)], raw.get("n_heads", 0)
        return cls(
            arch=raw["arch"],
            n_layer=raw["n_layer"],
            tensors=tuple(tensors),
            tiers={n: readers[n].operators() for n in sorted(readers)},
            model=dict(model if model is not None else raw.get("model", {})),
            tied_output=tied,
            attention=tuple(first.attention(il) for il in range(raw["n_layer"] + n_heads)),
            n_ctx_train=raw.get("n_ctx_train", 0),
            n_heads=n_heads,
        )

    def to_json(self) -> str:
        """The graph as JSON text, for the cache of parsed models."""
        content = {
            "schema": SCHEMA,
            "arch": self.arch,
            "n_layer": self.n_layer,
            "n_ctx_train": self.n_ctx_train,
            "n_heads": self.n_heads,
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
                tiers={int(n): tuple(_operator(op) for op in ops) for n, ops in content["tiers"].items()},
                model=content["model"],
                tied_output=content["tied_output"],
                attention=tuple(None if a is None else AttentionShape(*a) for a in content["attention"]),
                n_ctx_train=content["n_ctx_train"],
                n_heads=content["n_heads"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise OallamaError(f"cached operator graph is incomplete ({e}); {remedy}") from None


def _operator(fields: Mapping[str, Any]) -> Operator:
    return Operator(**{**_tuples(fields), "shape": OpShape.from_json(fields["shape"])})


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def attention_chains(ops: Sequence[Operator]) -> dict[int, list[int]]:
    """Layer -> positions of its attention: the fused operator, or all from K*q to V*p."""
    found: dict[int, list[int]] = {}
    ended: set[int] = set()
    for op in ops:
        if op.op == "FLASH_ATTN_EXT" and op.layer is not None:
            found.setdefault(op.layer, [op.index])
            ended.add(op.layer)
    for op in ops:
        if op.layer is None or op.layer in ended or op.weight is not None:
            continue
        begins = op.op == "MUL_MAT" and any(map(KEYS.match, op.leaves))
        if op.layer in found:
            found[op.layer].append(op.index)
            if op.op == "MUL_MAT":
                ended.add(op.layer)
        elif begins:
            found[op.layer] = [op.index]
    return found
