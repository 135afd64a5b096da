"""`oallama run`: one prompt, streamed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from oallama.errors import OallamaError

from .groups import grouped
from .loading import Source, TokenClock, open_llama, write_text
from .options import Hardware, Json, Kernels, Model, Plan, Sampling, Sizes, Vram
from .terminal import print_json, say


@grouped
def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.', show_default=False)],
    *,
    plan: Plan = None,
    vram: Vram = None,
    hardware: Hardware,
    sizes: Sizes,
    kernels: Kernels,
    sampling: Sampling,
    json: Json = False,
) -> None:
    """Complete a prompt with streaming output; then TTFT and TPOT."""
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = open_llama(Source(model, plan, vram, hardware, sizes, kernels))
    clock, answer = complete(llm, text, sampling.n_generate, sampling.temperature, sampling.seed, quiet=json)
    n_prompt = len(llm.tokenize(text.encode()))
    if json:
        result = {"text": answer, "n_prompt": n_prompt, "n_generated": len(clock.times)}
        times = {"ttft_s": clock.ttft_s, "tpot_s": clock.tpot_s, "token_times_s": clock.times}
        print_json({**result, **times, "placement": llm.placement().to_dict()})
    else:
        say(clock.summary(n_prompt))


def complete(
    llm: Any,
    prompt: str,
    n_generate: int,
    temperature: float,
    seed: int | None,
    quiet: bool = False,
    stop: Sequence[str] = (),
) -> tuple[TokenClock, str]:
    """Stream one completion to stdout (unless quiet); returns its clock and text."""
    import oallama

    clock, answer = TokenClock(), []
    try:
        stream = llm.create_completion(
            prompt,
            max_tokens=n_generate,
            temperature=temperature,
            seed=seed,
            stream=True,
            stop=list(stop),
            stopping_criteria=oallama.StoppingCriteriaList([clock]),
        )
        for chunk in stream:
            answer.append(chunk["choices"][0]["text"])
            if not quiet:
                write_text(answer[-1])
    except ValueError as error:
        if "context window" not in str(error):
            raise
        raise OallamaError(f"{error}; shorten the prompt or raise --ctx") from error
    if not quiet:
        print()
    return clock, "".join(answer)
