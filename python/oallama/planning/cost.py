"""Seconds of a model's operators on every device, and of the transfers between them.

`CostModel` joins an operator graph with a machine's profile: it gives each stage (a forward pass of so many tokens) as
arrays that the prediction (predict.py) and the exact planner (layered_model.py) add up, and OATO its inputs. The
equations are in docs/planning.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..data.entries import REALISATIONS, padded_rows
from ..data.fusion import Chain, Fusion, chains
from ..data.operators import OUTPUT, AttentionShape, Operator, OperatorGraph, TensorInfo
from ..data.plan import HOST, ContextSettings, PlacementPlan
from ..data.profile import Profile
from ..data.workload import Workload
from .expert_reads import ExpertTimes
from .expert_use import ExpertUse
from .kv_cache import cache_nbytes
from .oato import Anchor, Edge
from .others import other_seconds
from .realisation import NONE, PLAIN, TWICE, Realisations
from .reduced import ReducedEdge, reduced_edges
from .stage import OFFLOAD_MIN_TOKENS, STREAMER, Homes, Ids, Ints, Mask, StageGraph, division_of

Floats = NDArray[np.float64]
# Backends whose fused attention computes the cache's padding too; others skip what the mask hides.
_PADDED = ("CUDA",)


@dataclass(frozen=True)
class StageCosts:
    """Seconds per operator (axis -1) when a stage runs with `n_tokens`; device ids as in stage.py.

    seconds: (devices, operators) of target operators, 0 for others. host: (realisations, operators) of target operators
    on the host; seconds[0] has the chosen ones. upload: copying the weight to the uploader and
    computing there, infinite where that never happens. stream: copying the weight to the first accelerator, infinite
    without one. move: (from, to, operators) seconds to move the result.
    small_upload: (small weights,) copying one to the uploader. other: (devices, operators) of all that are no targets.
    fusions: chains of operators that a device may compute in one piece.
    """

    graph: StageGraph
    n_tokens: int
    tokens: NDArray[np.intp]
    seconds: Floats
    host: Floats
    upload: Floats
    stream: Floats
    move: Floats
    small_upload: Floats
    other: Floats
    fusions: tuple[Fusion, ...] = ()

    def on_host(self, realised: Ids) -> StageCosts:
        """The same with the host's seconds for these realisations, per target."""
        at = self.graph.target >= 0
        seconds = self.seconds.copy()
        seconds[0, at] = self.host[realised[self.graph.target[at]], at]
        return replace(self, seconds=seconds)


