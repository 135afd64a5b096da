"""Text of tokens: upstream's results, and a call into the engine for each token once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oallama import Llama
from oallama.engine import piece_tokenizer, runtime
from oallama.engine.piece_tokenizer import PieceTokenizer


@pytest.fixture(scope="module")
def llm(tiny: Callable[..., Path]) -> Iterator[Llama]:
    llm = Llama(str(tiny("llama", "F16")), n_ctx=256, n_threads=1, verbose=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("special", [False, True])
def test_text_is_upstreams(llm: Llama, special: bool) -> None:
    ours, theirs = llm.tokenizer_, piece_tokenizer.UPSTREAM(llm)
    assert type(ours) is PieceTokenizer
    # Upstream cuts longer pieces off.
    vocab, rng = [t for t in range(llm.n_vocab()) if len(ours.detokenize([t], special=special)) <= 32], random.Random(3)
    some = [[token] for token in vocab[::7]] + [[], [llm.token_bos()], [llm.token_bos(), llm.token_bos()]]
    some += [rng.choices(vocab, k=rng.randint(2, 40)) for _ in range(50)]
    some += [[llm.token_bos(), *llm.tokenize(b" a text", add_bos=False)]]
    for tokens in some:
        for _ in range(2):  # what is remembered, too
            assert ours.detokenize(tokens, special=special) == theirs.detokenize(tokens, special=special), tokens
    assert llm.detokenize(some[-1], prev_tokens=[1, 2]) == theirs.detokenize(some[-1])


def test_a_stream_asks_for_each_token_once(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[int] = Counter()
    to_piece = runtime.llama_cpp().llama_token_to_piece

    def counted(vocab: Any, token: int, *rest: Any) -> int:
        asked[token] += 1
        return int(to_piece(vocab, token, *rest))

    monkeypatch.setattr(runtime.llama_cpp(), "llama_token_to_piece", counted)
    monkeypatch.setattr(llm, "tokenizer_", PieceTokenizer(llm))
    text = "".join(
        c["choices"][0]["text"]
        for c in llm.create_completion("a b", max_tokens=60, temperature=1.0, seed=1, stream=True)
    )
    assert sum(asked.values()) == len(asked) > 20, text


def test_long_pieces_are_whole(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = b"<|a very long token that has more than thirty-two bytes|>"

    def to_piece(vocab: Any, token: int, buffer: Any, size: int, *rest: Any) -> int:
        if size < len(piece):
            return -len(piece)
        buffer[: len(piece)] = piece
        return len(piece)

    monkeypatch.setattr(runtime.llama_cpp(), "llama_token_to_piece", to_piece)
    assert PieceTokenizer(llm).detokenize([7, 7]) == 2 * piece


def test_a_tokenizer_that_is_given_stays(tiny: Callable[..., Path], llm: Llama) -> None:
    given = piece_tokenizer.UPSTREAM(llm)
    other = Llama(str(tiny("llama", "F16")), n_ctx=256, n_threads=1, verbose=False, tokenizer=given)
    assert other.tokenizer_ is given
    other.close()
