"""Seconds of a model's operators on the accelerator and on the host, and the transfers between them.

`CostModel` joins an operator graph with a machine's profile. It feeds OATO (`oato_inputs`: the reduced graph, where
only target operators and fixed neighbours remain) and the prediction (predict.py, which follows the whole graph).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..plan import HOST, ContextSettings, PlacementPlan
from ..profiling.profile import Profile
from .oato import Anchor, Edge
from .operators import OperatorGraph
from .reduced import Link, reduced_links
from .stage import OFFLOAD_MIN_TOKENS, Mask, Placement, StageGraph

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """The request a plan is optimised for, in tokens. n_prompt = 0 optimises generation alone."""

    n_prompt: int = 512
    n_generate: int = 128

    def chunks(self, n_ubatch: int) -> list[tuple[int, int]]:
        """Prefill in micro-batches: (tokens, depth after them)."""
        starts = range(0, self.n_prompt, n_ubatch)
        return [(min(n_ubatch, self.n_prompt - start), min(start + n_ubatch, self.n_prompt)) for start in starts]


@dataclass(frozen=True)
class StageCosts:
    """Seconds per operator when a stage runs with `n_tokens`: on either side, uploaded, and of moving its result."""

    graph: StageGraph
    n_tokens: int
    tokens: NDArray[np.intp]
    host: Floats
    device: Floats
    upload: Floats  # copying the weight over and computing on the device
    to_device: Floats
    to_host: Floats
    small_upload: Floats  # copying a small weight over


class CostModel:
    """Costs of one model on one accelerator plus the host.

    device: name of the accelerator in the profile, None for a machine without one.
    context: micro-batch size and cache types the times are for.

    `targets` are the weights to place, in execution order; `small` all other weights.
    """

    def __init__(
        self, graph: OperatorGraph, profile: Profile, device: str | None, context: ContextSettings, host: str = HOST
    ) -> None:
        self.graph, self.profile, self.context = graph, profile, context
        self.device_name, self.host_name = device, host
        self.decode_tier, self.prefill_tier = min(graph.tiers), max(graph.tiers)
        tiers = (self.decode_tier, self.prefill_tier)
        read = (op.weight for tier in tiers for op in graph.targets(tier) if op.weight)
        self.targets: tuple[str, ...] = tuple(dict.fromkeys(read))
        self.small: tuple[str, ...] = tuple(t.name for t in graph.tensors if t.name not in set(self.targets))
        self.nbytes = np.array([graph.tensor[name].nbytes for name in self.targets], dtype=np.int64)
        self.sources: Counter[str] = Counter()  # how operator times were derived, for the notes of a prediction
        self._links: dict[tuple[str, int], float] = {}
        profile.device(host)
        self.op_offload = bool(device and profile.device(device).op_offload)

    # ---- times ----------------------------------------------------------------------------------------------------

    @cached_property
    def switch_s(self) -> float:
        """Seconds of one device change beyond its copies; 0 when the profile has none (predictions say so)."""
        return (self.profile.switch_time(self.device_name) or 0.0) if self.device_name else 0.0

    def link_s(self, direction: str, nbytes: float) -> float:
        """Seconds to move `nbytes`; 0 without an accelerator. Weights and activations are in pageable memory."""
        if self.device_name is None:
            return 0.0
        key = (direction, round(nbytes))
        if key not in self._links:
            self._links[key] = self.profile.link_time(self.device_name, direction, key[1], "pageable")
        return self._links[key]

    def stage(self, n_tokens: int) -> StageCosts:
        """Costs per operator for `n_tokens` tokens: the decode graph for one token, else the prefill graph."""
        if n_tokens not in self._stages:
            self._stages[n_tokens] = self._make_stage(n_tokens)
        return self._stages[n_tokens]

    @cached_property
    def _stages(self) -> dict[int, StageCosts]:
        return {}

    @cached_property
    def _graphs(self) -> dict[int, StageGraph]:
        targets = {name: i for i, name in enumerate(self.targets)}
        small = {name: i for i, name in enumerate(self.small)}
        return {n: StageGraph(self.graph, n, targets, small) for n in {self.decode_tier, self.prefill_tier}}

    def _make_stage(self, n_tokens: int) -> StageCosts:
        graph = self._graphs[self.decode_tier if n_tokens <= self.decode_tier else self.prefill_tier]
        tokens = graph.tokens(n_tokens)
        n = len(graph.operators)
        host, device, upload = np.zeros(n), np.zeros(n), np.full(n, np.inf)
        for op, count in zip(graph.operators, tokens.tolist(), strict=True):
            if not op.is_target:
                continue
            host[op.index] = self._op_seconds(self.host_name, op.op, op.weight, count, op.n_used)
            if self.device_name:
                device[op.index] = self._op_seconds(self.device_name, op.op, op.weight, count, op.n_used)
                if self.op_offload and count >= OFFLOAD_MIN_TOKENS:
                    weight_bytes = self.graph.tensor[op.weight].nbytes if op.weight else 0
                    upload[op.index] = self.link_s("h2d", weight_bytes) + device[op.index]
        bytes_out = graph.bytes_out(n_tokens)
        return StageCosts(
            graph=graph,
            n_tokens=n_tokens,
            tokens=tokens,
            host=host,
            device=device,
            upload=upload,
            to_device=np.array([self.link_s("h2d", b) for b in bytes_out]),
            to_host=np.array([self.link_s("d2h", b) for b in bytes_out]),
            small_upload=np.array([self.link_s("h2d", self.graph.tensor[name].nbytes) for name in self.small]),
        )

    def _op_seconds(self, device: str, op: str, weight: str | None, n_tokens: int, n_used: int) -> float:
        tensor = self.graph.tensor[weight or ""]
        estimate = self.profile.op_time(device, op, tensor.type, tensor.ne, n_tokens, n_used)
        self.sources[estimate.source] += 1
        return estimate.seconds

    # ---- placements -----------------------------------------------------------------------------------------------

    def placement(self, plan: PlacementPlan) -> Placement:
        """A plan as arrays. Raises KeyError when the plan is not for this model (check_model comes first)."""
        tensors = plan.tensors
        return Placement(
            targets=np.array([tensors[name].device != self.host_name for name in self.targets], dtype=np.int8),
            upload=np.array([tensors[name].mode == "upload" for name in self.targets], dtype=bool),
            small=np.array([tensors[name].device != self.host_name for name in self.small], dtype=np.int8),
            small_upload=np.array([tensors[name].mode == "upload" for name in self.small], dtype=bool),
            layers=np.array([device != self.host_name for device in plan.layers], dtype=np.int8),
        )

    def upload_pays(self, workload: Workload) -> Mask:
        """Targets that, when they live on the host, prefill faster uploaded than computed there.

        Decided for the workload's own micro-batches of at least 32 tokens (smaller ones are never uploaded); for a
        workload without any, for a full micro-batch.
        """
        sizes = [n for n, _ in workload.chunks(self.context.n_ubatch) if n >= OFFLOAD_MIN_TOKENS]
        host, upload = np.zeros(len(self.targets)), np.zeros(len(self.targets))
        for n in sizes or [self.context.n_ubatch]:
            stage = self.stage(n)
            # The output matrix works on one token: it is never uploaded and drops out as infinite.
            host += self._per_target(stage, stage.host)
            upload += self._per_target(stage, stage.upload)
        return upload < host

    # ---- OATO's view ----------------------------------------------------------------------------------------------

    def oato_inputs(self, workload: Workload, placement: Placement) -> tuple[Floats, Floats, list[Edge], list[Anchor]]:
        """(t_host, t_device, edges, anchors) in seconds per request of `workload`, for `oato.schedule`.

        `placement` gives what does not move (layers, small weights) and which host weights would be uploaded in
        prefill.
        """
        stages = [(1, max(1, workload.n_generate - 1))]
        stages += sorted(Counter(n for n, _ in workload.chunks(self.context.n_ubatch)).items())
        t_host, t_device = np.zeros(len(self.targets)), np.zeros(len(self.targets))
        uploaded = []
        for n, times in stages:
            stage = self.stage(n)
            up = placement.upload & np.isfinite(self._per_target(stage, stage.upload))
            t_host += times * np.where(up, self._per_target(stage, stage.upload), self._per_target(stage, stage.host))
            t_device += times * self._per_target(stage, stage.device)
            uploaded.append(up)

        def seconds(link: Link, host_side: Sequence[int]) -> float:
            """Cost of crossing `link` with one of `host_side` on the host, averaged over them."""
            total = 0.0
            for (n, times), up in zip(stages, uploaded, strict=True):
                stays = sum(not up[i] for i in host_side) / len(host_side)
                moved = link.nbytes * (1 if link.is_logits else n)
                mean = (self.link_s("h2d", moved) + self.link_s("d2h", moved)) / 2
                one_way = self.link_s(link.direction, moved) if link.direction else mean
                total += times * stays * (one_way + self.switch_s)
            return total

        edges, anchors = [], []
        for link in reduced_links(self._graphs[self.decode_tier], placement):
            if link.j is not None:
                edges.append(Edge(link.i, link.j, seconds(link, (link.i, link.j))))
            else:
                anchors.append(Anchor(link.i, link.anchor_on_device, seconds(link, (link.i,))))
        return t_host, t_device, edges, anchors

    def _per_target(self, stage: StageCosts, seconds: Floats) -> Floats:
        at = stage.graph.target >= 0
        return np.bincount(stage.graph.target[at], seconds[at], len(self.targets)).astype(np.float64)
