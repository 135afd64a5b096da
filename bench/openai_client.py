"""The official `openai` package against a running server: what a user's program sees of it.

pip install openai; oallama serve --hot A.gguf --cold B.gguf --port 8123 &
python bench/openai_client.py http://127.0.0.1:8123/v1 [--rounds N] [--out FILE.jsonl]

Of every model the server lists: chat and plain completions, streamed (with usage) and not. An unknown model must be the
package's NotFoundError, malformed requests its BadRequestError. Writes the machine, then one JSON line per round.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai

from oallama.bench.machine import describe
from oallama.bench.script import arguments, record

N_CHAT, N_PLAIN = 16, 8


def answers(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """Finish reason and tokens of each kind of call; of streams, pieces of text and tokens."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    chat: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": N_CHAT}
    plain: dict[str, Any] = {"model": model, "prompt": "Once upon a time", "max_tokens": N_PLAIN}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    said = client.chat.completions.create(**chat)
    written = client.completions.create(**plain)
    events = [*client.chat.completions.create(**chat, **usage)]
    pieces = [*client.completions.create(**plain, **usage)]
    return {
        "chat": [said.choices[0].finish_reason, said.usage.completion_tokens],
        "completion": [written.choices[0].finish_reason, written.usage.completion_tokens],
        "chat stream": [sum(bool(e.choices and e.choices[0].delta.content) for e in events), _tokens(events)],
        "completion stream": [sum(bool(e.choices and e.choices[0].text) for e in pieces), _tokens(pieces)],
    }


def _tokens(events: list[Any]) -> int:
    return next(e.usage.completion_tokens for e in reversed(events) if e.usage)


def refusals(client: openai.OpenAI, model: str) -> dict[str, str]:
    """The package's exception and its status, by mistake."""
    mistakes: dict[str, Callable[[], object]] = {
        "unknown model": lambda: client.chat.completions.create(model="nobody", messages=[]),
        "malformed prompt": lambda: client.post("/completions", body={"model": model, "prompt": {}}, cast_to=object),
        "malformed chat": lambda: client.post(
            "/chat/completions", body={"model": model, "messages": "no"}, cast_to=object
        ),
    }
    found = {}
    for name, call in mistakes.items():
        try:
            call()
            found[name] = "answered"
        except openai.APIStatusError as error:
            found[name] = f"{type(error).__name__} {error.status_code}"
    return found


def main() -> None:
    parser = arguments(__doc__, "openai-client")
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    head = {"machine": describe(), "openai": openai.__version__}
    record(rounds(args.url, args.rounds), args.out, head=head, quiet=True)


def rounds(url: str, n: int) -> Iterator[dict[str, Any]]:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    for _ in range(n):
        models = sorted(model.id for model in client.models.list())
        line = {"models": {model: answers(client, model) for model in models}, **refusals(client, models[0])}
        print(json.dumps(line, indent=1))
        yield line


if __name__ == "__main__":
    main()
