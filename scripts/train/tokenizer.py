"""A byte-level BPE tokenizer learnt from stories, and its form in a GGUF file (the keys of tokenizer.ggml)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from gguf import TokenType

from oallama.modelmaker.chat_templates import CHATML

END, TURN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END, TURN, TURN_END)


def learn(texts: Iterable[str], n_vocab: int) -> Any:
    """Return a tokenizers.Tokenizer of n_vocab tokens: the special ones, all bytes, and merges learnt from texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # with GPT-2's pattern
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != n_vocab:
        raise ValueError(f"expected {n_vocab} tokens, the text gave {tokenizer.get_vocab_size()}")
    return tokenizer


def gguf_keys(tokenizer: Any) -> dict[str, Any]:
    """Return the tokenizer.* metadata that makes llama.cpp cut text as tokenizer does."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens]
    end, turn_end = tokens.index(END), tokens.index(TURN_END)
    keys = {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": [token.encode() for token in tokens],
        "ggml.token_type": np.array(kinds, np.int32),
        "ggml.merges": [" ".join(pair).encode() for pair in model["merges"]],
        "ggml.bos_token_id": end,
        "ggml.eos_token_id": turn_end,
        "ggml.eot_token_id": turn_end,
        "ggml.add_bos_token": True,
        "chat_template": "{{ bos_token }}" + CHATML,
    }
    return {f"tokenizer.{key}": value for key, value in keys.items()}
