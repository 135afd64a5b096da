"""Models whose experts come and go in slots, step by step, beside models that have them all in one place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oallama import Llama
from oallama.data.plan import HOST, PlacementPlan, TensorPlacement
from oallama.engine import native, runtime
from support.hand_plan import hand_plan

OF_EXPERTS = re.compile(r"\.ffn_(up|gate|down|gate_up)_exps\.(weight|bias)$")
N_CTX = 512


def plan_of(
    path: Path,
    device: str,
    slots: int = 0,
    first: tuple[int, ...] = (),
    uploads: int = 1,
    realisation: str = "",
    n_experts: int = 16,
) -> PlacementPlan:
    """All on `device` but the embedding, and, with slots, the experts, which are on the host. Without slots, `first`,
    if any, are experts that are on both and stay."""
    plan, tensors = hand_plan(path, device), {}
    for name, t in plan.tensors.items():
        if OF_EXPERTS.search(name) and (slots or first):
            host = TensorPlacement.whole(t.type, t.nbytes, HOST, "host", realisation=realisation)
            tensors[name] = (
                TensorPlacement.by_slots(host, device, slots, n_experts, first)
                if slots
                else TensorPlacement.by_experts(host, device, first, n_experts)
            )
        else:
            stays = name.startswith("token_embd")
            tensors[name] = t if stays else TensorPlacement.whole(t.type, t.nbytes, device, "resident")
    context = replace(plan.context, n_ctx=N_CTX)
    return replace(plan, tensors=tensors, context=context, slot_uploads=uploads)


class Steps:
    """A context of a loaded model that is fed tokens and gives the logits of the last one."""

    def __init__(self, llm: Llama, context: Any) -> None:
        self.llm, self._context, self._position = llm, context, 0
        self._llama_cpp = runtime.llama_cpp()

    def forget(self) -> None:
        self._llama_cpp.llama_memory_clear(self._llama_cpp.llama_get_memory(self._context), True)
        self._position = 0

    def feed(self, *tokens: int) -> np.ndarray:
        """One batch, behind those before; a context that is full is emptied first."""
        if self._position + len(tokens) > N_CTX:
            self.forget()
        self.llm._batch.set_batch(tokens, self._position, logits_all=False)
        status = self._llama_cpp.llama_decode(self._context, self.llm._batch.batch)
        assert status == 0
        self._position += len(tokens)
        row = self._llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(row, shape=(self.llm.n_vocab(),)).astype(np.float64)

    def counts(self) -> np.ndarray:
        """Sums of uses, hits, uploads and uploaded bytes."""
        rows = [(c.uses, c.hits, c.uploads, c.uploaded_bytes) for c in self.llm.expert_counts()]
        return np.array(rows, dtype=np.int64).reshape(len(rows), 4).sum(axis=0)

    @contextmanager
    def second(self) -> Iterator[Steps]:
        """Another context of the same model."""
        context = self._llama_cpp.llama_init_from_model(self.llm.model, self.llm.context_params)
        assert context
        try:
            yield Steps(self.llm, context)
        finally:
            self._llama_cpp.llama_free(context)


@contextmanager
def steps(path: Path, plan: PlacementPlan, **arguments: Any) -> Iterator[Steps]:
    llm = Llama(str(path), plan=plan, n_threads=1, verbose=False, **arguments)
    try:
        yield Steps(llm, llm.ctx)
    finally:
        llm.close()


@contextmanager
def seam(**changes: Any) -> Iterator[None]:
    """delay_us, fails_in, unordered, at_random (csrc/segments/model_experts.h) for all models of this process."""
    native.core().set_slots_seam(**changes)
    try:
        yield
    finally:
        native.core().set_slots_seam()


def sampled(model: Steps, n: int, seed: int = 3) -> list[int]:
    """Tokens that the model generates at temperature 1."""
    rng, tokens = np.random.default_rng(seed), [5]
    for _ in range(n - 1):
        logits = model.feed(tokens[-1])
        weights = np.exp(logits - logits.max())
        tokens.append(int(rng.choice(len(weights), p=weights / weights.sum())))
    model.forget()
    return tokens


def difference(model: Steps, other: Steps, tokens: Iterable[int]) -> float:
    """NMSE of the logits of all tokens, one after the other."""
    error = power = 0.0
    for token in tokens:
        found, wanted = model.feed(token), other.feed(token)
        error += float(((found - wanted) ** 2).sum())
        power += float((wanted**2).sum())
    return error / power
