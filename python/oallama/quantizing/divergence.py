"""How far a model's predictions are from a reference's on a text: perplexity, KL divergence, the same top token.

Defined as llama-perplexity --kl-divergence does: the text in chunks of the context's length, each behind a BOS token,
the second half of every chunk is scored. Probabilities are of the whole vocabulary, in float64.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..engine import model_file, native, runtime
from ..errors import OallamaError
from ..planning import format_bytes
from ..profiling.fingerprint import cpu_set

Logits = NDArray[np.float32]  # [rows, vocabulary]
_ROWS = 64  # at once in float64: 64 MiB of a vocabulary of 128k


@dataclass(frozen=True)
class Divergence:
    """Means over `n_tokens` scored tokens, natural logarithms.

    kld: KL(reference || model) in nats; kld_error its standard error. same_top: share of tokens where both give the
    highest probability to the same one. file_bytes and bits_per_weight are the model's.
    """

    perplexity: float
    reference_perplexity: float
    kld: float
    kld_error: float
    kld_max: float
    same_top: float
    n_tokens: int
    file_bytes: int
    bits_per_weight: float


@dataclass
class Reference:
    """A reference's logits on a text, which any number of models are then compared with.

    text: at least one chunk of `n_ctx` tokens; n_chunks: most chunks to use, None for all of them. n_gpu_layers: as in
    `Llama`; n_threads: 0 takes all CPUs this process may use. progress: called with (chunks done, chunks).

    Raises:
        OallamaError: for a file that is no model, a text that is too short, logits that do not fit the memory.

    Example:
        Reference("f16.gguf", text).compare("q4_0.gguf").kld
    """

    path: str | os.PathLike[str]
    text: str
    n_ctx: int = 512
    n_chunks: int | None = None
    n_gpu_layers: int = -1
    n_threads: int = 0
    progress: Callable[[int, int], None] | None = None
    chunks: list[list[int]] = field(init=False)
    _logits: list[Logits] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.n_ctx < 4 or self.n_ctx % 2:
            raise OallamaError(f"the context must be an even number of at least 4 tokens, got {self.n_ctx}")
        with self._load(self.path) as model:
            self.chunks = _chunks(model, self.text, self.n_ctx, self.n_chunks)
            self._vocabulary = model.vocabulary
            needed = sum(len(c) - 1 - self.n_ctx // 2 for c in self.chunks) * len(self._vocabulary) * 4
            if needed > (free := native.core().host_memory()):
                raise OallamaError(
                    f"the reference's logits need {format_bytes(needed)} and {format_bytes(free)} are free: "
                    "use fewer chunks"
                )
            self._logits = [logits.copy() for logits in self._scored(model)]

    def compare(self, path: str | os.PathLike[str]) -> Divergence:
        """Score another model on the same tokens.

        Raises OallamaError for a file that is no model, or one with another vocabulary.
        """
        columns: list[NDArray[np.float64]] = []
        with self._load(path) as model:
            if model.vocabulary != self._vocabulary:
                raise OallamaError(f"{path} has another vocabulary than {self.path}: their tokens cannot be compared")
            for theirs, ours, chunk in zip(self._logits, self._scored(model), self.chunks, strict=True):
                targets = np.array(chunk[self.n_ctx // 2 + 1 :])
                for start in range(0, len(targets), _ROWS):
                    rows = slice(start, start + _ROWS)
                    columns.append(_compare(theirs[rows], ours[rows], targets[rows]))
            n_bytes, bits = Path(path).stat().st_size, model.bits_per_weight
        loss, reference_loss, kld, same = np.concatenate(columns, axis=1)
        n = len(kld)
        return Divergence(
            perplexity=math.exp(loss.mean()),
            reference_perplexity=math.exp(reference_loss.mean()),
            kld=float(kld.mean()),
            kld_error=float(kld.std(ddof=1) / math.sqrt(n)) if n > 1 else 0.0,
            kld_max=float(kld.max()),
            same_top=float(same.mean()),
            n_tokens=n,
            file_bytes=n_bytes,
            bits_per_weight=bits,
        )

    def _load(self, path: str | os.PathLike[str]) -> _Scorer:
        return _Scorer(path, self.n_ctx, self.n_gpu_layers, self.n_threads or len(cpu_set()))

    def _scored(self, model: _Scorer) -> Iterator[Logits]:
        for i, chunk in enumerate(self.chunks):
            if self.progress:
                self.progress(i, len(self.chunks))
            yield model.logits(chunk)


class _Scorer:
    """A loaded model that gives the logits of the second half of a chunk."""

    def __init__(self, path: str | os.PathLike[str], n_ctx: int, n_gpu_layers: int, n_threads: int) -> None:
        from ..llama import Llama  # loads the engine

        model_file.check_gguf(Path(path))
        try:
            self.llm = Llama(
                os.fspath(path),
                n_ctx=n_ctx,
                n_batch=n_ctx,
                n_gpu_layers=n_gpu_layers,
                n_threads=n_threads,
                n_threads_batch=n_threads,
                logits_all=True,
                verbose=False,
            )
        except ValueError as error:
            raise OallamaError(f"{path} cannot be loaded: {error}") from None
        self.first = n_ctx // 2

    def __enter__(self) -> _Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.llm.close()

    @property
    def vocabulary(self) -> list[bytes]:
        text, vocab = runtime.llama_cpp().llama_vocab_get_text, self.llm._model.vocab
        return [text(vocab, i) for i in range(self.llm.n_vocab())]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.llm._model.size() / self.llm._model.n_params()

    def logits(self, chunk: list[int]) -> Logits:
        """Of the tokens after the first half; valid until the next call."""
        self.llm.reset()
        self.llm.eval(chunk)
        scores: Logits = self.llm.scores[self.first : len(chunk) - 1]
        return scores


def _chunks(model: _Scorer, text: str, n_ctx: int, n_chunks: int | None) -> list[list[int]]:
    llm = model.llm
    adds_bos = llm._model.add_bos_token()
    tokens = llm.tokenize(text.encode(), add_bos=adds_bos)
    starts = range(0, len(tokens) - n_ctx + 1, n_ctx)[:n_chunks]
    if not starts:
        raise OallamaError(f"the text has {len(tokens)} tokens; a chunk has {n_ctx}: give a longer text or --ctx")
    bos = [llm.token_bos()] if adds_bos else []
    return [[*bos, *tokens[start + len(bos) : start + n_ctx]] for start in starts]


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def _compare(theirs: Logits, ours: Logits, targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """[4, rows]: loss, reference's loss, KL divergence, whether the top token is the same."""
    rows = np.arange(len(targets))
    reference, model = _log_softmax(theirs), _log_softmax(ours)
    kld = (np.exp(reference) * (reference - model)).sum(axis=1)
    same = theirs.argmax(axis=1) == ours.argmax(axis=1)
    return np.stack([-model[rows, targets], -reference[rows, targets], kld, same.astype(np.float64)])
