"""`oallama chat`: a conversation with the model's own chat template."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from oallama.base.printing import say, write_text

from .loading import Source, open_llama
from .options import (
    Batch,
    Ctx,
    Device,
    FlashAttn,
    LocalRpc,
    Margin,
    Model,
    Plan,
    Profile,
    Rpc,
    Threads,
    TypeK,
    TypeV,
    Ubatch,
    Vram,
)

HELP = "/clear forgets the conversation, /exit or Ctrl-D ends it; Ctrl-C stops an answer"


def chat(
    model: Model,
    plan: Plan = None,
    vram: Vram = None,
    margin: Margin = None,
    profile: Profile = None,
    device: Device = None,
    rpc: Rpc = None,
    local_rpc: LocalRpc = False,
    ctx: Ctx = None,
    batch: Batch = None,
    ubatch: Ubatch = None,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    flash_attn: FlashAttn = "auto",
    threads: Threads = 0,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    n_generate: Annotated[int, typer.Option("--n-generate", "-n", min=1, help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.8,
) -> None:
    """Talk with the model; answers are streamed."""
    request = (model, plan, vram, profile, device, rpc, local_rpc, ctx, batch, ubatch)
    llm = open_llama(Source(*request, type_k, type_v, flash_attn, threads, margin))
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


def _ask() -> str | None:
    """The next line of the user, None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    return None if line == "/exit" else line


def _answer(llm: Any, messages: list[dict[str, str]], n_generate: int, temperature: float) -> str | None:
    """Stream an answer; None when the conversation no longer fits the context."""
    answer: list[str] = []
    try:
        stream = llm.create_chat_completion(messages, max_tokens=n_generate, temperature=temperature, stream=True)
        for chunk in stream:
            answer.append(chunk["choices"][0]["delta"].get("content") or "")
            write_text(answer[-1])
    except ValueError as error:
        if "context window" not in str(error):
            raise
        say(f"error: {error}; /clear starts a new conversation, --ctx makes room for a longer one")
        return None
    except KeyboardInterrupt:
        say(" (stopped)")
    print()
    return "".join(answer)
