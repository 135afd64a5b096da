"""Compute buffers: what a graph needs at least on each device, and what ggml's allocator and an offline layout take.

An arena is what one compute buffer holds while one graph runs; a block is one allocation in it, alive from its first
to its last use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..data.plan import HOST, ContextSettings


@dataclass(frozen=True)
class Arena:
    """One compute buffer of one graph; bytes.

    Attributes:
        n_tokens, n_outputs: of the graph: tokens, and rows whose logits are computed.
        device: whose memory it is.
        online: taken by ggml's allocator, which places blocks in the order of the graph.
        offline: taken by the better of GREEDY_BY_SIZE and GREEDY_BY_BREADTH (arXiv 2001.03288), which know all
            lifetimes beforehand.
        bound: alive at the peak; no layout takes less.
        blocks: (bytes, first, last) each, alive from event `first` until before event `last`.
    """

    n_tokens: int
    n_outputs: int
    device: str
    online: int
    offline: int
    bound: int
    blocks: Sequence[tuple[int, int, int]]

    @classmethod
    def from_engine(cls, raw: Mapping[str, Any]) -> Arena:
        """From one of `engine.skeleton.read_arenas`."""
        kept = {name: raw[name] for name in ("n_tokens", "n_outputs", "online", "offline", "bound")}
        device = HOST if raw["is_host"] else raw["device"]
        return cls(**kept, device=device, blocks=[tuple(block) for block in raw["blocks"]])

    @property
    def waste(self) -> float:
        """Share of the bound that ggml's allocator takes on top of it."""
        return self.online / self.bound - 1 if self.bound else 0.0

    @property
    def saved(self) -> float:
        """Share of what ggml's allocator takes that the offline layout does without; negative if it takes more."""
        return 1 - self.offline / self.online if self.online else 0.0


def graphs_of(context: ContextSettings) -> list[tuple[int, int]]:
    """(tokens, rows with logits) of what llama.cpp reserves for a context: a whole micro-batch, then a decode step."""
    n_tokens = min(context.n_ctx, context.n_ubatch)
    n_outputs = min(n_tokens, context.n_outputs_max or context.n_batch)
    return [(n_tokens, n_outputs), (context.n_seq_max, context.n_seq_max)]
