"""Trains a demo model, and compares the file that it writes with llama.cpp.

python scripts/train NEW.gguf [--mixture] [--keep STATE.npz] [--out FILE.jsonl]

Needs `pip install oallama[train]` (JAX on the CPU); writes a model from nothing: text, tokenizer, weights. --mixture:
the mixture of experts instead of the dense model. --keep: the state is kept there every 20 steps, and training goes on
from it. One JSON line: loss, minutes; tokens of the held-out text by the tokenizers library against llama.cpp's; logits
of JAX against llama.cpp's, from a copy in F16 where the file is quantised.
`python bench/storyteller.py --model NEW.gguf` then measures what it knows.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import export
import network
import tokenizer
import training
from oallama import Llama
from oallama.bench.machine import describe, save_lines
from oallama.storyteller import held_out_text
from recipes import DENSE, MIXTURE, TOKENS_PER_STEP, Recipe

N_CTX = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--mixture", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told = train(options.model, MIXTURE if options.mixture else DENSE, options.keep)
    save_lines([{**told, **describe(sys.argv)}], options.out, append=True)


def train(path: Path, recipe: Recipe, kept: Path | None = None) -> dict[str, Any]:
    """Write a new model; how that went."""
    start, losses, uneven = time.perf_counter(), [], []

    def report(step: int, loss: float, balance: float) -> None:
        losses.append(loss)
        uneven.append(balance)
        print(
            f"step {step + 1} of {recipe.n_steps}: loss {loss:.4f}, balance {balance:.3f}", file=sys.stderr, flush=True
        )

    words = training.make_tokenizer(recipe.shape.n_vocab)
    weights = training.train(words, recipe, report, kept)
    export.write_gguf(path, recipe, weights, tokenizer.gguf_keys(words))
    return {
        "bench": "storyteller-training",
        "model": recipe.name,
        "steps": recipe.n_steps,
        "steps_here": len(losses),
        "tokens": recipe.n_steps * TOKENS_PER_STEP,
        "parameters": sum(w.size for w in weights.values()),
        "bytes": path.stat().st_size,
        "loss_of_last_20_steps": _last_20(losses),
        "balance_of_last_20_steps": _last_20(uneven),
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "cpu_minutes": round(sum(os.times()[:2]) / 60, 1),
        **compare(path, recipe, words, weights),
    }


def _last_20(values: list[float]) -> float | None:
    """None where the kept state was that of the last step."""
    return round(float(np.mean(values[-20:])), 4) if values else None


def compare(path: Path, recipe: Recipe, words: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp makes of the file, against what it was made of: tokens and logits of the held-out text."""
    text = held_out_text()
    expected = words.encode(text).ids
    llm = Llama(str(path), n_ctx=N_CTX, logits_all=True, verbose=False)
    tokens = llm.tokenize(text.encode(), add_bos=False)
    row = np.array(tokens[:N_CTX], np.int32)[None]
    exact = replace(recipe, other="F16", experts="F16")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "f16.gguf"
        export.write_gguf(copy, exact, weights, tokenizer.gguf_keys(words))
        errors = {
            "logits_nmse": _logits_error(path, recipe, weights, row),
            "logits_nmse_f16": _logits_error(copy, exact, weights, row),
        }
    return {
        "held_out_tokens": len(expected),
        "same_tokens_as_llama_cpp": tokens == expected,
        "text_comes_back": llm.detokenize(tokens) == text.encode(),
        **errors,
        "logits_rows": N_CTX,
        "held_out_loss": round(float(training.loss_of(weights, row, recipe)[0]), 4),
        "held_out_loss_as_stored": round(float(training.loss_of(export.read_back(weights, recipe), row, recipe)[0]), 4),
    }


def _logits_error(path: Path, recipe: Recipe, weights: dict[str, Any], row: np.ndarray) -> float:
    """Of llama.cpp's logits for a file, against JAX's with the weights as they are stored there: NMSE."""
    llm = Llama(str(path), n_ctx=N_CTX, logits_all=True, verbose=False)
    llm.eval(row[0].tolist())
    network_logits = jax.jit(network.logits, static_argnums=2)
    ours = np.asarray(network_logits(export.read_back(weights, recipe), jnp.asarray(row), recipe.shape)[0])[0]
    theirs = llm.scores[: row.shape[1]]
    return float(((theirs - ours) ** 2).sum() / (ours**2).sum())


if __name__ == "__main__":
    main()
