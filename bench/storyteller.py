"""The demo model: trains it, compares the export with llama.cpp, and measures what it knows.

python bench/storyteller.py [--train NEW.gguf] [--model FILE.gguf] [--out FILE.jsonl]

--train needs `pip install oallama[train]` (JAX on the CPU) and writes a model from nothing: text, tokenizer, weights.
One JSON line for it: loss, minutes; tokens of the held-out text by the tokenizers library against llama.cpp's; logits
of JAX against llama.cpp's. One line for what the model (a new one, --model, or the shipped one) knows: perplexity of
the held-out text, right answers by kind of question, true sentences and answers of pages that it writes.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from oallama import Llama, demo_model
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.engine import runtime
from oallama.storyteller import Author, held_out_text
from oallama.storyteller.exam import mark, right_answers, tell

EXAM_SEED = 3
N_STORIES = 60
N_CTX = 512


def main() -> None:
    parser = arguments(__doc__, "storyteller")
    parser.add_argument("--train", type=Path)
    parser.add_argument("--model", type=Path, default=demo_model())
    options = parser.parse_args()
    if options.train:
        record([train(options.train)], options.out, each=describe())
    record([knowledge(options.train or options.model)], options.out, each=describe())


def train(path: Path) -> dict[str, Any]:
    """Write a new model; how that went."""
    from oallama.storyteller import export, tokenizer
    from oallama.storyteller import train as trainer

    steps = sum(trainer.STEPS.values())
    start, losses = time.perf_counter(), []

    def report(step: int, loss: float) -> None:
        losses.append(loss)
        note(f"step {step + 1} of {steps}: loss {loss:.4f}")

    words = trainer.make_tokenizer()
    weights = trainer.train(words, trainer.SEED, report)
    export.write_gguf(path, trainer.SHAPE, weights, tokenizer.gguf_keys(words))
    return {
        "bench": "storyteller-training",
        "steps": steps,
        "tokens": steps * trainer.TOKENS_PER_STEP,
        "parameters": sum(w.size for w in weights.values()),
        "bytes": path.stat().st_size,
        "loss_of_last_20_steps": round(float(np.mean(losses[-20:])), 4),
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "cpu_minutes": round(sum(os.times()[:2]) / 60, 1),
        **compare(path, words, weights),
    }


def compare(path: Path, words: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp makes of the file, against what it was made of: tokens and logits of the held-out text."""
    import jax
    import jax.numpy as jnp

    from oallama.storyteller import llama_jax
    from oallama.storyteller import train as trainer

    text = held_out_text()
    expected = words.encode(text).ids
    llm = Llama(str(path), n_ctx=N_CTX, logits_all=True, verbose=False)
    tokens = llm.tokenize(text.encode(), add_bos=False)
    llm.eval(tokens[:N_CTX])
    stored = {name: w.astype(jnp.float16).astype(jnp.float32) if w.ndim == 2 else w for name, w in weights.items()}
    batch = jnp.array([tokens[:N_CTX]], jnp.int32)
    ours = np.asarray(jax.jit(llama_jax.logits, static_argnums=2)(stored, batch, trainer.SHAPE))[0]
    theirs = llm.scores[:N_CTX]
    held_out = trainer.loss_of(weights, np.array(tokens[:N_CTX], np.int32)[None])
    return {
        "held_out_tokens": len(expected),
        "same_tokens_as_llama_cpp": tokens == expected,
        "text_comes_back": llm.detokenize(tokens) == text.encode(),
        "logits_nmse": float(((theirs - ours) ** 2).sum() / (ours**2).sum()),
        "logits_rows": N_CTX,
        "held_out_loss": round(float(held_out), 4),
    }


def knowledge(path: Path) -> dict[str, Any]:
    """What a model knows of stories that it has not seen."""
    llm = Llama(str(path), n_ctx=N_CTX, n_threads=1, n_threads_batch=1, verbose=False)
    author = Author(EXAM_SEED)
    stories = [author.story() for _ in range(N_STORIES)]
    marks = [mark(tell(llm, story.text[: story.text.index(".") + 1])) for story in stories]
    true, faults = sum(m.true for m in marks), [fault for m in marks for fault in m.faults]
    return {
        "bench": "storyteller-knowledge",
        "model": path.name,
        "bytes": path.stat().st_size,
        "perplexity": perplexity(path),
        "right_answers": {kind: list(counts) for kind, counts in right_answers(llm, stories).items()},
        "true_sentences": [true, true + len(faults)],
        "first_faults": faults[:5],
    }


def perplexity(path: Path) -> float:
    """That of the held-out text by llama-perplexity: chunks of 512 tokens, the second half of each counts."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(held_out_text())
        file.flush()
        command = [str(runtime.program("llama-perplexity")), "-m", str(path), "-f", file.name]
        command += ["-c", "512", "-t", "1", "-fit", "off"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(re.findall(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)[0])


if __name__ == "__main__":
    main()
