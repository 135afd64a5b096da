"""The measurement: every cell of a sweep on every engine, interleaved so that a drift of the machine hits all alike."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..data.workload import context_of_each
from ..errors import OallamaError
from . import machine
from .engines import Engine, LoadParams, Worker
from .results import Cell, ExpectedTimes, Loaded, Result

PROMPT = Path(__file__).with_name("prompts") / "alice.txt"
SETTLE_S = 0.02  # OpenMP threads of the engine that ran last spin for a few milliseconds before they sleep
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Sweep:
    """What to measure: all combinations of prompt lengths, depths and generated tokens.

    repeats: measured rounds of each cell. warmup: rounds before them, kept apart; with "reload" after each load.
    interleave: "loaded" keeps all engines in memory and alternates run by run; "reload" loads an engine, runs all cells
    once, and unloads it, round by round, for when they do not fit together. prompt_text: a file. state_dir: folder in
    which engines share filled caches; None: each fills its own.

    limit_s: after that many seconds, loading included, no further round begins; one is always run. enough: asked after
    every round, whether what was measured so far will do. With either of them `repeats` is the most rounds of a cell.
    """

    prompts: Sequence[int] = (32, 64, 128, 256, 512)
    depths: Sequence[int] = (0,)
    gens: Sequence[int] = (32,)
    repeats: int = 5
    warmup: int = 1
    interleave: str = "loaded"
    prompt_text: str | os.PathLike[str] = PROMPT
    state_dir: str | os.PathLike[str] | None = None
    limit_s: float | None = None
    enough: Callable[[Sequence[Result]], bool] | None = None

    def __post_init__(self) -> None:
        for name, values, least in (("prompts", self.prompts, 1), ("depths", self.depths, 0), ("gens", self.gens, 2)):
            if not values or any(v < least for v in values):
                raise OallamaError(f"bench {name}: expected token counts of at least {least}, got {list(values)}")
        if self.repeats < 1 or self.warmup < 0:
            raise OallamaError(f"bench: expected repeats >= 1 and warmup >= 0, got {self.repeats} and {self.warmup}")
        if self.interleave not in ("loaded", "reload"):
            raise OallamaError(f'bench interleave: expected "loaded" or "reload", got {self.interleave!r}')

    def cells(self) -> list[Cell]:
        """By depth first: an engine then fills its cache once per depth."""
        return sorted(Cell(*c) for c in product(set(self.depths), set(self.prompts), set(self.gens)))

    def n_ctx(self) -> int:
        """The smallest context that holds every cell, rounded up to llama.cpp's cache padding of 256."""
        return -(-(max(self.prompts) + max(self.depths) + max(self.gens)) // 256) * 256


def order(n: int, round_: int) -> list[int]:
    """The sequence of n engines in a round: rotated each time, reversed after a full turn (two: AB BA BA AB)."""
    shift = round_ % n
    turned = [*range(shift, n), *range(shift)]
    return turned[::-1] if (round_ // n) % 2 else turned


def run_bench(
    model: str | os.PathLike[str],
    engines: Sequence[Engine],
    sweep: Sweep,
    progress: Progress | None = None,
    argv: Sequence[str] | None = None,
    load_timeout_s: float = 1800,
    run_timeout_s: float = 1800,
) -> list[Result]:
    """Measure TTFT and TPOT of each engine in each cell.

    progress(done, total, what) is called before each run. argv: the command line for the report, sys.argv by default.
    Returns one Result per engine and cell, by cell and then in the order of `engines`.
    Raises OallamaError for a bad argument, and when an engine that is not optional fails. All processes are gone on
    return, also after an exception or Ctrl-C.

    >>> results = run_bench("model.gguf", [layer_split(params, 12), Engine("oallama", lib_dir, params)], Sweep())
    """
    bench = _Bench(model, engines, sweep, progress, argv, (load_timeout_s, run_timeout_s))
    if sweep.interleave == "loaded":
        bench.run_loaded()
    else:
        bench.run_reloaded()
    return bench.ordered()


class _Bench:
    """One run_bench under way. Engines are known by their index; `failed` holds optional ones that are out."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        engines: Sequence[Engine],
        sweep: Sweep,
        progress: Progress | None,
        argv: Sequence[str] | None,
        timeouts: tuple[float, float],
    ):
        self.model, self.engines, self.sweep = Path(model), list(engines), sweep
        self.progress: Progress = progress or (lambda done, total, what: None)
        self.timeouts = timeouts
        self.cells = sweep.cells()
        self.params = [e.params.resolved(sweep.n_ctx()) for e in self.engines]
        self._check()
        self.text = _read_prompt(sweep.prompt_text)
        self.tokens: list[int] = []
        self.failed: set[int] = set()
        self.loaded: dict[int, Loaded] = {}
        self.fresh: set[int] = set()  # engines that have computed nothing since their load
        environment = {
            **machine.describe(list(sys.argv if argv is None else argv)),
            "model_file": {"name": self.model.name, "size_bytes": self.model.stat().st_size},
            "sweep": {"repeats": sweep.repeats, "warmup": sweep.warmup, "interleave": sweep.interleave},
            "prompt_text": Path(sweep.prompt_text).name,
        }
        self.results = {
            (i, cell): _empty_result(engine, self.params[i], cell, environment)
            for cell in self.cells
            for i, engine in enumerate(self.engines)
        }
        self.begin = time.monotonic()
        loads = 1 if sweep.interleave == "loaded" else sweep.repeats
        self.done, self.total = 0, len(self.results) * (sweep.warmup * loads + sweep.repeats)

    def _check(self) -> None:
        if not self.model.is_file():
            what = "is a directory" if self.model.is_dir() else "does not exist"
            raise OallamaError(f"model {self.model} {what}; expected a GGUF file")
        names = [e.name for e in self.engines]
        if not names or len(set(names)) < len(names):
            raise OallamaError(f"bench: expected at least one engine, each with a name of its own, got {names}")
        for engine, params in zip(self.engines, self.params, strict=True):
            for cell in self.cells:
                if cell.depth + cell.prompt + cell.gen > context_of_each(params.n_ctx, params.n_seq_max):
                    raise OallamaError(f"engine {engine.name!r}: n_ctx {params.n_ctx} is too small for {cell}")
        shared = [s for p in self.params for s in set(p.rpc_servers)]
        if self.sweep.interleave == "loaded" and len(set(shared)) < len(shared):
            # ggml-rpc-server serves one client after the other: the second engine would wait for ever.
            raise OallamaError('bench: engines share an RPC server; start one for each, or use interleave="reload"')

    def run_loaded(self) -> None:
        with ExitStack() as stack:
            workers = [self._start(i, stack) for i in range(len(self.engines))]
            for cell in self.cells:
                for round_ in range(-self.sweep.warmup, self.sweep.repeats):
                    if round_ > 0 and self._done():
                        break
                    for i in order(len(self.engines), round_ % (2 * len(self.engines))):
                        self._run(i, cell, round_, workers[i])
            for i, worker in enumerate(workers):
                self._finish(i, worker)

    def run_reloaded(self) -> None:
        for round_ in range(self.sweep.repeats):
            if round_ and self._done():
                break
            for i in order(len(self.engines), round_):
                with ExitStack() as stack:
                    worker = self._start(i, stack)
                    for cell in self.cells:
                        for warmup in range(-self.sweep.warmup, 0):
                            self._run(i, cell, warmup, worker)
                        self._run(i, cell, round_, worker)
                    self._finish(i, worker)

    def _done(self) -> bool:
        """Whether the time is over, or what was measured will do."""
        limit, enough = self.sweep.limit_s, self.sweep.enough
        if limit is not None and time.monotonic() - self.begin >= limit:
            return True
        return enough is not None and enough([*self.results.values()])

    def _start(self, i: int, stack: ExitStack) -> Worker | None:
        """Load an engine; None if it is optional and cannot."""
        if i in self.failed:
            return None
        engine = self.engines[i]
        self.progress(self.done, self.total, f"{engine.name}: load")
        worker = stack.enter_context(Worker(engine, *self.timeouts))
        try:
            loaded = worker.load(self.model, self.params[i])
        except OallamaError as error:
            worker.stop()
            self._fail(i, error)
            return None
        if i in self.loaded:
            self.loaded[i].load_s += loaded.load_s
        else:
            self.loaded[i] = loaded
        self.fresh.add(i)
        for cell in self.cells:
            self.results[i, cell].loaded = self.loaded[i]
        self.tokens = self.tokens or self._take_tokens(worker)
        return worker

    def _take_tokens(self, worker: Worker) -> list[int]:
        """The text's tokens, repeated until the longest cell is filled."""
        tokens, need = worker.tokenize(self.text), max(cell.depth + cell.prompt for cell in self.cells)
        return (tokens * -(-need // len(tokens)))[:need]

    def _run(self, i: int, cell: Cell, round_: int, worker: Worker | None) -> None:
        result = self.results[i, cell]
        self.progress(self.done, self.total, f"{result.engine}: {cell}")
        self.done += 1
        if worker is None or i in self.failed:
            return
        time.sleep(SETTLE_S)
        depth, prompt = self.tokens[: cell.depth], self.tokens[cell.depth : cell.depth + cell.prompt]
        try:
            sample = worker.run(round_, depth, prompt, cell.gen, self.sweep.state_dir)
        except OallamaError as error:
            worker.stop()
            self._fail(i, error)
            return
        if i in self.fresh and cell.depth == 0:
            self.loaded[i].first_prompts.append((cell.prompt, sample.ttft_s))
        self.fresh.discard(i)
        (result.warmups if round_ < 0 else result.samples).append(sample)

    def _finish(self, i: int, worker: Worker | None) -> None:
        """Note what the engine used; compute buffers may have grown since the load."""
        if worker is not None and i not in self.failed:
            worker.observe(self.loaded[i])
            self.loaded[i].memory = worker.unload()

    def _fail(self, i: int, error: OallamaError) -> None:
        """Leave an optional engine out from now on; any other ends the benchmark."""
        if not self.engines[i].optional:
            raise error
        self.failed.add(i)
        for cell in self.cells:
            self.results[i, cell].error = str(error)

    def ordered(self) -> list[Result]:
        self.progress(self.total, self.total, "done")
        return list(self.results.values())


def _read_prompt(path: str | os.PathLike[str]) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OallamaError(f"cannot read the prompt text {path}: {error}; expected a UTF-8 text file") from None
    if not text.strip():
        raise OallamaError(f"the prompt text {path} is empty; expected a UTF-8 text file")
    return text


def _empty_result(engine: Engine, params: LoadParams, cell: Cell, environment: dict[str, Any]) -> Result:
    return Result(
        engine=engine.name,
        placement=engine.placement,
        cell=cell,
        baseline=engine.baseline,
        params=asdict(params),
        env=engine.env,
        lib_dir=str(engine.lib_dir),
        plan_hash=engine.plan_hash,
        predicted_bytes=engine.predicted_bytes,
        prediction=engine.predict(cell) if engine.predict else ExpectedTimes(),
        environment=environment,
    )
