"""`oallama chat`: a conversation with the model's own chat template."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from oallama.base.printing import say, write_text
from oallama.engine.outline import metadata, outline
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError

from .groups import grouped
from .loading import Source, open_llama
from .options import Hardware, Kernels, Model, NGenerate, Placing, Sizes, Temperature

HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it; Ctrl-C stops an answer or drops a line"
ROOM = "/clear starts a new conversation, --ctx makes room for a longer one"
TEMPLATE = "tokenizer.chat_template"


@grouped
def chat(
    model: Model,
    *,
    placing: Placing,
    hardware: Hardware,
    sizes: Sizes,
    kernels: Kernels,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    n_generate: NGenerate = 512,
    temperature: Temperature = 0.8,
) -> None:
    """Talk with the model; answers are streamed."""
    check_template(model)
    llm = open_llama(Source(model, placing, hardware, sizes, kernels))
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    say(HELP)
    while (question := _ask()) is not None:
        if question == "/clear":
            messages = list(opening)
        elif question:
            messages.append({"role": "user", "content": question})
            answer = _answer(llm, messages, n_generate, temperature)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def check_template(model: Path) -> None:
    """Raises OallamaError for a model that cannot tell a question from an answer."""
    quiet()
    with outline(model) as read:
        if not metadata(read, TEMPLATE):
            raise OallamaError(
                f"{model} has no chat template, so it was not made for conversations; "
                f'`oallama run {model} "Once upon a time"` lets it continue a text'
            )


def _ask() -> str | None:
    """The next line of the user; None at the end of the input, and at the second Ctrl-C in a row."""
    dropped = False
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()
            if dropped:
                return None
            dropped = True
            say("the line is dropped; Ctrl-C again ends the conversation")
            continue
        return None if line == "/exit" else line


def _answer(llm: Any, messages: list[dict[str, str]], n_generate: int, temperature: float) -> str | None:
    """Stream an answer; None when the conversation no longer fits the context."""
    answer: list[str] = []
    full = False
    try:
        stream = llm.create_chat_completion(messages, max_tokens=n_generate, temperature=temperature, stream=True)
        for chunk in stream:
            choice = chunk["choices"][0]
            answer.append(choice["delta"].get("content") or "")
            write_text(answer[-1])
            full = choice["finish_reason"] == "length" and llm.n_tokens >= llm.n_ctx() - 1
    except ValueError as error:
        if "context window" not in str(error):
            raise
        say(f"error: {error}; {ROOM}")
        return None
    except KeyboardInterrupt:
        say(" (stopped)")
    print()
    if full:
        say(f"the context of {llm.n_ctx()} tokens is full; {ROOM}")
    return "".join(answer)
