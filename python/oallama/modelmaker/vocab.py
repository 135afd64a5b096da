"""Real tokenizers in any size, from the vocabulary-only GGUFs of llama.cpp's source.

Invariant: whatever the size, every byte keeps a token, so that any text tokenises and comes back unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import TokenType

from ..engine import runtime
from ..errors import OallamaError
from .chat_templates import CHATML, LLAMA3
from .gguf_header import read_metadata

_FILES = {
    "llama": "ggml-vocab-llama-bpe.gguf",
    "minicpm3": "ggml-vocab-llama-spm.gguf",
    "qwen2": "ggml-vocab-qwen2.gguf",
    "qwen3moe": "ggml-vocab-qwen2.gguf",
    # llama.cpp's source has not their own.
    "gpt-oss": "ggml-vocab-qwen2.gguf",
    "deepseek2": "ggml-vocab-qwen2.gguf",
    "qwen35moe": "ggml-vocab-qwen2.gguf",
}
# The published MiniCPM3 tokenizer has these two on top of its SentencePiece model.
_ADDED = {"minicpm3": (b"<|im_end|>", b"<|im_start|>")}
_WORD_MARK = "\u2581".encode()  # SentencePiece's blank
_FILLER = re.compile(rb"\[PAD\d+\]|<\|reserved_special_token_\d+\|>")
_NORMAL, _BYTE = int(TokenType.NORMAL), int(TokenType.BYTE)  # comparing enum members 150k times would take a second
_UNUSED_SCORE = -10000.0  # convert_hf_to_gguf gives this to its padding


@dataclass(frozen=True)
class Vocab:
    """A tokenizer of n tokens: texts, types [n] int32, scores [n] float32 (SPM), merges (BPE), and the other keys."""

    tokens: list[bytes]
    types: np.ndarray
    scores: np.ndarray | None
    merges: list[bytes] | None
    other: dict[str, Any]

    def metadata(self) -> dict[str, Any]:
        """Return the tokenizer.* keys of a GGUF."""
        arrays = {"tokens": self.tokens, "token_type": self.types, "scores": self.scores, "merges": self.merges}
        return self.other | {f"tokenizer.ggml.{key}": value for key, value in arrays.items() if value is not None}


def default_vocab_dir() -> Path:
    """Return the folder of the vocabulary files: in a checkout that of the source, else the one beside the engine."""
    source = Path(__file__).resolve().parents[3] / "third_party" / "llama.cpp"
    folders = (source / "upstream" / "models", source / "patched" / "models")
    return next((folder for folder in folders if folder.is_dir()), runtime.lib_dir().parent / "vocab")


def load_vocab(arch: str, n_vocab: int, vocab_dir: Path | None = None) -> Vocab:
    """Return the tokenizer of an architecture with exactly n_vocab tokens.

    More tokens than the vocabulary file has: padded with unused ones, as conversion scripts do. Fewer: the most
    frequent ones stay, with all bytes and special tokens; token ids and merges are adapted.

    Raises:
        OallamaError: the file is missing or broken, or n_vocab leaves no room for the bytes and special tokens.
    """
    path = Path(vocab_dir or default_vocab_dir()) / _FILES[arch]
    if not path.is_file():
        raise OallamaError(
            f"vocabulary file {path} is missing: run `make setup` (it fetches llama.cpp's source), "
            "or pass the folder that has it as vocab_dir"
        )
    try:
        vocab = _read(path, arch)
    except (ValueError, KeyError) as error:
        raise OallamaError(f"vocabulary file {path} is broken ({error}): run `make setup` again") from None
    if n_vocab < len(vocab.tokens):
        return _truncate(vocab, n_vocab)
    return _pad(vocab, n_vocab)


@lru_cache(maxsize=1)
def _read(path: Path, arch: str) -> Vocab:
    fields = {key: value for key, value in read_metadata(path).items() if key.startswith("tokenizer.")}
    fields.setdefault("tokenizer.chat_template", LLAMA3 if arch == "llama" else CHATML)
    tokens, types = fields.pop("tokenizer.ggml.tokens"), fields.pop("tokenizer.ggml.token_type")
    scores, merges = fields.pop("tokenizer.ggml.scores", None), fields.pop("tokenizer.ggml.merges", None)
    return _append(Vocab(tokens, types, scores, merges, fields), list(_ADDED.get(arch, ())), TokenType.CONTROL, 0.0)


def _append(vocab: Vocab, tokens: list[bytes], kind: TokenType, score: float) -> Vocab:
    types = np.append(vocab.types, np.full(len(tokens), kind, np.int32))
    scores = vocab.scores
    if scores is not None:
        scores = np.append(scores, np.full(len(tokens), score, np.float32))
    return replace(vocab, tokens=vocab.tokens + tokens, types=types, scores=scores)


def _pad(vocab: Vocab, n_vocab: int) -> Vocab:
    filler = [b"[PAD%d]" % i for i in range(len(vocab.tokens), n_vocab)]
    return _append(vocab, filler, TokenType.UNUSED, _UNUSED_SCORE)


def _truncate(vocab: Vocab, n_vocab: int) -> Vocab:
    # Both tokenizers number their tokens by frequency: bytes first (BPE: ids 0-255), then merges in the order learnt.
    # SentencePiece has its single characters last; ASCII and the word mark stay, or plain words would fall into bytes.
    required, optional = [], []
    for i, (token, kind) in enumerate(zip(vocab.tokens, vocab.types.tolist(), strict=True)):
        is_byte = kind == _BYTE or len(token) == 1 or token == _WORD_MARK or (vocab.merges is not None and i < 256)
        if is_byte or (kind != _NORMAL and not _FILLER.fullmatch(token)):
            required.append(i)
        elif kind == _NORMAL:
            optional.append(i)
    if n_vocab < len(required):
        raise OallamaError(
            f"n_vocab {n_vocab} is too small: this tokenizer needs {len(required)} tokens for bytes and special tokens"
        )
    kept = sorted(required + optional[: n_vocab - len(required)])
    new_id = {old: new for new, old in enumerate(kept)}
    other = {key: new_id[value] if key.endswith("_token_id") else value for key, value in vocab.other.items()}
    tokens = [vocab.tokens[i] for i in kept]
    merges = vocab.merges
    if merges is not None:
        known = set(tokens)
        merges = [m for m in merges if m.replace(b" ", b"") in known and known.issuperset(m.split(b" "))]
    scores = None if vocab.scores is None else vocab.scores[kept]
    return Vocab(tokens, vocab.types[kept], scores, merges, other)
