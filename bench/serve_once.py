"""Several requests at once to a server that starts: python bench/serve_once.py URL N N_PROMPT N_GENERATE

Prints JSON: seconds until every request had its first token, and the mean time of a token after that.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

from oallama.bench.load.client import Answer, ask, session, stream
from oallama.errors import OallamaError

WAIT_S = 300.0


async def wait(http: object, url: str) -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            if (await ask(http, f"{url}/health"))[0] == 200:
                return
        except OallamaError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the server did not come up")


async def measure(url: str, n: int, n_prompt: int, n_generate: int) -> dict[str, float]:
    draw, answers = random.Random(1), [Answer() for _ in range(n)]
    async with session() as http:
        await wait(http, url)
        begin, sent = time.perf_counter(), []
        for answer in answers:
            prompt = [draw.randrange(1000, 30000) for _ in range(n_prompt)]
            body = {"prompt": prompt, "max_tokens": n_generate, "temperature": 0, "ignore_eos": True, "stream": True}
            data = json.dumps({**body, "cache_prompt": False}).encode()
            sent.append(stream(http, f"{url}/v1/completions", data, answer, time.perf_counter))
        await asyncio.gather(*sent)
    for answer in answers:
        if answer.outcome != "completed" or answer.n_answer != n_generate or answer.end_s is None:
            raise SystemExit(f"a request {answer.outcome}: {answer.error}, {answer.n_answer} tokens")
    ttft = max(answer.text_s[0] for answer in answers) - begin
    last = max(answer.end_s or 0.0 for answer in answers) - begin
    # Those that began first have tokens before the last one has its first.
    return {"ttft_s": ttft, "request_s": last, "tpot_s": max(0.0, last - ttft) / max(1, n_generate - 1)}


def main() -> None:
    url, *sizes = sys.argv[1:]
    print(json.dumps(asyncio.run(measure(url, *map(int, sizes)))))


if __name__ == "__main__":
    main()
