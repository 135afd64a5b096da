"""`oallama run`: one prompt, streamed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from oallama.base.printing import print_json, say
from oallama.loading.completion import complete

from .groups import grouped
from .loading import Source, open_llama
from .options import Hardware, Json, Kernels, Model, Placing, Sampling, Sizes


@grouped
def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.', show_default=False)],
    *,
    placing: Placing,
    hardware: Hardware,
    sizes: Sizes,
    kernels: Kernels,
    sampling: Sampling,
    json: Json = False,
) -> None:
    """Complete a prompt with streaming output; then TTFT and TPOT, and how often a mixture's experts hit."""
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = open_llama(Source(model, placing, hardware, sizes, kernels))
    clock, answer = complete(llm, text, sampling.n_generate, sampling.temperature, sampling.seed, quiet=json)
    n_prompt = len(llm.tokenize(text.encode()))
    if json:
        result = {"text": answer, "n_prompt": n_prompt, "n_generated": len(clock.times)}
        times = {"ttft_s": clock.ttft_s, "tpot_s": clock.tpot_s, "token_times_s": clock.times}
        print_json({**result, **times, "placement": llm.placement().to_dict()})
    else:
        say(clock.summary(n_prompt))
        if hits := llm.placement().experts:
            say(hits.describe())
