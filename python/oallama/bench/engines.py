"""The engines under test and the worker processes that run them.

A worker's death (out of memory, an abort in native code) ends in an OallamaError with the last words of its log; its
process never outlives the `with` block or the Worker's `stop`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from oallama.base.environment import BACKEND_MAP, INSTRUCTIONS, MODULES
from oallama.base.json_child import JsonChild

from ..engine import runtime
from ..errors import OallamaError
from .machine import gpu_process_bytes, peak_rss_bytes
from .results import Cell, ExpectedTimes, Loaded, Sample

WORKER = Path(__file__).with_name("worker.py")
LOG_TAIL = 3


@dataclass(frozen=True)
class LoadParams:
    """How an engine loads the model; names and defaults are llama.cpp's.

    n_ctx 0: as much as the sweep needs. n_seq_max: sequences that generate together, each in its part of the context.
    n_threads 0: the CPUs this process may use. devices None: all; empty: CPU only.
    override_tensor: (pattern, buffer type) pairs, as llama.cpp's -ot.
    """

    n_ctx: int = 0
    n_batch: int = 2048
    n_ubatch: int = 512
    n_outputs_max: int = 0
    n_seq_max: int = 1
    n_threads: int = 0
    n_gpu_layers: int = 0
    flash_attn: str = "auto"
    type_k: str = "f16"
    type_v: str = "f16"
    rpc_servers: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None
    load_mode: str = "auto"
    op_offload: bool = True
    offload_kqv: bool = True
    use_extra_bufts: bool = True
    override_tensor: tuple[tuple[str, str], ...] = ()

    def resolved(self, n_ctx: int) -> LoadParams:
        """With the zeros filled in, so that reports say what was really used."""
        return replace(self, n_ctx=self.n_ctx or n_ctx, n_threads=self.n_threads or len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Engine:
    """One thing to measure: a libllama, how it loads the model, and what was predicted of it.

    lib_dir: folder of libllama.so (`oallama.engine.runtime.lib_dir()`, or `find_baseline_lib()` for the unpatched one).
    backend_map: text of the table a patched engine obeys. predicted_bytes: device name -> bytes. predict: cell ->
    ExpectedTimes. baseline: the one others are compared with. optional: a failed load is reported, not raised.

    >>> Engine("oallama", lib_dir, LoadParams(n_gpu_layers=99), placement="plan 75%", backend_map=table)
    """

    name: str
    lib_dir: str | os.PathLike[str]
    params: LoadParams = LoadParams()
    placement: str = ""
    env: dict[str, str] = field(default_factory=dict)
    backend_map: str | None = None
    plan_hash: str | None = None
    predicted_bytes: dict[str, int] | None = None
    predict: Callable[[Cell], ExpectedTimes] | None = None
    baseline: bool = False
    optional: bool = False


class Worker:
    """The process of one engine; a context manager. Every method raises OallamaError naming the engine when it fails.

    load_timeout_s, run_timeout_s: after that long without an answer the process is killed.
    """

    def __init__(self, engine: Engine, load_timeout_s: float = 1800, run_timeout_s: float = 1800):
        self.engine = engine
        self._load_timeout_s, self._run_timeout_s = load_timeout_s, run_timeout_s
        lib_dir = Path(engine.lib_dir).resolve()
        if not (lib_dir / "libllama.so").exists():
            raise OallamaError(f"engine {engine.name!r}: no libllama.so in {lib_dir}; build the engine first")
        self._folder = tempfile.TemporaryDirectory(prefix="oallama-bench-")
        table = Path(self._folder.name, "backend.map")
        # OALLAMA_* of the caller must not reach an engine that was not given them: a baseline would not be one.
        env = {k: v for k, v in os.environ.items() if not k.startswith("OALLAMA_")}
        env |= {"LLAMA_CPP_LIB_PATH": str(lib_dir), "GGML_NO_BACKTRACE": "1"}
        env["PYTHONPATH"] = runtime.with_bindings(env.get("PYTHONPATH"))
        if (modules := MODULES.get()) and lib_dir == runtime.lib_dir().resolve():
            env[MODULES.name] = modules
        if instructions := INSTRUCTIONS.get():  # of the machine that is imitated; upstream's engine does not read it
            env[INSTRUCTIONS.name] = instructions
        if engine.backend_map is not None:
            table.write_text(engine.backend_map)
            env[BACKEND_MAP.name] = str(table)
        self._child = JsonChild([sys.executable, str(WORKER)], env | engine.env)

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def load(self, model: str | os.PathLike[str], params: LoadParams) -> Loaded:
        """Load the model; `params` must be resolved."""
        reply = self._request("load", self._load_timeout_s, model=os.fspath(model), **asdict(params))
        return Loaded([reply["load_s"]], reply["model"], reply["devices"], reply["memory"])

    def tokenize(self, text: str) -> list[int]:
        return self._request("tokenize", self._run_timeout_s, text=text)["tokens"]

    def run(
        self,
        round_: int,
        depth: Sequence[int],
        prompt: Sequence[int],
        gen: int,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> Sample:
        """One measured run: `depth` tokens in the cache, then `prompt`, then `gen` tokens.

        state_dir: folder where engines of one model leave each other their filled caches.
        """
        reply = self._request(
            "run",
            self._run_timeout_s,
            depth_tokens=list(depth),
            prompt_tokens=list(prompt),
            n_gen=gen,
            state_dir=None if state_dir is None else os.fspath(state_dir),
        )
        return Sample(round_, tuple(reply["token_times_s"]), tuple(reply["tokens"]))

    def unload(self) -> dict[str, dict[str, int]]:
        """Free the model; returns the memory as it was at the end."""
        return self._request("unload", self._load_timeout_s)["memory"]

    def observe(self, loaded: Loaded) -> None:
        """Note the process's peak memory so far in `loaded`."""
        loaded.peak_rss_bytes = peak_rss_bytes(self.pid) or loaded.peak_rss_bytes
        on_gpu = gpu_process_bytes(self.pid)
        if on_gpu is not None:
            loaded.gpu_process_bytes = max(on_gpu, loaded.gpu_process_bytes or 0)

    def stop(self) -> None:
        """Kill the process if it still lives and remove its files; may be called twice."""
        self._child.end()
        self._folder.cleanup()

    def _request(self, command: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        self._child.tell({"command": command, **fields})
        try:
            answer = self._child.hear(timeout_s)
        except TimeoutError:
            self.stop()
            silent = f"gave no answer to {command} within {timeout_s:g} s and was stopped"
            raise OallamaError(f"engine {self.engine.name!r} {silent}: {self._child.last_words(LOG_TAIL)}") from None
        if answer is None:
            how, words = self._child.death(), self._child.last_words(LOG_TAIL)
            raise OallamaError(f"engine {self.engine.name!r} {how} during {command}: {words}")
        if "error" in answer:
            raise OallamaError(f"engine {self.engine.name!r}: {answer['error']}")
        return answer
