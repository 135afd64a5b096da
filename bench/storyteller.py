"""What the demo model knows.

python bench/storyteller.py [--model FILE.gguf] [--mixture] [--out FILE.jsonl]

One JSON line for --model, default the shipped one, dense or the mixture: perplexity of the held-out text, right answers
by kind of question, true sentences and answers of pages that it writes. `python scripts/train` makes a new one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from oallama import Llama, demo_model
from oallama.bench.machine import describe
from oallama.bench.script import arguments, record
from oallama.engine import runtime
from oallama.storyteller import Author, held_out_text
from oallama.storyteller.exam import mark, right_answers, tell

EXAM_SEED = 3
N_STORIES = 60
N_CTX = 512


def main() -> None:
    parser = arguments(__doc__, "storyteller")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--mixture", action="store_true")
    options = parser.parse_args()
    model = options.model or demo_model("mixture" if options.mixture else "dense")
    record([knowledge(model)], options.out, each=describe())


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
