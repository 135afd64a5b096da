"""`oallama run`: one prompt, streamed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from oallama.base.printing import print_json, say
from oallama.loading.completion import complete

from .loading import Source, open_llama
from .options import (
    Batch,
    Ctx,
    Device,
    FlashAttn,
    Json,
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


def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.', show_default=False)],
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
    n_generate: Annotated[int, typer.Option("--n-generate", "-n", min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.8,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampler.")] = None,
    json: Json = False,
) -> None:
    """Complete a prompt with streaming output; then TTFT and TPOT."""
    text = sys.stdin.read() if prompt == "-" else prompt
    request = (model, plan, vram, profile, device, rpc, local_rpc, ctx, batch, ubatch)
    source = Source(*request, type_k, type_v, flash_attn, threads, margin)
    llm = open_llama(source)
    clock, answer = complete(llm, text, n_generate, temperature, seed, quiet=json)
    n_prompt = len(llm.tokenize(text.encode()))
    if json:
        result = {"text": answer, "n_prompt": n_prompt, "n_generated": len(clock.times)}
        times = {"ttft_s": clock.ttft_s, "tpot_s": clock.tpot_s, "token_times_s": clock.times}
        print_json({**result, **times, "placement": llm.placement().to_dict()})
    else:
        say(clock.summary(n_prompt))
