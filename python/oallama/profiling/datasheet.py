"""A profile of a machine one does not have: every time a planner needs, from the numbers of a datasheet.

Each entry is a roofline: an operator takes the longer of moving its bytes and doing its arithmetic, each at the share
of the peak that llama.cpp's kernels reach, plus a fixed cost. Attention on the CPU takes the shares that were measured
by kernel, form, tokens and depth (cpu_attention.py). The result is marked (`Profile.source` is "datasheet"):
it ranks placements on a machine, but it is no measurement of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

from ..base.jsonfile import read_json_object
from ..data.entries import AttentionTime, Concurrency, DeviceInfo, Note, OperatorTime, Overlap, ShapeTime, SwitchTime
from ..data.operators import OperatorGraph
from ..data.plan import HOST
from ..data.profile import Profile
from ..data.shapes import distance
from ..data.shipped import HERE, find
from ..errors import OallamaError
from . import roofline
from .cpu_attention import SHIPPED, AttentionEfficiencies
from .parts import build_part
from .roofline import Attention, FormTime, Roofline, attention_times

SCHEMA = "oallama.datasheet/1"
FOLDER = HERE / "datasheets"
GT_S = {3: 8.0, 4: 16.0, 5: 32.0}  # of a lane, by generation of PCI Express
DEPTHS = (1, 128, 1024, 4096, 8192, 16384, 65536)


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
    attention: what kernels of attention reach, measured on another CPU; default: the shipped measurements.
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
    attention: AttentionEfficiencies = field(default_factory=lambda: AttentionEfficiencies.load(SHIPPED))

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

    def attends(self, work: Attention) -> Iterator[FormTime]:
        """Seconds of every form and kernel of attention that it may take."""
        return self.attention.times(work, self._roofline(self.bandwidth_efficiency, 1.0))

    def _roofline(self, bandwidth_efficiency: float, compute_efficiency: float) -> Roofline:
        bytes_s = self.dram_gb_s * 1e9 * bandwidth_efficiency
        return Roofline(bytes_s, self.flops * compute_efficiency, self.overhead_s)


@dataclass(frozen=True)
class Link:
    """How a device hangs on the host. Give `pcie_gb_s`, or `generation` (3 to 5) and `lanes` of PCI Express.

    pcie_gb_s: one direction after encoding (PCIe 4.0 x16: 31.5). The efficiencies are for large copies: packet headers
    leave about 0.8 of the link to pinned memory; pageable memory goes through the driver's own pinned buffer, at about
    half of that. switch_s: what a change of device costs beyond its copies (synchronising and launching anew).
    """

    pcie_gb_s: float = 0.0
    generation: int = 0
    lanes: int = 0
    pinned_efficiency: float = 0.8
    pageable_efficiency: float = 0.4
    latency_s: float = 10e-6
    switch_s: float = 20e-6

    @property
    def peak_gb_s(self) -> float:
        """One direction after encoding; 0 where the link is not described."""
        return self.pcie_gb_s or self.lanes * GT_S.get(self.generation, 0.0) * (128 / 130) / 8

    @property
    def bytes_s(self) -> dict[str, float]:
        """Large copies by the host's memory."""
        peak = self.peak_gb_s * 1e9
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

    def attends(self, work: Attention) -> Iterator[FormTime]:
        """Seconds of both forms of attention."""
        return attention_times(work, self.roofline)


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
                link = _link(row["link"], f"accelerators[{i}].link")
                accelerators.append(build_part(Accelerator, {**row, "link": link}, f"accelerators[{i}]"))
            names = [a.name for a in accelerators]
            if HOST in names or len({*names}) < len(names):
                raise ValueError(f"accelerators are called {', '.join(names)}; expected different names, none {HOST}")
            cpu = _cpu(content["cpu"], path.parent)
            return cls(str(content["name"]), cpu, tuple(accelerators), tuple(content.get("sources", ())))
        except KeyError as e:
            raise OallamaError(f"datasheet {path} has no {e}; see the shipped ones in {FOLDER}") from None
        except (TypeError, ValueError, AttributeError) as e:
            raise OallamaError(f"datasheet {path}: {e}; see the shipped ones in {FOLDER}") from None


def _link(row: Any, where: str) -> Link:
    link = build_part(Link, row, where)
    if not link.peak_gb_s or (link.pcie_gb_s and (link.generation or link.lanes)):
        known = ", ".join(map(str, GT_S))
        raise ValueError(f"{where} needs either pcie_gb_s, or generation (one of {known}) and lanes")
    return link


def _cpu(row: Any, folder: Path) -> Cpu:
    """Its attention is the name of a shipped file, or a path from the datasheet's folder on."""
    if not isinstance(row, dict):
        raise ValueError(f"cpu is {row!r}, expected an object")
    shapes = [build_part(ShapeEfficiency, r, f"cpu.shapes[{i}]") for i, r in enumerate(row.get("shapes", ()))]
    source = row.get("attention", SHIPPED)
    if not isinstance(source, str) or not source:
        raise ValueError(f"cpu.attention is {source!r}, expected the name of a shipped file, or a path")
    attention = AttentionEfficiencies.load(folder / source if Path(source).suffix else source)
    cpu = build_part(Cpu, {**row, "shapes": tuple(shapes), "attention": attention}, "cpu")
    if not cpu.flops:
        raise ValueError("cpu needs ghz (and flops_per_cycle), or fp32_gflops")
    return cpu


def make_profile(
    graph: OperatorGraph,
    datasheet: Datasheet,
    type_k: str = "f16",
    type_v: str = "f16",
    depths: Sequence[int] = DEPTHS,
) -> Profile:
    """Times of one model on the datasheet's machine, on every device of it.

    `depths` are KV rows attention is computed at, in every form and by every kernel that the device has.

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
        attention += roofline.attention(graph, name, part.attends, type_k, type_v, depths)
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
        notes=(Note(HOST, "attention", cpu.attention.describe()),),
    )
