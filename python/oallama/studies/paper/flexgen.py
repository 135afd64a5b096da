"""FlexGen as a cost model: weights stream to the GPU, which computes everything (Sheng et al., ICML 2023, section 4).

A share w of every layer's weights lives on the GPU, KV cache and activations too; the rest lies in pinned host memory
(FlexGen's --pin-weight, its default) and is uploaded in every pass. While layer l computes, layer l + 1 is copied
(generation_loop_overlap_single_batch of FlexGen 0.1.7), and the last layer's computation overlaps with the first copy
of the next pass. With u_l the seconds to copy what layer l lacks, c_l the seconds it computes, and cyclic l:

    u_l    = link_pinned((1 - w) * bytes_l)
    c_l    = sum of the GPU times of its target operators, its attention and its small operators
    pass   = sum over l of max(c_l, u_(l+1))
    TTFT   = u_1 + pass(prompt)
    TPOT   = pass(1 token)
    E2E    = TTFT + (n_generate - 1) * TPOT

The first copy counts for TTFT, because nothing was computed before it. The output head is a layer; the embedding's
rows are looked up on the host at no cost. Not modelled: FlexGen's own (PyTorch) overhead, and its batching of many
sequences, which is what it was made for: with one sequence it is bound by the link.
"""

from __future__ import annotations

from dataclasses import dataclass

from oallama.data.profile import Profile
from oallama.planning import Operator, OperatorGraph


@dataclass(frozen=True)
class FlexGen:
    """Predicts FlexGen with one sequence. `share`: of the weights that live on `device`, 0 to 1."""

    graph: OperatorGraph
    profile: Profile
    device: str
    share: float

    def ttft(self, n_prompt: int) -> float:
        """Seconds to the first token."""
        return self._upload(0) + self._pass(n_prompt, n_prompt)

    def tpot(self, depth: int) -> float:
        """Seconds per token with `depth` tokens in the KV cache."""
        return self._pass(1, depth)

    def request(self, n_prompt: int, n_generate: int) -> float:
        """Seconds of a request; TPOT is taken at the middle of the answer."""
        return self.ttft(n_prompt) + (n_generate - 1) * self.tpot(n_prompt + n_generate // 2)

    def _pass(self, n_tokens: int, depth: int) -> float:
        last = self.graph.n_layer  # the output head
        computes = [self._compute(layer, n_tokens, depth) for layer in range(last + 1)]
        uploads = [self._upload(layer) for layer in range(last + 1)]
        return sum(max(c, u) for c, u in zip(computes, [*uploads[1:], uploads[0]], strict=True))

    def _upload(self, layer: int) -> float:
        tensors = {op.weight for op in self._operators(layer, 1) if op.is_target}
        nbytes = (1 - self.share) * sum(self.graph.tensor[name].nbytes for name in tensors if name)
        return self.profile.link_time(self.device, "h2d", round(nbytes), "pinned") if nbytes else 0.0

    def _compute(self, layer: int, n_tokens: int, depth: int) -> float:
        width = self.graph.tensor["token_embd.weight"].ne[0]
        small = self.profile.other_op_time(self.device, n_tokens, width) or 0.0
        seconds = 0.0
        for op in self._operators(layer, n_tokens):
            if op.is_target:
                tensor = self.graph.tensor[op.weight or ""]
                rows = 1 if layer == self.graph.n_layer else n_tokens
                seconds += self.profile.op_time(self.device, op.op, tensor.type, tensor.ne, rows, op.n_used).seconds
            elif not op.touches_cache:
                seconds += small
        shape = self.graph.attention[layer] if layer < self.graph.n_layer else None
        if shape is not None:
            seconds += self.profile.attention_time(self.device, shape, n_tokens, depth).seconds
        return seconds

    def _operators(self, layer: int, n_tokens: int) -> list[Operator]:
        """Operators of one layer; those of none (output norm, head) are the output layer's, but for the embedding."""
        tier = min(self.graph.tiers) if n_tokens == 1 else max(self.graph.tiers)
        found = None if layer == self.graph.n_layer else layer
        return [op for op in self.graph.operators(tier) if op.layer == found and op.op != "GET_ROWS"]
