"""llama-cpp-python's `Llama` with what its constructor cannot be told: devices, and some fields of the context."""

from __future__ import annotations

import ctypes
from typing import Any

from oallama.engine import runtime
from oallama.engine.load_settings import FLASH_ATTN
from oallama.engine.piece_tokenizer import PieceTokenizer

UPSTREAM = runtime.llama_cpp().Llama


class PlacedLlama(UPSTREAM):  # type: ignore[misc, valid-type]
    """`llama_cpp.Llama` 0.3.36 and four arguments more; None leaves a field to upstream.

    Tokens are turned into text by a PieceTokenizer, unless `tokenizer=` is given.

    Args:
        devices: addresses of the devices to use, as `device_list.device_array` makes them.
        n_outputs_max: most rows of one micro-batch with logits.
        flash_attn_type: "auto", which upstream's flash_attn= cannot say.
        eval_callback: addresses of a ggml_backend_sched_eval_callback and of its data, which must outlive the model.
    """

    def __init__(
        self,
        model_path: str,
        *,
        devices: Any = None,
        n_outputs_max: int | None = None,
        flash_attn_type: str | None = None,
        eval_callback: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._devices, self._n_outputs_max, self._flash_attn_type = devices, n_outputs_max, flash_attn_type
        self._eval_callback = eval_callback
        super().__init__(model_path, **kwargs)
        if kwargs.get("tokenizer") is None:
            self.tokenizer_: Any = PieceTokenizer(self)

    # Upstream assigns each structure before it fills it, and reads it through `self` every time.

    @property
    def model_params(self) -> Any:
        if self._devices is not None:
            self._model_params.devices = ctypes.addressof(self._devices)
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self._model_params = params

    @property
    def context_params(self) -> Any:
        if self._flash_attn_type is not None:
            self._context_params.flash_attn_type = FLASH_ATTN[self._flash_attn_type]
        if self._n_outputs_max is not None:
            self._context_params.n_outputs_max = self._n_outputs_max
        if self._eval_callback is not None:
            function, data = self._eval_callback
            self._context_params.cb_eval = type(self._context_params.cb_eval)(function)
            self._context_params.cb_eval_user_data = data
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        self._context_params = params
