"""The client's part of a pipeline: a process that loads the model over RPC devices and generates, told by a ClientJob.

Its program is client_process.py. It is a process of its own because ggml aborts when a device is gone: the one that
started it lives on, and goes on elsewhere.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from oallama.data.budget import format_bytes
from oallama.data.plan import HOST, ContextSettings, Mode, PlacementPlan, Prediction, TensorPlacement
from oallama.data.plan_export import home_layer
from oallama.engine import device_list, runtime
from oallama.errors import OallamaError
from oallama.planning import OperatorGraph
from oallama.planning.realisation import TILED

from .kernels import tiled_weights

CLIENT = -1  # in ClientJob.layers
BUSY_S = 30.0


@dataclass(frozen=True)
class ClientJob:
    """What the client's process is told.

    Attributes:
        model: path of the model.
        names, endpoints, budgets: of the devices: name, host:port of the RPC server, bytes it may hold.
        layers: for each layer the index of its server, CLIENT for this process.
        context: what the model is loaded with.
        tiled: by server, and behind them of this process: the kinds of weights multiplied by our kernels (kernels.py).
        n_threads: of the client, 0: all.
        prompt: text, read where `tokens` is empty.
        tokens: of the prompt and what was generated so far.
        n_prompt: how many of them are the prompt's, 0: all.
        n_generate, temperature, seed: of what follows.
        state: file with the KV cache of `tokens` but the last, None: computed anew.
        dry: only say what the devices would hold.
    """

    model: str
    names: tuple[str, ...]
    endpoints: tuple[str, ...]
    budgets: tuple[int, ...]
    layers: tuple[int, ...]
    context: ContextSettings
    tiled: tuple[tuple[str, ...], ...] = ()
    n_threads: int = 0
    prompt: str = ""
    tokens: tuple[int, ...] = ()
    n_prompt: int = 0
    n_generate: int = 128
    temperature: float = 0.8
    seed: int | None = None
    state: str | None = None
    dry: bool = False

    @classmethod
    def loads(cls, text: str) -> ClientJob:
        """A job (`asdict`) from JSON."""
        content = json.loads(text)
        for name in ("names", "endpoints", "budgets", "layers", "tokens"):
            content[name] = tuple(content[name])
        content["tiled"] = tuple(tuple(kinds) for kinds in content["tiled"])
        return cls(**content | {"context": ContextSettings(**content["context"])})


def pipeline_plan(
    graph: OperatorGraph,
    context: ContextSettings,
    layers: Sequence[str],
    devices: Sequence[str],
    tiled: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> PlacementPlan:
    """The plan that has layer i, with its KV cache, on device layers[i], and all else on this host.

    tiled: by device, the kinds of weights that our kernels multiply.
    """
    tensors = {}
    names = {device: tiled_weights(graph, kinds) for device, kinds in tiled.items()}
    for t in graph.tensors:
        home = home_layer(t.name, graph.n_layer)
        device = HOST if home is None or home >= graph.n_layer else layers[home]
        mode: Mode = "host" if device == HOST else "resident"
        realisation = TILED if t.name in names.get(device, ()) else ""
        tensors[t.name] = TensorPlacement.whole(t.type, t.nbytes, device, mode, realisation=realisation)
    return PlacementPlan(
        model=dict(graph.model),
        planner={"name": "cluster", "params": {}},
        budgets={},
        context=context,
        devices=(*devices, HOST),
        layers=(*layers, *(HOST,) * graph.n_heads, HOST),
        tensors=tensors,
        predicted=Prediction({}, {}, {}, (0, 0), 0.0),
        tied_output=graph.tied_output,
        whole_layers=True,
    )


def device_names(endpoints: Sequence[str]) -> list[str]:
    """Names of the RPC servers' devices in a process that registers them in this order, one device each."""
    return [f"RPC{at}" for at in range(len(endpoints))]


def placed(job: ClientJob, graph: OperatorGraph) -> PlacementPlan:
    """The job's plan."""
    names = device_names(job.endpoints)
    layers = [HOST if at == CLIENT else names[at] for at in job.layers]
    tiled = dict(zip([*names, HOST], job.tiled, strict=False))
    return pipeline_plan(graph, job.context, layers, [name for name in names if name in layers], tiled)


class ServerLost(OallamaError):
    """A server did not answer, or loading failed, most likely because one is gone."""


