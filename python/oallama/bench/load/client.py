"""A client of OpenAI-compatible servers: one streamed answer and when each part of it came.

Every chunk is stamped when it is read, before it is parsed.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from oallama.errors import OallamaError

try:
    import aiohttp
except ImportError:
    raise OallamaError("the load generator needs aiohttp: pip install oallama[load]") from None

KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_TIMEOUT_S = 10.0
REPLY_TIMEOUT_S = 60.0
BUSY = (429, 503)
SHORTEST_RETRY_S = 0.1  # a Retry-After of 0 is no invitation to ask without a pause
Clock = Callable[[], float]
Outcome = Literal["completed", "failed", "refused", "unfinished"]


@dataclass
class Answer:
    """What came back. Times are seconds on the client's clock.

    Attributes:
        outcome: refused: the server said that it is too busy; failed: anything else that is no whole answer, see
            `error`; unfinished: the client gave up before the end.
        gone: nobody listens at the server's address any more.
        retry_after_s: of a refusal that names it.
        text_s: when each chunk with text came; usually, but not always, a token each.
        end_s: when the end of the text was known.
        n_prompt, n_answer, n_cached: tokens by the server's `usage` or llama.cpp's `timings`; None without either.
    """

    outcome: Outcome = "unfinished"
    error: str | None = None
    gone: bool = False
    retry_after_s: float | None = None
    text_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    n_prompt: int | None = None
    n_answer: int | None = None
    n_cached: int | None = None


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Connections without a limit of their own and without timeouts between chunks; $OPENAI_API_KEY is sent if set."""
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as opened:
        yield opened


async def ask(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any] | list[Any] | None]:
    """GET, or POST of a body, within a minute: the status and the JSON of the reply, None where it is none.

    Raises:
        OallamaError: nobody answers.
    """
    timeout = aiohttp.ClientTimeout(total=REPLY_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
    try:
        async with http.request("GET" if body is None else "POST", url, json=body, timeout=timeout) as reply:
            try:
                return reply.status, json.loads(await reply.read())
            except ValueError:
                return reply.status, None
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError) as error:
        raise OallamaError(f"no server answers at {url}: {_reason(error)}") from None


async def stream(http: aiohttp.ClientSession, url: str, body: bytes, answer: Answer, clock: Clock) -> None:
    """Send a request for a streamed completion and fill in `answer` until its end; raises nothing but cancellation."""
    try:
        async with http.post(url, data=body) as reply:
            if reply.status == 200:
                await _read(reply, answer, clock)
            else:
                _refusal(reply.status, reply.headers.get("Retry-After"), await reply.read(), answer)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        answer.outcome, answer.error = "failed", _reason(error)
        answer.gone = isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED


async def _read(reply: aiohttp.ClientResponse, answer: Answer, clock: Clock) -> None:
    events, finished = Events(), False
    async for data in reply.content.iter_any():
        now = clock()
        for event in events.feed(data):
            finished |= event == b"[DONE]" or take(event, answer, now)
            if answer.error:
                answer.outcome = "failed"
                return
    if not finished or not (answer.text_s or answer.end_s):
        answer.outcome, answer.error = (
            "failed",
            "the answer ended before its end" if answer.text_s else "no answer came",
        )
        return
    answer.outcome = "completed"


class Events:
    """The `data:` lines of a stream of server-sent events, whole ones, however the stream was cut on its way."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What the lines say that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def take(event: bytes, answer: Answer, now: float) -> bool:
    """Note what an event says; True when it is the end of the text."""
    try:
        said = json.loads(event)
    except ValueError:
        said = None
    if not isinstance(said, dict):
        answer.error = f"the server sent what is no event: {event[:80].decode('utf-8', 'replace')}"
        return False
    if "error" in said:
        answer.error = message(said)
        return False
    _count(said, answer)
    choice = next(iter(said.get("choices") or ()), None)
    if choice is None:
        return False
    delta = choice.get("delta") or {}
    if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
        answer.text_s.append(now)
    if choice.get("finish_reason") is None:
        return False
    answer.end_s = now
    return True


def _count(said: dict[str, Any], answer: Answer) -> None:
    if usage := said.get("usage"):
        answer.n_prompt, answer.n_answer = usage.get("prompt_tokens"), usage.get("completion_tokens")
        answer.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    elif (timings := said.get("timings")) and answer.n_answer is None:
        answer.n_cached, answer.n_answer = timings.get("cache_n", 0), timings.get("predicted_n")
        answer.n_prompt = timings.get("prompt_n", 0) + answer.n_cached


def _refusal(status: int, retry_after: str | None, text: bytes, answer: Answer) -> None:
    try:
        said = message(json.loads(text))
    except ValueError:
        said = text[:200].decode("utf-8", "replace")
    answer.error = f"{status}: {' '.join(said.split())}"
    answer.outcome = "refused" if status in BUSY else "failed"
    if status in BUSY and retry_after and retry_after.isdigit():
        answer.retry_after_s = float(retry_after)


def message(said: Any) -> str:
    """The text of an error as OpenAI's, llama.cpp's and vLLM's servers send it."""
    error = said.get("error", said) if isinstance(said, dict) else said
    found = error.get("message", error) if isinstance(error, dict) else error
    return str(found)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__
