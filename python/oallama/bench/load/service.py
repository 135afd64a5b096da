"""What is found out about a server before the load begins: its models, its tokens, what requests may say."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import aiohttp

from oallama.errors import OallamaError

from .arrivals import Request
from .client import BUSY, SHORTEST_RETRY_S, Answer, ask, session, stream
from .prompts import Prompts, of_tokens, of_words, sample_text

LOADING_S = 300.0  # a server that is too busy before the load begins is loading its model
# What not every server knows, left out one by one for a server that refuses a request with them.
OPTIONAL: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Service:
    """A server that answered.

    Attributes:
        url: without /v1.
        chat: whether /v1/chat/completions is asked, not /v1/completions.
        prompts: by model.
        extras: what every request says besides model, prompt and length.
    """

    url: str
    chat: bool
    prompts: dict[str, Prompts]
    extras: dict[str, Any]

    @property
    def endpoint(self) -> str:
        return f"{self.url}/v1/chat/completions" if self.chat else f"{self.url}/v1/completions"

    @property
    def exact(self) -> bool:
        """Whether prompts have as many tokens as asked for, not only about as many."""
        return not self.chat and all(isinstance(prompts.pool[0], int) for prompts in self.prompts.values())

    def body(self, request: Request, salt: int) -> bytes:
        """The request as it is sent, with the prompt that `salt` gives."""
        prompt = self.prompts[request.model].make(request, salt)
        what = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        fields = {"model": request.model, **what, "max_tokens": request.n_answer, **self.extras}
        return json.dumps(fields).encode()


def reach(
    url: str, models: Sequence[str] | None, *, chat: bool = False, waiting: Callable[[str], None] | None = None
) -> Service:
    """Find out what a server serves and send one short request to each model.

    Args:
        models: the models to be asked; None: the only one that the server has.
        waiting: called with what is waited for while a server loads its models; that may take five minutes.

    Raises:
        OallamaError: nobody answers at the address, the server has no such model or more than one, or a model does not
            answer.
    """
    return asyncio.run(_reach(url.rstrip("/").removesuffix("/v1"), models, chat, waiting or (lambda what: None)))


async def _reach(url: str, models: Sequence[str] | None, chat: bool, waiting: Callable[[str], None]) -> Service:
    async with session() as http:
        served = await _served(http, url, waiting)
        if models is None:
            if len(served) != 1:
                has = f"has {', '.join(served)}" if served else "does not say what it has"
                raise OallamaError(f"the server at {url} {has}; name the model with --model NAME=RATE")
            models = list(served)
        for model in models:
            if served and model not in {*served, *chain(*served.values())}:
                raise OallamaError(f"the server at {url} has no model {model!r}; it has {', '.join(served)}")
        extras, made = {"stream": True, "temperature": 0, **OPTIONAL}, {}
        for model in models:
            service = Service(url, chat, {model: of_words()}, extras)
            extras = await _answering(http, service, model, waiting)
            made[model] = await _prompts(http, url, model, chat)
        return Service(url, chat, made, extras)


async def _served(http: aiohttp.ClientSession, url: str, waiting: Callable[[str], None]) -> dict[str, list[str]]:
    """Names of the server's models and other names of the same; none where it does not list them."""
    end = time.monotonic() + LOADING_S
    while (reply := await ask(http, f"{url}/v1/models"))[0] in BUSY and time.monotonic() < end:
        waiting(url)
        await asyncio.sleep(1.0)
    status, said = reply
    if status != 200 or not isinstance(said, dict):
        return {}
    return {model["id"]: model.get("aliases") or [] for model in said.get("data") or ()}


async def _answering(
    http: aiohttp.ClientSession, service: Service, model: str, waiting: Callable[[str], None]
) -> dict[str, Any]:
    """Send a short request until the model answers; returns the extras with which it does."""
    extras, end = service.extras, time.monotonic() + LOADING_S
    while True:
        body = Service(service.url, service.chat, service.prompts, extras).body(Request(0, model, 0.0, 4, 2), salt=0)
        answer = Answer()
        await stream(http, service.endpoint, body, answer, time.monotonic)
        if answer.outcome == "completed":
            return extras
        if answer.outcome == "refused" and time.monotonic() < end:
            waiting(model)
            await asyncio.sleep(1.0 if answer.retry_after_s is None else max(SHORTEST_RETRY_S, answer.retry_after_s))
        elif (answer.error or "").startswith(("400", "422")) and (
            left := [name for name in OPTIONAL if name in extras]
        ):
            extras = {name: value for name, value in extras.items() if name != left[0]}
        else:
            raise OallamaError(f"the model {model} does not answer at {service.endpoint}: {answer.error}")


async def _prompts(http: aiohttp.ClientSession, url: str, model: str, chat: bool) -> Prompts:
    """Of tokens where the server has llama.cpp's or vLLM's /tokenize; of words for a chat, whose template is text."""
    text = sample_text()
    # llama.cpp reads `content`, vLLM `prompt`.
    body = {"model": model, "content": text, "prompt": text, "add_special": False, "add_special_tokens": False}
    status, said = await ask(http, f"{url}/tokenize", body)
    tokens = said.get("tokens") if status == 200 and isinstance(said, dict) else None
    if not tokens:
        return of_words()
    return of_words(len(tokens)) if chat else of_tokens(tokens)
