"""Options that several commands share, and what they mean to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from oallama.base.printing import say
from oallama.data.plan import HOST
from oallama.engine import device_list
from oallama.engine.load_settings import FLASH_ATTN, KV_TYPES, Settings
from oallama.engine.rpc import LocalRpcServer, share_processor
from oallama.engine.runtime import quiet
from oallama.errors import OallamaError
from oallama.loading.autoplan import Choices
from oallama.loading.trial import Trial
from oallama.planning.planner import ON_REQUEST, PLANNERS
from oallama.planning.speculation import LONGEST

DEFAULT_CTX = 4096

MODEL_HELP = "GGUF file; or --hf OWNER/REPO:FILE in its place."
Model = Annotated[Path, typer.Argument(help=MODEL_HELP, show_default=False)]
Planner = Annotated[
    str, typer.Option(help=f"{', '.join(PLANNERS)}; auto: the fastest, {', '.join(ON_REQUEST)} left out.")
]
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
NoPlan = Annotated[
    bool,
    typer.Option("--no-plan", help="On the CPU alone: load as llama.cpp does by itself; nothing is measured."),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify/--no-verify",
        help="At the first use of a model, measure the plan beside llama.cpp's own placements for some seconds.",
    ),
]
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
TypeK = Annotated[str, typer.Option("--type-k", help=f"Type of the K cache: {', '.join(KV_TYPES)}.")]
TypeV = Annotated[str, typer.Option("--type-v", help="Type of the V cache.")]
FlashAttn = Annotated[str, typer.Option(help="Flash attention: auto, on or off.")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads, 0: all this process may use.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


NGenerate = Annotated[int, typer.Option("--n-generate", "-n", min=1, help="Most tokens to generate.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampler.")]


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
    names = [name for endpoint in endpoints for name in device_list.add_rpc_server(endpoint)]
    if local_rpc:
        server = LocalRpcServer()
        endpoints.append(server.endpoint)
        names += server.devices
    chosen = device_list.device(device).name if device is not None else next(iter(names), None)
    return Connection(tuple(endpoints), chosen)


@dataclass(frozen=True)
class Hardware:
    """What computes, and what is known of it."""

    margin: Margin = None
    profile: Profile = None
    device: Device = None
    rpc: Rpc = None
    local_rpc: LocalRpc = False

    def connect(self, elsewhere: bool = False) -> Connection:
        """Register its devices; elsewhere: the device is one of another machine."""
        return connect(self.rpc, self.local_rpc, None if elsewhere else self.device)


@dataclass(frozen=True)
class Placing:
    """By which plan a model is loaded; verify: whether a new plan is measured at its first use."""

    plan: Plan = None
    vram: Vram = None
    no_plan: NoPlan = False
    verify: Verify = True

    def makes_none(self, device: str) -> bool:
        """Whether the model is loaded without a plan. device: the accelerator that would be used, or HOST.

        Raises:
            OallamaError: for --no-plan beside what asks for a plan, or beside an accelerator.
        """
        if not self.no_plan:
            return False
        if given := [name for name, value in (("--plan", self.plan), ("--vram", self.vram)) if value]:
            raise OallamaError(f"--no-plan loads the model without a plan; leave out {given[0]}")
        if device != HOST:
            raise OallamaError(f"--no-plan is for the CPU alone, and {device} is here; add --device {HOST}")
        return True

    def trial(self) -> Trial | None:
        """Measures the plan at the first use of the model; None where that is not wanted."""
        return Trial(say=say) if self.verify else None


@dataclass(frozen=True)
class Sizes:
    """Of the context and of its batches, in tokens."""

    ctx: Ctx = None
    batch: Batch = None
    ubatch: Ubatch = None

    def choices(self) -> Choices:
        """A plan may choose the batches that were not given."""
        return Choices(fixed_ubatch=self.ubatch is not None, fixed_batch=self.batch is not None)


@dataclass(frozen=True)
class Kernels:
    """How a model is computed: the cache's types, the form of attention, threads, and where its weights are."""

    type_k: TypeK = "f16"
    type_v: TypeV = "f16"
    flash_attn: FlashAttn = "auto"
    threads: Threads = 0
    mmap: Annotated[
        bool,
        typer.Option(
            "--mmap/--no-mmap",
            help="Keep weights of the CPU in the mapped file, or read them into memory, from where llama.cpp uploads "
            "to a GPU faster.",
        ),
    ] = True


@dataclass(frozen=True)
class Drafts:
    """What guesses tokens for the model, in the same budget: a draft model, or MTP heads in the model's own file."""

    draft: Annotated[
        Path | None, typer.Option(help="Smaller model of the same vocabulary that guesses; used where that is faster.")
    ] = None
    heads: Annotated[
        bool, typer.Option("--heads", help="Let the model's own MTP heads guess, where that is faster.")
    ] = False
    draft_max: Annotated[
        int, typer.Option("--draft-max", min=1, max=LONGEST, help="Most tokens that are guessed at a time.")
    ] = LONGEST
    acceptance: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Share of the guesses that are right; default: as measured.")
    ] = None

    @property
    def option(self) -> str:
        """The one that was given; "" without.

        Raises:
            OallamaError: for both.
        """
        if self.draft and self.heads:
            raise OallamaError("--draft and --heads are two ways to guess; give one")
        return "--draft" if self.draft else "--heads" if self.heads else ""


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn, and its length."""

    n_generate: NGenerate = 128
    temperature: Temperature = 0.8
    seed: Seed = None


def settings(sizes: Sizes | None = None, kernels: Kernels | None = None, parallel: int = 1) -> Settings:
    """The engine's settings for these options.

    Raises:
        OallamaError: for a name that is not among the choices.
    """
    sizes, kernels = sizes or Sizes(), kernels or Kernels()
    for what, value, choices in (
        ("--type-k", kernels.type_k, KV_TYPES),
        ("--type-v", kernels.type_v, KV_TYPES),
        ("--flash-attn", kernels.flash_attn, FLASH_ATTN),
    ):
        if value not in choices:
            raise OallamaError(f"unknown {what} {value!r}; expected one of {', '.join(choices)}")
    defaults = Settings()
    return Settings(
        n_ctx=DEFAULT_CTX if sizes.ctx is None else sizes.ctx,
        n_batch=sizes.batch or defaults.n_batch,
        n_ubatch=sizes.ubatch or defaults.n_ubatch,
        n_seq_max=parallel,
        type_k=kernels.type_k,
        type_v=kernels.type_v,
        flash_attn=kernels.flash_attn,
        n_threads=kernels.threads,
        use_mmap=None if kernels.mmap else False,
    )
