"""Options that several commands share, and what they mean to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from oallama.engine import engine
from oallama.engine.engine import Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.planning.planner import PLANNERS

DEFAULT_CTX = 4096

Model = Annotated[Path, typer.Argument(help="GGUF file.", show_default=False)]
Planner = Annotated[str, typer.Option(help=f"{', '.join(PLANNERS)}; auto: the fastest of them.")]
Vram = Annotated[
    str | None,
    typer.Option(help='Memory of the accelerator to use: "8GiB", "75%" (of the weights), bytes, "auto" or "minimal".'),
]
Margin = Annotated[
    str | None,
    typer.Option(
        help='Free memory of a GPU that --vram auto leaves free: bytes or "512MiB". Default: 5 %, at least 1 GiB.'
    ),
]
Plan = Annotated[Path | None, typer.Option(help="Plan file of `oallama plan -o`.")]
Profile = Annotated[
    Path | None,
    typer.Option(help="Profile: a file or a recorded one's name; default: this machine's, measured when missing."),
]
Device = Annotated[str | None, typer.Option(help="Accelerator to plan for; default: the first one.")]
Rpc = Annotated[list[str] | None, typer.Option(help="RPC server HOST:PORT whose devices to use; may be repeated.")]
LocalRpc = Annotated[bool, typer.Option("--local-rpc", help="Start an RPC device on this machine as the accelerator.")]
Ctx = Annotated[int | None, typer.Option(min=0, help=f"Tokens of context, 0: the model's. Default {DEFAULT_CTX}.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Most tokens of one decode call. Default 2048.")]
Ubatch = Annotated[int | None, typer.Option(min=1, help="Most tokens of one graph (micro-batch). Default 512.")]
TypeK = Annotated[str, typer.Option("--type-k", help=f"Type of the K cache: {', '.join(engine.KV_TYPES)}.")]
TypeV = Annotated[str, typer.Option("--type-v", help="Type of the V cache.")]
FlashAttn = Annotated[str, typer.Option(help="Flash attention: auto, on or off.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads, 0: all this process may use.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@dataclass(frozen=True)
class Connection:
    """RPC servers in use and the device to plan for; None: no device was asked for."""

    endpoints: tuple[str, ...]
    device: str | None


def connect(rpc: Sequence[str] | None, local_rpc: bool, device: str | None = None) -> Connection:
    """Register the RPC devices asked for and check the device's name.

    An RPC device that was asked for comes before an accelerator that happens to be there.
    """
    if local_rpc:
        share_processor()
    quiet()
    endpoints = list(rpc or ())
    names = [name for endpoint in endpoints for name in engine.add_rpc_server(endpoint)]
    if local_rpc:
        server = LocalRpcServer()
        endpoints.append(server.endpoint)
        names += server.devices
    chosen = engine.device(device).name if device is not None else next(iter(names), None)
    return Connection(tuple(endpoints), chosen)


def settings(
    ctx: int | None = None,
    batch: int | None = None,
    ubatch: int | None = None,
    type_k: str = "f16",
    type_v: str = "f16",
    flash_attn: str = "auto",
    threads: int = 0,
    parallel: int = 1,
) -> Settings:
    """The engine's settings for these options. Raises OallamaError for a name that is not among the choices."""
    for what, value, choices in (
        ("--type-k", type_k, engine.KV_TYPES),
        ("--type-v", type_v, engine.KV_TYPES),
        ("--flash-attn", flash_attn, engine.FLASH_ATTN),
    ):
        if value not in choices:
            raise OallamaError(f"unknown {what} {value!r}; expected one of {', '.join(choices)}")
    defaults = Settings()
    return Settings(
        n_ctx=DEFAULT_CTX if ctx is None else ctx,
        n_batch=batch or defaults.n_batch,
        n_ubatch=ubatch or defaults.n_ubatch,
        n_seq_max=parallel,
        type_k=type_k,
        type_v=type_v,
        flash_attn=flash_attn,
        n_threads=threads,
    )
