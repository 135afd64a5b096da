"""A profile of a machine one does not have: every time a planner needs, from the numbers of a datasheet.

Each entry is a roofline: an operator takes the longer of moving its bytes and doing its arithmetic, each at the share
of the peak that llama.cpp's kernels reach, plus a fixed cost. The result is marked (`Profile.source` is "datasheet"):
it ranks placements on a machine, but it is no measurement of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ..base.jsonfile import read_json_object
from ..data.entries import AttentionTime, Concurrency, DeviceInfo, OperatorTime, Overlap, ShapeTime, SwitchTime
from ..data.operators import OperatorGraph
from ..data.plan import HOST
from ..data.profile import Profile
from ..data.shapes import distance
from ..data.shipped import HERE, find
from ..errors import OallamaError
from . import roofline
from .roofline import Roofline

SCHEMA = "oallama.datasheet/1"
FOLDER = HERE / "datasheets"
DEPTHS = (1, 128, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class ShapeEfficiency:
    """What a CPU's kernels reach on weights of one type and shape (k, m), as shares of the peak.

    bandwidth_efficiency: of one token. compute_efficiency: of a full micro-batch.
    """

    type: str
    k: int
    m: int
    bandwidth_efficiency: float
    compute_efficiency: float


@dataclass(frozen=True)
class Cpu:
    """The host. Give `fp32_gflops`, or `ghz` and `flops_per_cycle` of one core.

    flops_per_cycle: 64 with two AVX-512 units (2 x 16 lanes x multiply and add), 32 with AVX2.
    bandwidth_efficiency: what STREAM leaves of a DDR peak is 0.75 to 0.85 on server and desktop CPUs.
    compute_efficiency: ggml-cpu's F16 and Q8_0 products of 512 tokens reach 0.6 to 0.7 of one AVX-512 core (tried on a
        Xeon at 2.3 GHz); all cores together clock lower.
    overhead_s: the barrier of all threads after an operator.
    shapes: efficiencies of single weights; of those of a weight's type the nearest shape's hold for it.
    """

    description: str
    cores: int
    dram_gb_s: float
    ghz: float = 0.0
    flops_per_cycle: float = 32
    fp32_gflops: float = 0.0
    memory_bytes: int = 0
    bandwidth_efficiency: float = 0.8
    compute_efficiency: float = 0.5
    overhead_s: float = 3e-6
    shapes: tuple[ShapeEfficiency, ...] = ()

    @property
    def flops(self) -> float:
        """Peak fp32 flop/s of all cores."""
        return 1e9 * (self.fp32_gflops or self.cores * self.ghz * self.flops_per_cycle)

    @property
    def roofline(self) -> Roofline:
        """What kernels reach of the peaks."""
        return self._roofline(self.bandwidth_efficiency, self.compute_efficiency)

    def roofline_of(self, type: str, ne: tuple[int, ...]) -> Roofline:
        """What kernels reach on a weight of this type and shape (k, m, ..)."""
        k, m = ne[:2]
        alike = [shape for shape in self.shapes if shape.type == type]
        if not alike:
            return self.roofline
        nearest = min(alike, key=lambda shape: distance((k, m, 1, 1), (shape.k, shape.m, 1, 1)))
        return self._roofline(nearest.bandwidth_efficiency, nearest.compute_efficiency)

    def _roofline(self, bandwidth_efficiency: float, compute_efficiency: float) -> Roofline:
        bytes_s = self.dram_gb_s * 1e9 * bandwidth_efficiency
        return Roofline(bytes_s, self.flops * compute_efficiency, self.overhead_s)


@dataclass(frozen=True)
class Link:
    """How a device hangs on the host.

    pcie_gb_s: one direction after encoding (PCIe 4.0 x16: 31.5). The efficiencies are for large copies: packet headers
    leave about 0.8 of the link to pinned memory; pageable memory goes through the driver's own pinned buffer, at about
    half of that. switch_s: what a change of device costs beyond its copies (synchronising and launching anew).
    """

    pcie_gb_s: float
    pinned_efficiency: float = 0.8
    pageable_efficiency: float = 0.4
    latency_s: float = 10e-6
    switch_s: float = 20e-6

    @property
    def bytes_s(self) -> dict[str, float]:
        """Large copies by the host's memory."""
        peak = self.pcie_gb_s * 1e9
        return {"pageable": peak * self.pageable_efficiency, "pinned": peak * self.pinned_efficiency}


@dataclass(frozen=True)
class Accelerator:
    """A GPU. `fp16_tflops`: dense, with fp32 accumulation.

    bandwidth_efficiency: matrix-vector kernels of llama.cpp reach about 0.8 of the memory's peak on large matrices.
    compute_efficiency: a product of a 512-token micro-batch fills the tensor cores of a large GPU about halfway.
    launch_s: per operator, with CUDA graphs.
    """

    name: str
    description: str
    memory_bytes: int
    memory_gb_s: float
    fp16_tflops: float
    link: Link
    launch_s: float = 3e-6
    bandwidth_efficiency: float = 0.8
    compute_efficiency: float = 0.5
    backend: str = "CUDA"

    @property
    def roofline(self) -> Roofline:
        """What kernels reach of the peaks."""
        bytes_s = self.memory_gb_s * 1e9 * self.bandwidth_efficiency
        return Roofline(bytes_s, self.fp16_tflops * 1e12 * self.compute_efficiency, self.launch_s)

    def roofline_of(self, type: str, ne: tuple[int, ...]) -> Roofline:
        """The same for every weight."""
        return self.roofline


