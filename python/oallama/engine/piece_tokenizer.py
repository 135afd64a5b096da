"""llama-cpp-python's tokenizer, which asks the engine for the text of each token once.

While a completion is streamed, upstream turns all tokens of the answer into text again after every token, with a call
into C for each of them: 2000 tokens into an answer that takes longer than a token of a small model
(bench/streamed_text.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from oallama.engine import runtime

UPSTREAM = runtime.llama_cpp().llama_tokenizer.LlamaTokenizer
_USUAL_BYTES = 32


class PieceTokenizer(UPSTREAM):  # type: ignore[misc, valid-type]
    """Same results as upstream's, but for pieces above 32 bytes, which upstream cuts off."""

    def __init__(self, llama: Any) -> None:
        super().__init__(llama)
        self._pieces = {special: _Pieces(self._model.vocab, special) for special in (False, True)}

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        pieces = self._pieces[bool(special)]
        text = b"".join([pieces[token] for token in tokens])
        # Some vocabularies begin every text with a space, after the token that begins a sequence.
        begins = len(tokens) > 0 and tokens[0] == self._model.token_bos()
        return text[1:] if begins and text[:1] == b" " else text


class _Pieces(dict[int, bytes]):
    """The text of tokens, as they are asked for."""

    def __init__(self, vocab: Any, special: bool) -> None:
        super().__init__()
        self._vocab, self._special = vocab, special

    def __missing__(self, token: int) -> bytes:
        to_piece, size = runtime.llama_cpp().llama_token_to_piece, _USUAL_BYTES
        buffer = ctypes.create_string_buffer(size)
        n = to_piece(self._vocab, token, buffer, size, 0, self._special)
        if n < 0:  # the bytes that it needs
            size = -n
            buffer = ctypes.create_string_buffer(size)
            n = to_piece(self._vocab, token, buffer, size, 0, self._special)
        self[token] = piece = buffer.raw[: max(0, n)]
        return piece
