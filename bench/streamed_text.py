"""What turning tokens into text adds to a token of a long streamed answer: our tokenizer and llama-cpp-python's.

python bench/streamed_text.py [--out FILE.jsonl] [--tokens 2000] [--rounds 5]

A tiny model of random weights with a vocabulary of 32000 writes an answer of so many tokens through
`create_completion(stream=True)`, with each tokenizer in turn. One JSON line: ms per token in the first and in the last
tenth of the answer, median of the rounds, and how many times faster ours is there, with an interval.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from oallama import Llama, StoppingCriteriaList
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record
from oallama.bench.stats import speedup
from oallama.engine import piece_tokenizer
from oallama.engine.piece_tokenizer import PieceTokenizer
from oallama.modelmaker import make_model


def main() -> None:
    parser = arguments(__doc__, "streamed-text")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "m.gguf", shape="tiny", overrides={"n_vocab": 32000})
        record(measured(model, options.tokens, options.rounds), options.out, each={"machine": describe()})


def measured(model: Path, n_tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    llm = Llama(str(model), n_ctx=n_tokens + 64, n_threads=1, verbose=False)
    makers = {"oallama": PieceTokenizer, "llama-cpp-python": piece_tokenizer.UPSTREAM}
    taken: dict[tuple[str, str], list[float]] = {(who, part): [] for who in makers for part in ("first", "last")}
    for number in range(rounds):
        note(f"round {number + 1} of {rounds}")
        for who, maker in makers.items():
            llm.tokenizer_ = maker(llm)
            times = answer(llm, n_tokens)
            tenth = n_tokens // 10
            for part, piece in (("first", times[:tenth]), ("last", times[-tenth:])):
                taken[who, part].append(1e3 * (piece[-1] - piece[0]) / (len(piece) - 1))
    faster = {part: speedup(taken["llama-cpp-python", part], taken["oallama", part]) for part in ("first", "last")}
    yield {
        "tokens": n_tokens, "rounds": rounds,
        "ms": {f"{who}, {part} tenth": round(median(ms), 3) for (who, part), ms in taken.items()},
        "faster": {part: [round(r.value, 2), round(r.low, 2), round(r.high, 2)] for part, r in faster.items() if r},
    }  # fmt: skip
    llm.close()


def answer(llm: Llama, n_tokens: int) -> list[float]:
    """When each token of an answer was sampled, in seconds. The same word again and again, which is valid text."""
    clock: list[float] = []

    def note_time(tokens: Any, logits: Any) -> bool:
        clock.append(time.perf_counter())
        return False

    (word,) = llm.tokenize(b"a", add_bos=False)[-1:]
    stream = llm.create_completion(
        "a b c", max_tokens=n_tokens, temperature=0.0, stream=True, logit_bias={str(word): 1000.0},
        stopping_criteria=StoppingCriteriaList([note_time]),
    )  # fmt: skip
    for _ in stream:
        pass
    return clock[-n_tokens:]


if __name__ == "__main__":
    main()