class CostModel:
    """Costs of one model on a machine: the host (device id 0) and its accelerators (1..).

    accelerators: names in the profile, none for a machine without one. context: micro-batch size, cache types and
    attention form the times are for. realisations: of weights on the host, should the planner choose them. expert_use:
    of a mixture, where its experts may be divided.

    `targets` are the weights to place, in execution order; `small` all other weights.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        profile: Profile,
        accelerators: Sequence[str],
        context: ContextSettings,
        host: str = HOST,
        realisations: Realisations = NONE,
        expert_use: ExpertUse | None = None,
    ) -> None:
        self.graph, self.profile, self.context = graph, profile, context
        self.expert_use = expert_use
        self.times = ExpertTimes(profile, expert_use.unions if expert_use else None)
        self.names: tuple[str, ...] = (host, *accelerators)
        self.ids = {name: i for i, name in enumerate(self.names)}
        self.decode_tier, self.prefill_tier = min(graph.tiers), max(graph.tiers)
        tiers = (self.decode_tier, self.prefill_tier)
        read = (op.weight for tier in tiers for op in graph.targets(tier) if op.weight)
        self.targets: tuple[str, ...] = tuple(dict.fromkeys(read))
        self.small: tuple[str, ...] = tuple(t.name for t in graph.tensors if t.name not in set(self.targets))
        self._host, self._moved, self._divided = (
            np.array([REALISATIONS.index(chosen.get(name, "")) for name in self.targets], dtype=np.int8)
            for chosen in (realisations.host, realisations.moved, realisations.divided)
        )
        # llama.cpp prefers memory that an accelerator can read fast, or the mapped file, to a faster layout.
        pinned = any(link.memory == "pinned" for link in profile.links if link.device in accelerators)
        self._unchosen = PLAIN if pinned else ""
        self.nbytes = np.array([graph.tensor[name].nbytes for name in self.targets], dtype=np.int64)
        self.sources: Counter[str] = Counter()  # how operator times were derived, for the notes of a prediction
        self._links: dict[tuple[str, str, int, str], float] = {}
        self._attention: dict[tuple[AttentionShape, int, int], Floats] = {}
        self._stages: dict[tuple[int, bool], StageCosts] = {}
        # Upstream sends uploads to the first device that takes them; 0 when none does.
        self.uploader = next((i for i, name in enumerate(self.names) if i and profile.device(name).op_offload), 0)
        self.uploaded_from = "pinned" if context.use_mmap is False else "pageable"
        # Share of the shorter of streamed copies and everything else that is hidden behind the longer.
        self.overlap = profile.overlap(accelerators[0]) if accelerators else 0.0
        self.flash = any(op.op == "FLASH_ATTN_EXT" for op in graph.operators(self.decode_tier))
        self.width = graph.operators(self.decode_tier)[0].ne[0]  # n_embd: the first operator embeds the tokens

    # ---- times ----------------------------------------------------------------------------------------------------

    @cached_property
    def switch(self) -> Floats:
        """(from, to) seconds of a device change beyond its copies; 0 when the profile has none (predictions say so)."""
        each = np.array([0.0, *(self.profile.switch_time(name) or 0.0 for name in self.names[1:])])
        return np.where(np.eye(len(each), dtype=bool), 0.0, each[:, None] + each[None, :])

    def link_s(self, device: int, direction: str, nbytes: float, memory: str = "pinned") -> float:
        """Seconds to move `nbytes` between host and accelerator.

        Pinned, where the device has such memory, are results, in llama.cpp's buffer for those of the CPU, streamed
        weights, and weights that were read from the file; pageable are the mapped file and KV caches on the host.
        """
        key = (self.names[device], direction, round(nbytes), memory)
        if key not in self._links:
            self._links[key] = self.profile.link_time(*key)
        return self._links[key]

    def move_s(self, source: int, to: int, nbytes: float) -> float:
        """Seconds to move `nbytes` between any two devices: accelerators exchange data through the host."""
        if source == to:
            return 0.0
        down = self.link_s(source, "d2h", nbytes) if source else 0.0
        return down + (self.link_s(to, "h2d", nbytes) if to else 0.0)

    def attention_s(self, shape: AttentionShape, n_tokens: int, depth: int) -> Floats:
        """(devices,) seconds of one layer's attention when the last token sees `depth` positions."""
        depth = max(1, min(depth, padded_rows(self.context.n_ctx)))
        key = (shape, n_tokens, depth)
        if key not in self._attention:
            self._attention[key] = np.array(
                [self._attention_seconds(name, shape, n_tokens, depth) for name in self.names]
            )
        return self._attention[key]

    def _attention_seconds(self, name: str, shape: AttentionShape, n_tokens: int, depth: int) -> float:
        types = self.context.type_k, self.context.type_v
        flash = self.flash and self.profile.fuses(name, shape, *types)
        if self.flash and not flash and self.context.flash_attn == "on":
            # llama.cpp computes it on the host and copies the cache there; "auto" takes the other form.
            copies = self.cache_s(shape, depth, self.ids[name], "d2h")
            return copies + self._attention_seconds(self.names[0], shape, n_tokens, depth)
        pads = not flash or self.profile.device(name).backend.startswith(_PADDED)
        # Fused, more tokens than were measured are those of their pieces (bench/beyond_tiers.py).
        seconds, piece = 0.0, self.prefill_tier if flash else n_tokens
        for start in range(0, n_tokens, piece):
            rows = padded_rows(depth) if pads else max(1, depth - start)  # what a mask hides is skipped
            n = min(piece, n_tokens - start)
            seconds += self.profile.attention_time(name, shape, n, rows, *types, flash, self.context.attention).seconds
        return seconds

    def stage(self, n_tokens: int, decode: bool = False) -> StageCosts:
        """Costs per operator of a step of `n_tokens` sequences (decode), or of a micro-batch of a prompt."""
        key = (n_tokens, decode)
        if key not in self._stages:
            self._stages[key] = self._make_stage(
                self._graphs[self.decode_tier if decode else self.prefill_tier], n_tokens
            )
        return self._stages[key]

    @cached_property
    def _graphs(self) -> dict[int, StageGraph]:
        targets = {name: i for i, name in enumerate(self.targets)}
        small = {name: i for i, name in enumerate(self.small)}
        # Targets and small weights follow from the graph, so that all contexts share these.
        return {n: StageGraph.of(self.graph, n, targets, small) for n in {self.decode_tier, self.prefill_tier}}

    def _make_stage(self, graph: StageGraph, n_tokens: int) -> StageCosts:
        tokens, uploader = graph.tokens(n_tokens), self.uploader
        n, devices = len(graph.operators), range(len(self.names))
        seconds, upload, stream = np.zeros((len(devices), n)), np.full(n, np.inf), np.full(n, np.inf)
        host = np.zeros((len(REALISATIONS), n))
        for alike in self._alike_at(graph, tokens).values():
            op, count = graph.operators[alike[0]], int(tokens[alike[0]])
            times = [self._op_seconds(d, op.op, op.weight, count, op.n_used, len(alike)) for d in devices]
            seconds[:, alike] = np.array(times)[:, None]
            host[:, alike] = np.array(self._host_seconds(op, count))[:, None]
            weight = self.graph.tensor[op.weight or ""]
            if len(devices) > 1:
                stream[alike] = self.link_s(STREAMER, "h2d", weight.nbytes, "pinned")
            if uploader and count >= OFFLOAD_MIN_TOKENS:
                nbytes = self.times.uploaded_bytes(op.op, weight, count, op.n_used)
                upload[alike] = self.link_s(uploader, "h2d", nbytes, self.uploaded_from) + seconds[uploader, alike]
        sizes, size_of = np.unique(graph.bytes_out(n_tokens), return_inverse=True)
        each = np.array([[[self.move_s(a, b, size) for size in sizes.tolist()] for b in devices] for a in devices])
        uploads = [
            self.link_s(uploader, "h2d", self.graph.tensor[name].nbytes, self.uploaded_from) if uploader else 0.0
            for name in self.small
        ]
        other = other_seconds(self.profile, self.names, self.width, graph, n_tokens)
        rest = (each[:, :, size_of], np.array(uploads), other, self._fusions(graph, tokens, seconds, other))
        return StageCosts(graph, n_tokens, tokens, seconds, host, upload, stream, *rest)

    def _fusions(self, graph: StageGraph, tokens: Ints, seconds: Floats, other: Floats) -> tuple[Fusion, ...]:
        """Chains that were measured on an accelerator: what one piece takes beyond the prices of its operators."""
        if not self.profile.chains:
            return ()
        parts = np.where(graph.target >= 0, seconds, other)
        found: dict[int, list[tuple[Chain, Floats]]] = {}
        times: dict[tuple[object, ...], list[float | None]] = {}
        for chain in chains(self.graph, graph.tier, self.context.type_k):
            key = (chain.kind, chain.type, chain.ne, int(tokens[chain.ops[-1]]))
            if key not in times:
                times[key] = [self.profile.chain_time(name, *key) for name in self.names]
            apart = parts[:, chain.ops].sum(axis=1)
            gain = np.array([0.0 if s is None else s - t for s, t in zip(times[key], apart.tolist(), strict=True)])
            if gain.any():
                found.setdefault(len(chain.ops), []).append((chain, gain))
        return tuple(
            Fusion(np.array([c.ops for c, _ in some], dtype=np.intp), np.array([gain for _, gain in some]))
            for some in found.values()
        )

    def _alike_at(self, graph: StageGraph, tokens: Ints) -> dict[tuple[object, ...], list[int]]:
        """Target operators of a stage that take the same time wherever they run."""
        found: dict[tuple[object, ...], list[int]] = {}
        for op, count in zip(graph.operators, tokens.tolist(), strict=True):
            if op.is_target:
                tensor = self.graph.tensor[op.weight or ""]
                host = int(self._host[graph.target[op.index]])
                key = (op.op, op.n_used, count, tensor.type, tensor.ne, tensor.nbytes, host)
                found.setdefault(key, []).append(op.index)
        return found

    def _op_seconds(
        self, device: int, op: str, weight: str | None, n_tokens: int, n_used: int, operators: int = 1
    ) -> float:
        """Of one operator; `operators` of them are like it."""
        tensor = self.graph.tensor[weight or ""]
        estimate = self.times.op_time(
            self.names[device], op, tensor, n_tokens, n_used, self.realisation(device, tensor)
        )
        self.sources[estimate.source] += operators
        return estimate.seconds

    def realisation(self, device: int, tensor: TensorInfo) -> str:
        """The one that a weight's seconds on a device are of."""
        return "" if device else REALISATIONS[self._host[self._at[tensor.name]]] or self._unchosen

    def _host_seconds(self, op: Operator, n_tokens: int) -> list[float]:
        """By realisation."""
        key = (self.names[0], op.op, self.graph.tensor[op.weight or ""], n_tokens, op.n_used)
        return [self.times.op_time(*key, name or self._unchosen).seconds for name in REALISATIONS]

    # ---- placements -----------------------------------------------------------------------------------------------

    def realised(self, homes: Homes) -> Ids:
        """Per target, the position of its realisation in REALISATIONS, should it live on the host."""
        if homes.realisation is not None:
            return homes.realisation
        realised = self.realised_as(homes.upload, homes.stream)
        if homes.split is None:
            return realised
        # The host's part of a divided weight is a copy; what is uploaded is the whole one.
        once = np.where(realised == REALISATIONS.index(TWICE), self._divided, realised)
        divided = np.where(homes.upload, self._moved, once)
        return np.where(homes.split > 0, divided, realised).astype(np.int8)

    def realised_as(self, upload: Mask, stream: Ints | None) -> Ids:
        """The chosen realisations; a weight that may be uploaded is plain, one that is streamed is there for decode."""
        moved = np.zeros_like(upload) if stream is None else stream > 0
        plain = np.where(self._host > 0, REALISATIONS.index(PLAIN), 0)
        return np.where(upload, plain, np.where(moved, self._moved, self._host)).astype(np.int8)

    def homes(self, plan: PlacementPlan) -> Homes:
        """A plan as arrays. Raises KeyError when the plan is not for this model (check_model comes first)."""
        tensors = plan.tensors

        def ids(names: Sequence[str]) -> NDArray[np.int8]:
            return np.array([self.ids[tensors[name].device] for name in names], dtype=np.int8)

        return Homes(
            targets=ids(self.targets),
            upload=np.array([tensors[name].mode == "upload" for name in self.targets], dtype=bool),
            small=ids(self.small),
            small_upload=np.array([tensors[name].mode == "upload" for name in self.small], dtype=bool),
            layers=np.array([self.ids[device] for device in plan.layers], dtype=np.int8),
            stream=np.array([tensors[name].stream_from for name in self.targets], dtype=np.intp),
            stream_caches=plan.stream_caches,
            split=np.array([tensors[name].n_divided for name in self.targets], dtype=np.intp),
            realisation=np.array([REALISATIONS.index(tensors[n].realisation) for n in self.targets], dtype=np.int8),
            division=division_of(tensors.values()),
        )

    def cache_s(self, shape: AttentionShape, depth: int, device: int = STREAMER, direction: str = "h2d") -> float:
        """Seconds to copy one layer's KV cache of `depth` positions between host and accelerator."""
        rows = padded_rows(min(depth, self.context.n_ctx))
        sizes = cache_nbytes(shape, rows, self.context.type_k, self.context.type_v)
        return sum(self.link_s(device, direction, nbytes, "pageable") for nbytes in sizes)

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
            host += self._per_target(stage, stage.seconds[0])
            upload += self._per_target(stage, stage.upload)
        return upload < host

    def stream_gain(self, n_tokens: int) -> Floats:
        """Per target, seconds saved in a micro-batch when it is streamed instead of computed on the host.

        Copies are taken to hide as far as they can: behind the target's own operator, which stands for the pass. The
        output matrix works on one token and is not streamed in prefill: minus infinity.
        """
        gain: Floats = np.full(len(self.targets), -np.inf)
        for op, n_used, alike in self._alike:
            weight = self.targets[alike[0]]
            copies = self.link_s(STREAMER, "h2d", self.graph.tensor[weight].nbytes, "pinned")
            host, computing = (self._op_seconds(d, op, weight, n_tokens, n_used) for d in (0, STREAMER))
            gain[alike] = host - (copies + computing - self.overlap * min(copies, computing))
        return gain

    def stream_copies(self) -> Floats:
        """Per target, seconds of the link when it is streamed."""
        return np.array([self.link_s(STREAMER, "h2d", size, "pinned") for size in self.nbytes.tolist()])

    @cached_property
    def _at(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.targets)}

    @cached_property
    def _alike(self) -> list[tuple[str, int, list[int]]]:
        """(operator, experts used, targets) for all targets of one type and shape but the output matrix."""
        groups: dict[tuple[object, ...], list[int]] = {}
        at = self._at
        for op in self.graph.targets(self.prefill_tier):
            if op.weight and op.weight != OUTPUT:
                tensor = self.graph.tensor[op.weight]
                groups.setdefault((op.op, op.n_used, tensor.type, tensor.ne, tensor.nbytes), []).append(at[op.weight])
        return [(str(key[0]), int(str(key[1])), sorted(set(alike))) for key, alike in groups.items()]

    # ---- OATO's view ----------------------------------------------------------------------------------------------

    def oato_inputs(self, workload: Workload, homes: Homes) -> tuple[Floats, Floats, list[Edge], list[Anchor]]:
        """(t_host, t_device, edges, anchors) in seconds per request of `workload`, for `oato.schedule`.

        For one accelerator. `homes` gives what does not move (layers, small weights) and which host weights would
        be uploaded in prefill.
        """
        stages = [(self.stage(workload.n_parallel, decode=True), max(1, workload.n_generate - 1))]
        chunks = Counter(n for n, _ in workload.chunks(self.context.n_ubatch))
        stages += [(self.stage(n), times) for n, times in sorted(chunks.items())]
        t_host, t_device = np.zeros(len(self.targets)), np.zeros(len(self.targets))
        uploaded = []
        for stage, times in stages:
            up = homes.upload & np.isfinite(self._per_target(stage, stage.upload))
            host = self._per_target(stage, stage.seconds[0])
            t_host += times * np.where(up, self._per_target(stage, stage.upload), host)
            t_device += times * self._per_target(stage, stage.seconds[1])
            uploaded.append(up)

        def seconds(edge: ReducedEdge, host_side: Sequence[int]) -> float:
            """Cost of crossing `edge` with one of `host_side` on the host, averaged over them."""
            total = 0.0
            for (stage, times), up in zip(stages, uploaded, strict=True):
                stays = sum(not up[i] for i in host_side) / len(host_side)
                moved = edge.nbytes * (1 if edge.is_logits else stage.n_tokens)
                mean = (self.link_s(1, "h2d", moved) + self.link_s(1, "d2h", moved)) / 2
                one_way = self.link_s(1, edge.direction, moved) if edge.direction else mean
                total += times * stays * (one_way + float(self.switch[0, 1]))
            return total

        edges, anchors = [], []
        for edge in reduced_edges(self._graphs[self.decode_tier], homes):
            if edge.j is not None:
                edges.append(Edge(edge.i, edge.j, seconds(edge, (edge.i, edge.j))))
            else:
                anchors.append(Anchor(edge.i, edge.anchor_on_device, seconds(edge, (edge.i,))))
        return t_host, t_device, edges, anchors

    def _per_target(self, stage: StageCosts, seconds: Floats) -> Floats:
        at = stage.graph.target >= 0
        return np.bincount(stage.graph.target[at], seconds[at], len(self.targets)).astype(np.float64)
