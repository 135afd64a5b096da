"""One rank of `oallama cluster run`: what it is told, and how rank 0 loads the model over all ranks.

The engine's library liboallama-ranks.so makes a process a rank: it starts MPI and adds the devices RANK0, RANK1, ...
The program is rank_process.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oallama.base.environment import DEBUG
from oallama.errors import OallamaError
from oallama.serving.command import command_line

LIBRARY = "liboallama-ranks.so"
OURS = "oallama"
# Whose kernels compute products and attention on CPUs.
RANK_KERNELS = ("ggml", OURS)
MINIMAL = "minimal"
# Where their weights are: in memory, or in a file of which they keep what they compute with.
RANK_MEMORIES = ("resident", MINIMAL)


@dataclass(frozen=True)
class RankJob:
    """What all ranks are told.

    Attributes:
        model: path of the model, the same on all hosts.
        shares: of the model, by rank.
        server: arguments for llama-server on rank 0, None: complete `prompt` instead.
        prompt, n_generate, temperature, seed: of the completion.
        n_ctx, n_ubatch: tokens of context, most tokens of one graph.
        n_parallel: requests that a server answers at once, each in its part of the context.
        json: rank 0 prints its result as JSON.
    """

    model: str
    shares: tuple[float, ...]
    server: tuple[str, ...] | None = None
    prompt: str = ""
    n_generate: int = 128
    temperature: float = 0.8
    seed: int | None = None
    n_ctx: int = 4096
    n_ubatch: int = 512
    n_parallel: int = 1
    json: bool = False

    def dumps(self) -> str:
        """As the argument of a rank."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> RankJob:
        content = json.loads(text)
        server = content.pop("server")
        return cls(**content | {"shares": tuple(content["shares"])}, server=None if server is None else tuple(server))


def library() -> Path:
    """The library that makes a process a rank.

    Raises:
        OallamaError: saying what to install when the engine was built without MPI.
    """
    from oallama.engine import runtime

    from .mpi import INSTALL

    path = runtime.lib_dir() / LIBRARY
    if not path.is_file():
        raise OallamaError(f"this build of oallama has no tensor-parallel ranks: {INSTALL}")
    return path


def device_names(n_ranks: int) -> list[str]:
    """The ggml devices that stand for the ranks."""
    return [f"RANK{rank}" for rank in range(n_ranks)]


def rank_llama(job: RankJob, n_threads: int, names: Sequence[str] | None = None) -> Any:
    """llama-cpp-python's `Llama` with its weights spread over the ranks (on rank 0, after `library` is loaded).

    names: other devices in place of the ranks', one per share.
    """
    from oallama.engine import device_list, runtime
    from oallama.engine.placed_llama import PlacedLlama

    return PlacedLlama(
        job.model,
        devices=device_list.device_array(names or device_names(len(job.shares))),
        n_outputs_max=1,  # only the last row's logits are read; all others would take memory on every rank
        n_gpu_layers=-1,
        split_mode=runtime.llama_cpp().LLAMA_SPLIT_MODE_TENSOR,
        tensor_split=list(job.shares),
        flash_attn=True,
        n_ctx=job.n_ctx,
        n_ubatch=job.n_ubatch,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        verbose=DEBUG.get() is not None,
    )


def server_command(job: RankJob, n_threads: int, server: Sequence[str]) -> list[str]:
    """llama-server's command line on rank 0. It cannot keep prompts aside: their KV cache is spread over the ranks."""
    options = {
        "model": job.model,
        "fit": "off",
        "n-gpu-layers": "all",
        "flash-attn": "on",
        "device": ",".join(device_names(len(job.shares))),
        "split-mode": "tensor",
        "tensor-split": ",".join(f"{share:.6f}" for share in job.shares),
        "ctx-size": job.n_ctx,
        "ubatch-size": job.n_ubatch,
        "threads": n_threads,
        "parallel": job.n_parallel,
        "cache-ram": 0,
        "ctx-checkpoints": 0,
    }
    return [*command_line(options), *server]