@dataclass(frozen=True)
class Datasheet:
    """A machine by its published numbers; `sources` says where each comes from."""

    name: str
    cpu: Cpu
    accelerators: tuple[Accelerator, ...]
    sources: tuple[str, ...] = ()

    @classmethod
    def load(cls, source: str | Path) -> Datasheet:
        """Read a datasheet: the name of a shipped one, or a path.

        Raises OallamaError when there is none of that name, and for a file that is corrupt, of another version, or has
        numbers no machine can have.
        """
        path = find(source, FOLDER, "datasheet")
        content = read_json_object(path, "datasheet", f"start from a shipped one in {FOLDER}")
        try:
            if content.pop("schema", None) != SCHEMA:
                raise ValueError(f"schema is not {SCHEMA!r}")
            accelerators = []
            for i, row in enumerate(content.get("accelerators", ())):
                link = _build(Link, row["link"], f"accelerators[{i}].link")
                accelerators.append(_build(Accelerator, {**row, "link": link}, f"accelerators[{i}]"))
            names = [a.name for a in accelerators]
            if HOST in names or len({*names}) < len(names):
                raise ValueError(f"accelerators are called {', '.join(names)}; expected different names, none {HOST}")
            row = content["cpu"]
            if not isinstance(row, dict):
                raise ValueError(f"cpu is {row!r}, expected an object")
            shapes = [_build(ShapeEfficiency, r, f"cpu.shapes[{i}]") for i, r in enumerate(row.get("shapes", ()))]
            cpu = _build(Cpu, {**row, "shapes": tuple(shapes)}, "cpu")
            if not cpu.flops:
                raise ValueError("cpu needs ghz (and flops_per_cycle), or fp32_gflops")
            return cls(str(content["name"]), cpu, tuple(accelerators), tuple(content.get("sources", ())))
        except KeyError as e:
            raise OallamaError(f"datasheet {path} has no {e}; see the shipped ones in {FOLDER}") from None
        except (TypeError, ValueError, AttributeError) as e:
            raise OallamaError(f"datasheet {path}: {e}; see the shipped ones in {FOLDER}") from None


Part = TypeVar("Part", ShapeEfficiency, Cpu, Link, Accelerator)
# Zero says that a number is not known or not used.
_MAY_BE_ZERO = {"memory_bytes", "ghz", "fp32_gflops", "overhead_s", "launch_s", "latency_s", "switch_s"}


def _build(kind: type[Part], row: Mapping[str, Any], where: str) -> Part:
    """One part of a datasheet. Raises ValueError naming the field that is unknown, missing or not possible."""
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}
    if unknown := sorted({*row} - {*known}):
        raise ValueError(f"{where}.{unknown[0]} is not known, expected some of {', '.join(known)}")
    if missing := [name for name, f in known.items() if f.default is MISSING and name not in row]:
        raise ValueError(f"{where} has no {missing[0]}")
    for name, value in row.items():
        if known[name].type == "str":
            if not isinstance(value, str):
                raise ValueError(f"{where}.{name} is {value!r}, expected a text")
        elif known[name].type in ("int", "float"):
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                raise ValueError(f"{where}.{name} is {value!r}, expected a number above 0")
            if name.endswith("_efficiency") and value > 1:
                raise ValueError(f"{where}.{name} is {value!r}, expected a share of the peak: at most 1")
            if known[name].type == "int" and value != int(value):
                raise ValueError(f"{where}.{name} is {value!r}, expected a whole number")
    return kind(**row)


def make_profile(
    graph: OperatorGraph,
    datasheet: Datasheet,
    type_k: str = "f16",
    type_v: str = "f16",
    depths: Sequence[int] = DEPTHS,
) -> Profile:
    """Times of one model on the datasheet's machine, on every device of it.

    `depths` are KV rows attention is computed at, fused and unfused.

    Raises:
        OallamaError: for a cache type that is not known.
    """
    for kind in (type_k, type_v):
        if kind not in roofline.CACHE_BYTES:
            raise OallamaError(
                f"unknown type of the KV cache {kind!r}: expected one of {', '.join(roofline.CACHE_BYTES)}"
            )
    parts: dict[str, Cpu | Accelerator] = {a.name: a for a in datasheet.accelerators}
    parts[HOST] = datasheet.cpu
    operators: list[OperatorTime] = []
    shapes: list[ShapeTime] = []
    attention: list[AttentionTime] = []
    for name, part in parts.items():
        operators += roofline.targets(graph, name, part.roofline_of)
        operators += roofline.small_operators(graph, name, part.roofline)
        shapes += roofline.shaped_operators(graph, name, part.roofline)
        attention += roofline.attention(graph, name, part.roofline, type_k, type_v, depths)
    cpu, accelerators = datasheet.cpu, datasheet.accelerators
    copies = [roofline.links(a.name, a.link.latency_s, a.link.bytes_s) for a in accelerators]
    return Profile(
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        fingerprint={"source": "datasheet", "datasheet": datasheet.name, "threads": cpu.cores},
        devices=(
            *(DeviceInfo(a.name, a.description, "gpu", a.memory_bytes, a.backend, True) for a in accelerators),
            DeviceInfo(HOST, cpu.description, "cpu", cpu.memory_bytes, "CPU"),
        ),
        operators=tuple(operators),
        attention=tuple(attention),
        shapes=tuple(shapes),
        links=tuple(chain.from_iterable(copies)),
        switches=tuple(SwitchTime(a.name, a.link.switch_s) for a in accelerators),
        overlaps=tuple(Overlap(a.name, 1.0) for a in accelerators),  # a DMA engine of its own
        concurrency=tuple(Concurrency(a.name, 1.0) for a in accelerators),  # and processors of its own
        source="datasheet",
    )
