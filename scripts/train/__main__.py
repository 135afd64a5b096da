"""Trains the demo model, and compares the file that it writes with llama.cpp.

python scripts/train NEW.gguf [--out FILE.jsonl]

Needs `pip install oallama[train]` (JAX on the CPU); writes a model from nothing: text, tokenizer, weights. One JSON
line: loss, minutes; tokens of the held-out text by the tokenizers library against llama.cpp's; logits of JAX against
llama.cpp's. `python bench/storyteller.py --model NEW.gguf` then measures what it knows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import export
import llama_jax
import tokenizer
import training
from oallama import Llama
from oallama.bench.machine import describe, save_lines
from oallama.storyteller import held_out_text

N_CTX = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    save_lines([{**train(options.model), **describe(sys.argv)}], options.out, append=True)


def train(path: Path) -> dict[str, Any]:
    """Write a new model; how that went."""
    steps = sum(training.STEPS.values())
    start, losses = time.perf_counter(), []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        print(f"step {step + 1} of {steps}: loss {loss:.4f}", file=sys.stderr, flush=True)

    words = training.make_tokenizer()
    weights = training.train(words, training.SEED, report)
    export.write_gguf(path, training.SHAPE, weights, tokenizer.gguf_keys(words))
    return {
        "bench": "storyteller-training",
        "steps": steps,
        "tokens": steps * training.TOKENS_PER_STEP,
        "parameters": sum(w.size for w in weights.values()),
        "bytes": path.stat().st_size,
        "loss_of_last_20_steps": round(float(np.mean(losses[-20:])), 4),
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "cpu_minutes": round(sum(os.times()[:2]) / 60, 1),
        **compare(path, words, weights),
    }


def compare(path: Path, words: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp makes of the file, against what it was made of: tokens and logits of the held-out text."""
    text = held_out_text()
    expected = words.encode(text).ids
    llm = Llama(str(path), n_ctx=N_CTX, logits_all=True, verbose=False)
    tokens = llm.tokenize(text.encode(), add_bos=False)
    llm.eval(tokens[:N_CTX])
    stored = {name: w.astype(jnp.float16).astype(jnp.float32) if w.ndim == 2 else w for name, w in weights.items()}
    batch = jnp.array([tokens[:N_CTX]], jnp.int32)
    ours = np.asarray(jax.jit(llama_jax.logits, static_argnums=2)(stored, batch, training.SHAPE))[0]
    theirs = llm.scores[:N_CTX]
    held_out = training.loss_of(weights, np.array(tokens[:N_CTX], np.int32)[None])
    return {
        "held_out_tokens": len(expected),
        "same_tokens_as_llama_cpp": tokens == expected,
        "text_comes_back": llm.detokenize(tokens) == text.encode(),
        "logits_nmse": float(((theirs - ours) ** 2).sum() / (ours**2).sum()),
        "logits_rows": N_CTX,
        "held_out_loss": round(float(held_out), 4),
    }


if __name__ == "__main__":
    main()
