"""Runs a text on a model whose routers are watched, and notes which experts they choose.

Prefill: the text in micro-batches. Decode: tokens that the model generates behind parts of the text, so that they have
several topics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oallama.data.routing import NONE
from oallama.engine import native, runtime
from oallama.errors import OallamaError

PROMPTS = 8  # parts of the text that tokens are generated behind
PROMPT_TOKENS = 64  # of each
# A sampler with a seed: the likeliest token alone soon repeats itself, and its experts with it.
TEMPERATURE = 0.8
TOP = 40

Chosen = dict[int, NDArray[np.uint16]]  # by layer: [tokens, used]
Progress = Callable[[float, float, str], None]


@dataclass(frozen=True)
class Recorded:
    """The layers with experts, and by stage what they chose [layers, tokens, used], as `StageRouting.ids`."""

    layers: tuple[int, ...]
    n_ubatch: int
    ids: dict[str, NDArray[np.uint16]]


def record_experts(
    llm: Any,
    watch: Any,
    tokens: Sequence[int],
    n_generate: int = 256,
    progress: Progress | None = None,
    seed: int = 1,
) -> Recorded:
    """Read the text, then generate behind parts of it.

    llm: a `Llama` whose eval callback is `watch`, an ExpertWatch; its cache is cleared. tokens: of the text; more than
    the context has are read in pieces of its length. n_generate: at least PROMPTS. progress: called with (tokens done,
    tokens, what).

    Raises:
        OallamaError: the text is shorter than a micro-batch, the context too small for a part and its tokens, the plan
            has no memory for the logits of all tokens, or llama.cpp's graph names no chosen experts.
    """
    watched = _Watched(llm, watch)
    if len(tokens) < watched.n_ubatch:
        raise OallamaError(
            f"the text has {len(tokens)} tokens and a micro-batch {watched.n_ubatch}: give a longer text, or a --ctx "
            "of no more tokens than the text has"
        )
    jobs = list(_prompts(tokens, n_generate, llm))
    total = len(tokens) + sum(len(prompt) + n for prompt, n in jobs)
    report = _counted(progress, total)
    prefill, decode = [], []
    for start in range(0, len(tokens), llm.n_ctx()):
        watched.forget()
        for batch in watched.micro_batches(tokens[start : start + llm.n_ctx()]):
            prefill.append(watched.forward(batch))
            report(len(batch), "reading")
    random = np.random.default_rng(seed)
    for prompt, n in jobs:
        watched.forget()
        for batch in watched.micro_batches(prompt):
            watched.forward(batch)
            report(len(batch), "reading a part")
        for _ in range(n):
            decode.append(watched.forward([watched.sample(random)]))
            report(1, "generating")
    layers = tuple(sorted(prefill[0]))
    return Recorded(layers, watched.n_ubatch, {"prefill": _joined(prefill, layers), "decode": _joined(decode, layers)})


def _prompts(tokens: Sequence[int], n_generate: int, llm: Any) -> Iterator[tuple[list[int], int]]:
    """Parts of the text, and how many tokens to generate behind each."""
    most = -(-n_generate // PROMPTS)
    length = min(PROMPT_TOKENS, len(tokens) // PROMPTS, llm.n_ctx() - most - 1)
    if length < 1:
        raise OallamaError(
            f"{n_generate} generated tokens are up to {most} behind each of {PROMPTS} parts of the text, more than the "
            f"context of {llm.n_ctx()}; give a larger --ctx or generate fewer"
        )
    first = [tokens[0]] if tokens[0] == llm.token_bos() else []
    for number in range(PROMPTS):
        start = max(len(first), number * len(tokens) // PROMPTS)
        n = n_generate // PROMPTS + (number < n_generate % PROMPTS)
        yield [*first, *tokens[start : start + length]], n


class _Watched:
    """A loaded model that gives the experts of what it computes."""

    def __init__(self, llm: Any, watch: Any) -> None:
        if llm.plan is not None and llm.plan.context.n_outputs_max:
            raise OallamaError(
                "a routing trace wants the logits of all tokens, without which the last layer leaves tokens out, and "
                "this plan has no memory for them; make one with `oallama plan --all-logits`"
            )
        self._llm, self._watch, self._llama_cpp = llm, watch, runtime.llama_cpp()
        self._position = 0
        self.n_ubatch = int(self._llama_cpp.llama_n_ubatch(llm.ctx))

    def forget(self) -> None:
        self._llama_cpp.llama_memory_clear(self._llama_cpp.llama_get_memory(self._llm.ctx), True)
        self._position = 0

    def micro_batches(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        for start in range(0, len(tokens), self.n_ubatch):
            yield tokens[start : start + self.n_ubatch]

    def forward(self, tokens: Sequence[int]) -> Chosen:
        """Compute a micro-batch behind what the cache has."""
        self._watch.take()
        self._llm._batch.set_batch(tokens, self._position, logits_all=True)
        try:
            self._llm._ctx.decode(self._llm._batch)
        except RuntimeError as error:
            raise OallamaError(native.core().take_stream_error() or str(error)) from error
        self._position += len(tokens)
        return _by_layer(self._watch.take(), len(tokens))

    def sample(self, random: np.random.Generator) -> int:
        """A token behind the last one, none that ends the text."""
        llm, llama_cpp = self._llm, self._llama_cpp
        row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        logits = np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)).astype(np.float64)
        best = np.argsort(-logits, kind="stable")[:TOP]
        likely = [int(t) for t in best if not llama_cpp.llama_vocab_is_eog(llm._model.vocab, int(t))]
        weights = np.exp((logits[likely] - logits[likely[0]]) / TEMPERATURE)
        return int(random.choice(likely, p=weights / weights.sum()))


def _by_layer(seen: Sequence[tuple[int, NDArray[np.int32]]], n_tokens: int) -> Chosen:
    parts: dict[int, list[NDArray[np.int32]]] = {}
    for layer, ids in seen:
        parts.setdefault(layer, []).append(ids)
    if not parts:
        raise OallamaError("llama.cpp's graph of this model names no chosen experts (ffn_moe_topk): nothing to trace")
    # A layer that chooses twice for a token (GroveMoE, whose second choice follows from the first) has more rows.
    chosen = {layer: np.concatenate(found)[:n_tokens].astype(np.uint16) for layer, found in parts.items()}
    for layer, rows in chosen.items():
        if len(rows) < n_tokens:
            raise OallamaError(f"layer {layer} chose experts for {len(rows)} of {n_tokens} tokens: it cannot be traced")
    return chosen


def _joined(parts: Sequence[Chosen], layers: Sequence[int]) -> NDArray[np.uint16]:
    rows = [np.concatenate([part[layer] for part in parts]) for layer in layers]
    joined = np.full((len(rows), len(rows[0]), max(row.shape[1] for row in rows)), NONE, dtype=np.uint16)
    for to, row in zip(joined, rows, strict=True):
        to[:, : row.shape[1]] = row
    return joined


def _counted(progress: Progress | None, total: int) -> Callable[[int, str], None]:
    done = 0

    def report(n: int, text: str) -> None:
        nonlocal done
        done += n
        if progress:
            progress(done, total, text)

    return report