class Generation:
    """The loaded model, and tokens one by one.

    memory: bytes on each device by kind, by its name in the cluster.

    Raises ServerLost when a server does not answer, OallamaError when a device would hold more than it may, or the
    prompt is too long.
    """

    def __init__(self, job: ClientJob) -> None:
        from oallama.engine.load_settings import Settings
        from oallama.llama import Llama
        from oallama.loading import autoplan
        from oallama.loading.completion import warm_up
        from oallama.loading.dry_run import LocalAllocators

        self._job = job
        names = [name for endpoint in job.endpoints for name in _add_server(endpoint)]
        if names != device_names(job.endpoints):
            raise OallamaError(f"expected one device on each of {', '.join(job.endpoints)}, found {', '.join(names)}")
        settings = Settings(**asdict(job.context))
        plan = placed(job, autoplan.read_graph(job.model, settings))
        self.memory = _memory(job, plan, LocalAllocators(job.model, settings, tuple(names), None).memory(plan))
        if job.dry:
            return
        more: dict[str, Any] = {} if job.seed is None else {"seed": job.seed}
        if job.n_threads:
            more |= {"n_threads": job.n_threads, "n_threads_batch": job.n_threads}
        try:
            self._llm = Llama(job.model, plan=plan, verbose=False, **more)
        except (RuntimeError, ValueError) as error:
            raise ServerLost(str(error)) from error
        warm_up(self._llm)
        self.tokens = list(job.tokens) or self._llm.tokenize(job.prompt.encode(), special=True)
        room = job.context.n_ctx - len(self.tokens)
        if room < 1:
            raise OallamaError(f"{len(self.tokens)} tokens leave no room in a context of {job.context.n_ctx}")
        self._n_left = min(job.n_generate, room)
        if job.state:
            self._restore(job.state)
        elif job.n_prompt and job.temperature == 0:
            self._repeat(job.n_prompt)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Tokens with their text, until the model ends its answer or enough were generated."""
        core = runtime.llama_cpp()
        vocab = core.llama_model_get_vocab(self._llm.model)
        stream = self._llm.generate(list(self.tokens), temp=self._job.temperature)
        for token in stream:
            if core.llama_vocab_is_eog(vocab, token):
                return
            piece = self._llm.detokenize([token], prev_tokens=self.tokens)
            self.tokens.append(token)
            self._n_left -= 1
            yield token, piece
            if self._n_left <= 0:
                return

    def _repeat(self, n_prompt: int) -> None:
        """Evaluate the tokens so far as before, the prompt at once and the others one by one: the same bits.

        In one batch they would be there sooner, but rounded otherwise, which may decide between two tokens.
        """
        self._llm.eval(self.tokens[:n_prompt])
        for token in self.tokens[n_prompt:-1]:
            self._llm.eval([token])

    def save(self, path: str) -> bool:
        """Write the KV cache of all tokens that were evaluated; whether that was possible."""
        core, n = runtime.llama_cpp(), self._llm.n_tokens
        tokens = (core.llama_token * n)(*self._llm.input_ids[:n].tolist())
        return bool(core.llama_state_seq_save_file(self._llm.ctx, path.encode(), 0, tokens, n))

    def _restore(self, path: str) -> None:
        """Where the file is of no use all tokens are computed anew."""
        core, count = runtime.llama_cpp(), ctypes.c_size_t(0)
        tokens = (core.llama_token * len(self.tokens))()
        read = core.llama_state_seq_load_file(self._llm.ctx, path.encode(), 0, tokens, len(tokens), ctypes.byref(count))
        n = count.value
        if read and list(tokens[:n]) == self.tokens[:n]:
            self._llm.input_ids[:n] = tokens[:n]
            self._llm.n_tokens = n


def _add_server(endpoint: str) -> list[str]:
    """Names of the devices; a server that still computes for the process before this one is waited for."""
    end = time.monotonic() + BUSY_S
    while True:
        try:
            return device_list.add_rpc_server(endpoint)
        except OallamaError as error:
            if time.monotonic() > end:
                raise ServerLost(str(error)) from None
            time.sleep(0.2)


def _memory(job: ClientJob, plan: PlacementPlan, found: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The dry run by the cluster's names. Raises OallamaError for a device that would hold more than its budget."""
    memory = {}
    for name, device, budget in zip(job.names, device_names(job.endpoints), job.budgets, strict=True):
        held = found.get(device, {})
        if (over := sum(held.values()) - budget) > 0:
            kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in held.items())
            raise OallamaError(
                f"device {name} would hold {format_bytes(sum(held.values()))} ({kinds}), {format_bytes(over)} more "
                "than it may use; lower beta or n_ctx and plan again"
            )
        memory[name] = dict(held)
    return memory
