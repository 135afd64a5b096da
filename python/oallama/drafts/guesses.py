"""The process that counts right guesses: a line of JSON in, one out (see acceptance.py)."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..data.plan import PlacementPlan
from ..engine import device_list, runtime
from ..engine.placed_llama import PlacedLlama
from ..llama import Llama
from ..profiling.fingerprint import cpu_set
from .acceptance import LEAST, MOST_S, N_EACH, PROMPTS

Text = tuple[list[int], list[int]]  # prompt and answer


def write_texts(target: str, plan: PlacementPlan, n_threads: int) -> list[Text]:
    """What the target writes by itself."""
    threads: dict[str, Any] = {"n_threads": n_threads} if n_threads else {}
    llm = Llama(target, plan=plan, verbose=False, **threads)
    vocab = runtime.llama_cpp().llama_model_get_vocab(llm.model)
    texts: list[Text] = []
    n, start = 0, time.monotonic()
    for prompt in PROMPTS:
        tokens, answer = llm.tokenize(prompt.encode())[: plan.context.n_ctx // 2], []
        for token in llm.generate(tokens, temp=0.0, repeat_penalty=1.0):
            answer.append(int(token))
            n += 1
            late = n >= LEAST and time.monotonic() - start > MOST_S
            end = runtime.llama_cpp().llama_vocab_is_eog(vocab, token)
            if end or late or len(answer) == N_EACH or len(tokens) + len(answer) == plan.context.n_ctx:
                break
        texts.append((tokens, answer))
        if late:
            break
    llm.close()
    return texts


def count_right(draft: str, texts: list[Text], n_threads: int) -> int:
    """Tokens of the answers that are the draft's likeliest behind all tokens before them."""
    longest = max(len(prompt) + len(answer) for prompt, answer in texts)
    threads = n_threads or len(cpu_set())
    on_the_cpu = {"devices": device_list.device_array([]), "n_gpu_layers": 0, "n_threads": threads}
    llm = PlacedLlama(draft, n_ctx=longest, n_batch=longest, logits_all=True, verbose=False, **on_the_cpu)
    n_right = 0
    for prompt, answer in texts:
        llm.reset()
        llm.eval([*prompt, *answer])
        guesses = np.argmax(llm.scores[len(prompt) - 1 : len(prompt) + len(answer) - 1], axis=1)
        n_right += int((guesses == np.array(answer)).sum())
    llm.close()
    return n_right


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    for endpoint in job["rpc_servers"]:
        device_list.add_rpc_server(endpoint)
    texts = write_texts(job["target"], PlacementPlan.from_json(job["plan"]), job["n_threads"])
    gc.collect()
    n_right = count_right(job["draft"], texts, job["n_threads"])
    return {"n_right": n_right, "n_tokens": sum(len(answer) for _, answer in texts)}


def main() -> None:
    try:
        said = run(json.loads(sys.stdin.readline()))
    except (ValueError, RuntimeError) as error:
        said = {"error": str(error)}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
