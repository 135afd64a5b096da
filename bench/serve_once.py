"""Several requests at once to a server that is up, once: python bench/serve_once.py PORT N N_PROMPT N_GENERATE

Prints JSON: seconds until every request had its first token, and the mean time of a token after that.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

WAIT_S = 300.0


def ask(port: int, tokens: list[int], n_generate: int, together: Barrier) -> tuple[float, list[float]]:
    """When it was sent, and when each token came."""
    body = {"prompt": tokens, "n_predict": n_generate, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    data = json.dumps({**body, "stream": True, "return_tokens": True}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", data, {"Content-Type": "application/json"})
    together.wait()
    begin, times = time.perf_counter(), []
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        for line in answer:
            if line.startswith(b"data: ") and (n := len(json.loads(line[6:]).get("tokens", []))):
                times += [time.perf_counter()] * n
    return begin, times[:n_generate]


def wait(port: int) -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not come up")


def main() -> None:
    port, n, n_prompt, n_generate = map(int, sys.argv[1:])
    wait(port)
    draw, together = random.Random(1), Barrier(n)
    prompts = [[draw.randrange(1000, 30000) for _ in range(n_prompt)] for _ in range(n)]
    with ThreadPoolExecutor(n) as pool:
        found = list(pool.map(lambda tokens: ask(port, tokens, n_generate, together), prompts))
    begin = min(sent for sent, _ in found)
    ttft = max(times[0] for _, times in found) - begin
    last = max(times[-1] for _, times in found) - begin
    # Those that began first have tokens before the last one has its first.
    print(json.dumps({"ttft_s": ttft, "request_s": last, "tpot_s": max(0.0, last - ttft) / max(1, n_generate - 1)}))


if __name__ == "__main__":
    main()
