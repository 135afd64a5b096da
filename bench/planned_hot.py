"""What plans gain a hot model with guests and its cold one: tokens per second of both, with and without.

python bench/planned_hot.py [--types Q8_0,F16] [--clients 6] [--tokens 160] [--rounds 5] [--out FILE.jsonl]

`oallama serve --hot --cold`, a core for each model (one thread), two slots at home and the others as guests; the models
are llama, small, with six layers. "planned" is the default: `auto`'s plans for the CPU, of both models. "unplanned" is
--no-plan. The two servers take turns, each started anew; before the first round a server makes and keeps the plans. In
a round as many clients as told ask the hot model at once, each for so many tokens, while one asks the cold model
without end. One JSON line per type: tokens per second of the rounds, and how many times faster "planned" is, with the
interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from concurrent_texts import guests_of, until_it_answers

from oallama.base.children import die_with_parent
from oallama.base.ports import free_port
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.bench.stats import speedup
from oallama.modelmaker import make_model

OALLAMA = Path(sys.executable).parent / "oallama"
AT_HOME, N_CTX = 2, 4096
FORMS = ("unplanned", "planned")


def main() -> None:
    parser = arguments(__doc__, "planned-hot")
    parser.add_argument("--types", type=words, default=["Q8_0", "F16"])
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    record(lines(options), options.out, each={"machine": describe()})


def lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for file_type in options.types:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            made = {"file_type": file_type, "shape": "small", "overrides": {"n_layer": 6}}
            hot, cold = (make_model(folder / f"{which}.gguf", **made) for which in ("hot", "cold"))
            with serving("planned", hot, cold, options):
                note(f"{file_type}: plans are made")
            found: dict[str, dict[str, list[float]]] = {form: {"hot": [], "cold": []} for form in FORMS}
            for number in range(options.rounds):
                for form in FORMS:
                    note(f"{file_type}: round {number + 1}, {form}")
                    for which, rate in measured(form, hot, cold, options).items():
                        found[form][which].append(rate)
            faster = {}
            for which in ("hot", "cold"):
                ratio = speedup(*([1 / rate for rate in found[form][which]] for form in FORMS))
                assert ratio
                faster[which] = ratio.to_json()
            yield {
                "type": file_type, "clients": options.clients, "at_home": AT_HOME, "tokens": options.tokens,
                "tokens_per_s": found, "planned_is_faster": faster,
            }  # fmt: skip


def measured(form: str, hot: Path, cold: Path, options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second by model."""
    with serving(form, hot, cold, options) as port:
        ended, of_cold = threading.Event(), [0]

        def keep_cold_busy() -> None:
            while not ended.is_set():
                of_cold[0] += ask(port, "cold", "Once upon a time", 16)

        busy = threading.Thread(target=keep_cold_busy)
        busy.start()
        begin = time.monotonic()
        with ThreadPoolExecutor(options.clients) as pool:
            texts = [
                f"{word} went to the market and" for word in ("fox", "cat", "cow", "hen", "ant", "bee", "owl", "dog")
            ]
            n = sum(pool.map(lambda i: ask(port, "hot", texts[i % 8], options.tokens), range(options.clients)))
        seconds = time.monotonic() - begin
        rates = {"hot": n / seconds, "cold": of_cold[0] / seconds}
        ended.set()
        busy.join()
        came, lost = guests_of(port, "hot")
        if came == 0 or lost:
            raise SystemExit(f"{came} guests, {lost} lost")
        return rates


@contextmanager
def serving(form: str, hot: Path, cold: Path, options: argparse.Namespace) -> Iterator[int]:
    port = free_port()
    command: list[object] = [OALLAMA, "serve", "--hot", hot, "--cold", cold, "--parallel", AT_HOME]
    command += ["--guests", options.clients - AT_HOME, "--ctx", N_CTX, "--threads", 1, "--deadline", 5, "--port", port]
    command += ["--no-plan"] * (form == "unplanned")
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, preexec_fn=die_with_parent)
        try:
            until_it_answers(process, port, "hot")
            yield port
        finally:
            process.terminate()
            process.wait()


def ask(port: int, name: str, prompt: str, n: int) -> int:
    """Tokens of an answer."""
    body = {"model": name, "prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


if __name__ == "__main__":
    main()
