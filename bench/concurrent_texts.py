"""Do greedy texts change when requests run beside each other? Ours, with and without guests, and the unpatched server.

ninja -C build/baseline llama-server; python bench/concurrent_texts.py [--requests 240] [--clients 6] [--tokens 64]
    [--rounds 3] [--models storyteller,random] [--out FILE.jsonl]

Servers, on the CPU with one thread: "upstream" (unpatched llama-server with a slot for each client), "ours" (the same
of `oallama serve`), "guests" (`--hot` with two slots at home and the other clients as guests of a cold model). Each one
answers all prompts alone first, then as many requests at once as there are clients. Models: the storyteller, which is
trained, and one with random weights, whose next tokens are nearly ties more often. One JSON line per model and server:
requests whose text differs from the same server's alone, by round; prompts whose text alone is not upstream's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oallama.base.children import die_with_parent
from oallama.base.ports import free_port
from oallama.bench import find_baseline_lib
from oallama.bench.machine import describe
from oallama.bench.script import arguments, note, record, words
from oallama.modelmaker import make_model
from oallama.serving.live import series
from oallama.storyteller import demo_model

SERVERS = ("upstream", "ours", "guests")
AT_HOME = 2
N_CTX = 4096
STARTS_WITHIN_S = 300
PROMPTS = [
    f"{name} the {animal} {what}"
    for name in ("Tom", "Anna", "Ben", "Mia")
    for animal in ("fox", "cat", "bear", "owl", "frog")
    for what in ("was", "had a", "saw the")
]


def main() -> None:
    parser = arguments(__doc__, "concurrent-texts")
    parser.add_argument("--requests", type=int, default=240, help="of a round")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=words, default=["storyteller", "random"])
    options = parser.parse_args()
    record(lines(options), options.out, each={"machine": describe()})


def lines(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = make_model(folder / "cold.gguf", arch="qwen2", file_type="F16")
        made = {"storyteller": demo_model(), "random": make_model(folder / "random.gguf", file_type="F16")}
        for of in options.models:
            alone: dict[str, list[str]] = {}
            for server in SERVERS:
                note(f"{of}: {server}")
                with serving(server, made[of], cold, options) as port:
                    alone[server], changed = measured(port, made[of].stem, options)
                    came, lost = guests_of(port, made[of].stem) if server == "guests" else (0, 0)
                if server == "guests" and came == 0:
                    raise SystemExit("no request was a guest")
                foreign = sum(a != b for a, b in zip(alone[server], alone["upstream"], strict=True))
                yield {
                    "model": of, "server": server, "clients": options.clients, "tokens": options.tokens,
                    "requests": options.requests, "other_texts": changed,
                    "prompts": len(PROMPTS), "other_than_upstream_alone": foreign,
                    "guests": came, "lost_guests": lost,
                }  # fmt: skip


@contextmanager
def serving(server: str, model: Path, cold: Path, options: argparse.Namespace) -> Iterator[int]:
    port, n = free_port(), options.clients
    ours = [Path(sys.executable).parent / "oallama", "serve"]
    command: dict[str, list[object]] = {
        "upstream": [find_baseline_lib() / "llama-server", "-m", model, "-np", n, "-c", N_CTX],
        "ours": [*ours, model, "--no-plan", "--device", "CPU", "--parallel", n, "--ctx", N_CTX],
        "guests": [*ours, "--hot", model, "--cold", cold, "--parallel", AT_HOME, "--guests", n - AT_HOME],
    }
    command["guests"] += ["--no-plan", "--ctx", N_CTX, "--deadline", 5]
    given = [*command[server], "--flash-attn", "on", "--threads", 1, "--port", port]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*map(str, given)], stdout=log, stderr=log, preexec_fn=die_with_parent)
        try:
            until_it_answers(process, port, model.stem)
            yield port
        finally:
            process.terminate()
            process.wait()


def until_it_answers(process: subprocess.Popen[bytes], port: int, name: str) -> None:
    end = time.monotonic() + STARTS_WITHIN_S
    while process.poll() is None:
        if time.monotonic() > end:
            raise SystemExit(f"{name} gives no answer after {STARTS_WITHIN_S} s")
        try:
            ask(port, name, "a", 1)
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("a server ended before it answered")


def ask(port: int, name: str, prompt: str, n: int) -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": n, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**body, "ignore_eos": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def guests_of(port: int, name: str) -> tuple[int, int]:
    """Sequences that became guests so far, and those of them that came home."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics?model={name}", timeout=10) as answer:
        values = series(answer.read().decode())
    lost = sum(value for key, value in values.items() if key.startswith("weave_lost_guests_total"))
    return int(values["weave_guests_total"]), int(lost)


def measured(port: int, name: str, options: argparse.Namespace) -> tuple[list[str], list[int]]:
    """Texts of the prompts alone; in each round, how many requests beside others had another one."""
    alone = [ask(port, name, prompt, options.tokens) for prompt in PROMPTS]
    expected = dict(zip(PROMPTS, alone, strict=True))
    changed = []
    for _ in range(options.rounds):
        asked = [PROMPTS[i % len(PROMPTS)] for i in range(options.requests)]
        with ThreadPoolExecutor(options.clients) as pool:
            texts = pool.map(lambda prompt: ask(port, name, prompt, options.tokens), asked)
            changed.append(sum(text != expected[prompt] for prompt, text in zip(asked, texts, strict=True)))
    return alone, changed


if __name__ == "__main__":
    main()
