"""How often a model's MTP heads are right: counted by llama-server itself, kept by the file.

A head reads hidden states that no other program hands out, so the server that would serve runs for some seconds: it
answers a few prompts, always with the likeliest token, and its answers say how many guesses were made and accepted.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ..base.children import die_with_parent, last_words
from ..base.ports import free_port
from ..data.plan import PlacementPlan
from ..drafts.acceptance import LEAST, LIMIT_S, MOST_S, N_EACH, PROMPTS, Acceptance, keep
from ..engine.load_settings import Settings
from ..errors import OallamaError
from ..profiling.fingerprint import cpu_set
from .command import Heads, planned_environment, planned_server
from .door import answers


def measure_heads(
    model: Path, plan: PlacementPlan, n: int, rpc_servers: Sequence[str] = (), n_threads: int = 0
) -> Acceptance:
    """Let llama-server write some text with n guesses at a time under a plan with heads; keep what was found.

    Raises:
        OallamaError: when the server does not come up or does not answer, with its last words, or guesses nothing.
    """
    settings = Settings(**asdict(plan.context), n_threads=n_threads or len(cpu_set()))
    command = planned_server(model, settings, plan, rpc_servers, Heads(n))
    n_guessed = n_right = n_written = 0
    with planned_environment(plan) as environment, _server(command, environment) as (port, log):
        start = time.monotonic()
        for prompt in PROMPTS:
            body = {"prompt": prompt, "n_predict": N_EACH, "temperature": 0, "cache_prompt": False}
            timings = _post(port, body, log)["timings"]
            n_guessed += timings.get("draft_n", 0)
            n_right += timings.get("draft_n_accepted", 0)
            n_written += timings["predicted_n"]
            if n_written >= LEAST and time.monotonic() - start > MOST_S:
                break
    if not n_guessed:
        raise OallamaError(f"the MTP heads of {model.name} guessed nothing in {n_written} tokens; give --acceptance")
    return keep(model, None, rate_of(n_right, n_guessed, n), n_guessed)


def rate_of(n_right: int, n_guessed: int, n: int) -> float:
    """The probability of one guess for which steps of n guesses have so many right ones in the mean: the sum of
    a + a^2 + .. + a^n, as `planning.speculation` takes it.
    """
    wanted, low, high = n * n_right / n_guessed, 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, n + 1)) < wanted else (low, middle)
    return high


@contextmanager
def _server(command: list[str], environment: dict[str, str]) -> Iterator[tuple[int, IO[bytes]]]:
    """Port and log of a server that is ready."""
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)], env=environment, stdout=log, stderr=log, preexec_fn=die_with_parent
        )
        try:
            end = time.monotonic() + LIMIT_S
            while not answers(f"http://127.0.0.1:{port}"):
                if process.poll() is not None or time.monotonic() > end:
                    raise _failed(log)
                time.sleep(0.1)
            yield port, log
        finally:
            process.kill()
            process.wait()


def _post(port: int, body: dict[str, Any], log: IO[bytes]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        raise _failed(log) from None


def _failed(log: IO[bytes]) -> OallamaError:
    return OallamaError(
        f"the guesses of the MTP heads could not be counted: {last_words(log, 3)}; give --acceptance, or none"
    )
