"""A context with several sequences, decoded step by step: what tests and benchmarks drive both models with."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from oallama.engine import runtime
from oallama.errors import OallamaError
from oallama.weave.channel import DEADLINE_S, guest_stats, guests


class Sequences:
    """A model, on the CPU but for n_gpu_layers, and a context of n_ctx cells for n_seq sequences; a context manager.

    channels, first_guest, deadline_s: as `guests`. kv_type: ggml_type of the cache, f16 unless given.

    Raises:
        OallamaError: the model or the context cannot be made.
    """

    def __init__(
        self,
        model: Path,
        *,
        channels: Sequence[str] = (),
        first_guest: int = 0,
        n_seq: int = 8,
        n_ctx: int = 4096,
        n_ubatch: int = 48,
        n_threads: int = 1,
        kv_type: int = 1,
        n_gpu_layers: int = 0,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        llama_cpp = self._api = runtime.llama_cpp()
        llama_cpp._logger.set_verbose(False)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, 2048, n_ubatch, n_seq
        params.n_threads = params.n_threads_batch = n_threads
        params.type_k = params.type_v = kv_type
        params.flash_attn_type, params.kv_unified = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED, True
        of_model = llama_cpp.llama_model_default_params()
        of_model.n_gpu_layers = n_gpu_layers
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), of_model)
        if not self._model:
            raise OallamaError(f"cannot load {model}")
        with guests(channels, first_guest, deadline_s):
            self.ctx = llama_cpp.llama_init_from_model(self._model, params)
        if not self.ctx:
            raise OallamaError(f"cannot make a context for {model}")
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self.lengths: dict[int, int] = {}

    def __enter__(self) -> Sequences:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self.ctx)
        self._api.llama_model_free(self._model)

    @property
    def stats(self) -> dict[str, float]:
        """As `guest_stats`."""
        return guest_stats(ctypes.cast(self.ctx, ctypes.c_void_p).value or 0)

    def step(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Decode tokens of sequences in one batch; logits [rows, vocabulary] of each.

        Raises:
            OallamaError: llama_decode fails, with its number.
        """
        at = 0
        for seq_id, new in tokens.items():
            for i, token in enumerate(new):
                self._batch.token[at], self._batch.pos[at] = token, self.lengths.get(seq_id, 0) + i
                self._batch.n_seq_id[at], self._batch.seq_id[at][0], self._batch.logits[at] = 1, seq_id, 1
                at += 1
        self._batch.n_tokens = at
        status = self._api.llama_decode(self.ctx, self._batch)
        if status != 0:
            raise OallamaError(f"llama_decode returned {status}")
        found, at = {}, 0
        for seq_id, new in tokens.items():
            self.lengths[seq_id] = self.lengths.get(seq_id, 0) + len(new)
            rows = [self._api.llama_get_logits_ith(self.ctx, at + i) for i in range(len(new))]
            found[seq_id] = np.stack([np.ctypeslib.as_array(row, shape=(self._n_vocab,)).copy() for row in rows])
            at += len(new)
        return found

    def remove(self, seq_id: int, first: int = 0) -> None:
        """Forget the tokens of a sequence from `first` on."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self.ctx), seq_id, first, -1)
        self.lengths[seq_id] = first
