"""ClusterPlan: how one model runs on a cluster, and all that was measured to decide it. A file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ...base.jsonfile import read_json_object, write_text_atomic
from ...data.plan import ContextSettings
from ...data.workload import Workload
from ...errors import OallamaError
from .candidates import Candidate
from .devices import ClientEntry, DeviceEntry
from .network import Network
from .passes import request_passes
from .predict import ExpectedLatency, predict_latency
from .problem import Device, Layer, Pass, Problem, Settings
from .terms import price

SCHEMA = "oallama.cluster/2"
ONE_REQUEST = Workload()
REMEDY = "make a new one with `oallama cluster plan`"


@dataclass(frozen=True)
class ClusterPlan:
    """An allocation and what it was made from.

    Attributes:
        model: fingerprint of the file (autoplan.model_fingerprint).
        context: what the model must be loaded with.
        client, devices: of devices.toml; `problem.devices` are the client and these, in order.
        problem: as measured.
        layers: the device of every layer, as a pipeline.
        bound_s: no allocation costs less.
        tiled: by device, the kinds of weights that our kernels multiply (pipeline/kernels.py).
        n_threads: of the client's CPU, 0: all.
        request: what the plan is made for.
        chosen: the way that is run; None: the pipeline.
        candidates: all ways that were compared.
    """

    model: Mapping[str, Any]
    context: ContextSettings
    client: ClientEntry
    devices: tuple[DeviceEntry, ...]
    problem: Problem
    layers: tuple[str, ...]
    bound_s: float
    tiled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    n_threads: int = 0
    request: Workload = ONE_REQUEST
    chosen: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()

    @property
    def used(self) -> tuple[DeviceEntry, ...]:
        """The devices that compute a layer, in the order of the layers."""
        entries = {entry.name: entry for entry in self.devices}
        return tuple(entries[name] for name in dict.fromkeys(self.layers) if name in entries)

    def predict(self, request: Workload) -> ExpectedLatency:
        """TTFT and TPOT of the pipeline."""
        context = self.context
        sizes = {"n_ubatch": context.n_ubatch, "n_batch": context.n_batch, "n_ctx": context.n_ctx}
        return predict_latency(self.problem, self.layers, request, **sizes)

    def with_micro_batches(self, n_ubatch: int) -> ClusterPlan:
        """The same with micro-batches of so many tokens."""
        passes = request_passes(self.request, n_ubatch, self.context.n_ctx)
        problem = replace(self.problem, passes=passes)
        return replace(self, context=replace(self.context, n_ubatch=n_ubatch), problem=problem)

    def allocated(self, problem: Problem, layers: Sequence[str], bound_s: float) -> ClusterPlan:
        """The same model on another cluster, or otherwise on this one."""
        names = {device.name for device in problem.devices}
        devices = tuple(entry for entry in self.devices if entry.name in names)
        return replace(self, devices=devices, problem=problem, layers=tuple(layers), bound_s=bound_s)

    def to_json(self) -> str:
        """JSON text; equal layers are written once."""
        distinct: dict[int, int] = {}
        for layer in self.problem.layers:
            distinct.setdefault(id(layer), len(distinct))
        known = {id(layer): layer for layer in self.problem.layers}
        content = {
            "schema": SCHEMA,
            "model": dict(self.model),
            "context": asdict(self.context),
            "client": asdict(self.client),
            "devices": [asdict(entry) for entry in self.devices],
            "problem": {
                "devices": [asdict(device) for device in self.problem.devices],
                **self.problem.network.to_dict(),
                "kinds": [asdict(known[key]) for key in distinct],
                "layers": [distinct[id(layer)] for layer in self.problem.layers],
                "embedding": asdict(self.problem.embedding),
                "settings": asdict(self.problem.settings),
                "link_model": self.problem.links,
                "passes": [asdict(each) for each in self.problem.passes],
            },
            "layers": self.layers,
            "terms": price(self.problem, self.layers).to_dict(),
            "bound_s": self.bound_s,
            "tiled": dict(self.tiled),
            "n_threads": self.n_threads,
            "request": asdict(self.request),
            "predicted": asdict(self.predict(self.request)),
            "chosen": self.chosen and asdict(self.chosen),
            "candidates": [asdict(candidate) for candidate in self.candidates],
        }
        return json.dumps(content, indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write aside, then rename. Raises OallamaError when the path cannot be written."""
        write_text_atomic(path, self.to_json(), "cluster plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClusterPlan:
        """Read a file of `save`. Raises OallamaError for one that is missing, corrupt or of another kind."""
        content = read_json_object(path, "cluster plan", REMEDY)
        if content.get("schema") != SCHEMA:
            raise OallamaError(
                f"cluster plan {path} has schema {content.get('schema')!r}, expected {SCHEMA!r}; {REMEDY}"
            )
        try:
            return cls._from_content(content)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise OallamaError(f"cluster plan {path} is not valid ({error}); {REMEDY}") from None

    @classmethod
    def _from_content(cls, content: Mapping[str, Any]) -> ClusterPlan:
        made = content["problem"]
        kinds = [_layer(kind) for kind in made["kinds"]]
        problem = Problem(
            devices=tuple(Device(**device) for device in made["devices"]),
            network=Network.from_dict(made),
            layers=tuple(kinds[at] for at in made["layers"]),
            embedding=_layer(made["embedding"]),
            settings=Settings(**made["settings"]),
            links=made["link_model"],
            passes=tuple(Pass(**each) for each in made["passes"]),
        )
        layers = tuple(content["layers"])
        if len(layers) != len(problem.layers):
            raise ValueError(f"it places {len(layers)} layers, the model has {len(problem.layers)}")
        price(problem, layers)  # every device and link is known
        devices = tuple(_entry(entry) for entry in content["devices"])
        client, *others = [device.name for device in problem.devices]
        if sorted(others) != sorted(entry.name for entry in devices) or client != content["client"]["name"]:
            raise ValueError("its devices are not those it was solved for")
        return cls(
            model=content["model"],
            context=ContextSettings(**content["context"]),
            client=ClientEntry(**content["client"]),
            devices=devices,
            problem=problem,
            layers=layers,
            bound_s=float(content["bound_s"]),
            tiled={name: tuple(kinds) for name, kinds in content["tiled"].items()},
            n_threads=int(content["n_threads"]),
            request=Workload(**content["request"]),
            chosen=content["chosen"] and Candidate.from_dict(content["chosen"]),
            candidates=tuple(Candidate.from_dict(candidate) for candidate in content["candidates"]),
        )


def _layer(content: Mapping[str, Any]) -> Layer:
    seconds = {name: tuple((int(n), float(s)) for n, s in points) for name, points in content["seconds"].items()}
    return Layer(**{**content, "seconds": seconds})


def _entry(content: Mapping[str, Any]) -> DeviceEntry:
    known = {each.name for each in fields(DeviceEntry)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in content.items() if key in known
    }
    entry = DeviceEntry(**values)
    if any(str(text).startswith("-") for text in (entry.name, entry.host, entry.python)):
        raise ValueError(f"device {entry.name!r} has a name, host or program that begins with a dash")
    return entry
