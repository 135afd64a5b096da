"""A cluster's Problem from measurements: seconds of every layer on every device, and the links between hosts."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from oallama.data.budget import format_bytes
from oallama.data.curves import Points, log_log
from oallama.data.entries import KERNELS, AttentionTime, DeviceInfo, OperatorTime
from oallama.data.plan import HOST, ContextSettings
from oallama.data.profile import Profile
from oallama.data.workload import Workload
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import PathOrText
from oallama.planning import OperatorGraph
from oallama.planning.cost import CostModel
from oallama.planning.operator_costs import operator_costs
from oallama.profiling.profiler import profile_machine
from oallama.profiling.workload import depths_for

from ..allocation.devices import ClusterFile
from ..allocation.network import LinkQuality, Network
from ..allocation.passes import micro_batches, request_passes
from ..allocation.problem import Device, Layer, Problem
from .dialogue import Progress
from .kernels import realised, tiled_kinds
from .member import Member


@dataclass(frozen=True)
class Model:
    """A model as a cluster sees it.

    request: what times are for. settings.attention: whose kernels compute attention. kv_bytes: of one layer, for the
    whole context. compute_bytes: of the compute buffers of a device that has many layers; they are about as large for a
    few.
    """

    graph: OperatorGraph
    settings: Settings
    request: Workload
    kv_bytes: int
    compute_bytes: int

    @property
    def width(self) -> int:
        """Values of one token between two layers."""
        return self.graph.tensor["token_embd.weight"].ne[0]


def read_model(path: PathOrText, settings: Settings, request: Workload | None = None) -> Model:
    """request: default: one in a context half full.

    Raises OallamaError when llama.cpp cannot load the file, or it has no layers to deal out.
    """
    request = request or Workload(max(1, settings.n_ctx // 2), 1)
    sizes = micro_batches(request, settings.n_ubatch)
    tiers = {*autoplan.TIERS, *(each.n_tokens for n in sizes for each in request_passes(request, n, 0))}
    graph = autoplan.read_graph(path, settings, tuple(tiers))
    settings = autoplan.resolve(settings, graph.n_ctx_train)
    # As the client's process loads it (client.py): logits of one row of each sequence.
    memory = skeleton.dry_run(os.fspath(path), replace(settings, devices=(), n_outputs_max=settings.n_seq_max), None)
    compute = sum(found["compute"] for found in memory.values())
    cached = sum(shape is not None for shape in graph.attention)
    kv = sum(found["kv"] for found in memory.values())
    return Model(graph, settings, request, -(-kv // max(1, cached)), compute)


@dataclass(frozen=True)
class Measured:
    """A problem, and with which kernels its devices compute.

    context: what the model is loaded with, the kernels for attention among it. tiled: by device, the kinds of weights
    (kernels.py) that are multiplied by our kernels.
    """

    problem: Problem
    context: ContextSettings
    tiled: Mapping[str, tuple[str, ...]]


def measure_problem(model: Model, cluster: ClusterFile, members: Sequence[Member], progress: Progress) -> Measured:
    """Measure the client, every device and every link, those between devices where they can reach each other.

    Devices are measured one after another where they share a host, links one after another always.

    Raises:
        OallamaError: for what cannot be measured, and for a device with less memory free than its entry promises.
    """
    for member in members:
        if member.entry.memory_bytes <= model.compute_bytes:
            raise OallamaError(
                f"device {member.name} may use {format_bytes(member.entry.memory_bytes)}, and its compute "
                f"buffers alone take {format_bytes(model.compute_bytes)}; raise its memory or lower --ubatch"
            )
        alike = [other for other in members if _memory_of(other) == _memory_of(member)]
        promised = sum(other.entry.memory_bytes for other in alike)
        if member.hello["memory"] < promised:
            raise OallamaError(
                f"{', '.join(other.name for other in alike)}: {format_bytes(member.hello['memory'])} are free, "
                f"{format_bytes(promised)} are promised; lower that"
            )
    own, found = _measure_profiles(model, members, progress)
    software = {member.name: measured["software_s"] for member, measured in zip(members, found, strict=True)}
    network = measure_network(
        cluster.client.name, members, 4 * model.width, software, progress, cluster.links == "via-client"
    )
    profiles = {cluster.client.name: (own, HOST)}
    profiles |= {m.name: (_profile(m, it), it["name"]) for m, it in zip(members, found, strict=True)}
    model, kinds = _choose_kernels(model, profiles)
    times = {name: layer_seconds(model, *where, kinds[name]) for name, where in profiles.items()}

    client, flops = cluster.client, _flops(model)
    devices = [_device(client.name, client.memory_bytes, client, flops, times[client.name][0])]
    devices += [
        _device(m.name, m.entry.memory_bytes - model.compute_bytes, m.entry, flops, times[m.name][0]) for m in members
    ]
    given = {entry.name for entry in cluster.devices if entry.flops is not None}
    given |= {client.name} if client.flops is not None else set()
    seconds = [
        {name: layers[at] for name, (layers, _) in times.items() if name not in given}
        for at in range(model.graph.n_layer)
    ]
    problem = Problem(
        devices=tuple(devices),
        network=network,
        layers=_layers(model, flops, seconds),
        embedding=_embedding(model, client.name, times[client.name][1]),
        settings=cluster.settings,
        links=cluster.links,
        passes=request_passes(model.request, model.settings.n_ubatch, model.settings.n_ctx),
    )
    return Measured(problem, autoplan.context_of(model.settings), {name: tuple(sorted(k)) for name, k in kinds.items()})


def _measure_profiles(
    model: Model, members: Sequence[Member], progress: Progress
) -> tuple[Profile, list[dict[str, Any]]]:
    """Of this host, and of every device."""
    depths = depths_for(model.settings.n_ctx)
    options: dict[str, Any] = {"depths": depths, "type_k": model.settings.type_k, "type_v": model.settings.type_v}
    own = profile_machine(model.graph, [HOST], n_threads=model.settings.n_threads, progress=progress, **options)
    return own, _profile_devices(model, members, options, progress)


def _choose_kernels(model: Model, profiles: Mapping[str, tuple[Profile, str]]) -> tuple[Model, dict[str, set[str]]]:
    """The model with the kernels for attention that all devices together are faster with; kinds of tiled weights."""
    request, n_ubatch = model.request, model.settings.n_ubatch
    kinds = {name: tiled_kinds(model.graph, *where, request, n_ubatch) for name, where in profiles.items()}
    ways = [replace(model, settings=replace(model.settings, attention=kernels)) for kernels in KERNELS]
    passes = request_passes(request, n_ubatch, 0)

    def seconds(way: Model) -> float:
        layers = (points for where in profiles.values() for points in layer_seconds(way, *where, ())[0])
        return sum(each.count * log_log(points, each.n_tokens) for points in layers for each in passes)

    return min(ways, key=seconds), kinds


def measure_network(
    client: str,
    members: Sequence[Member],
    message_bytes: int,
    software: Mapping[str, float],
    progress: Progress,
    via_client: bool = True,
) -> Network:
    """All links, one after another; a bandwidth given in devices.toml takes the place of the measured one.

    software: what a device's RPC server adds to a crossing. via_client: devices that cannot reach each other have no
    link; else that is an error.
    """
    links: dict[tuple[str, str], LinkQuality] = {}
    pairs = [(a, b) for i, a in enumerate(members) for b in members[i + 1 :]]
    total = len(members) + len(pairs)
    for done, member in enumerate(members):
        progress(done, total, f"link {client} - {member.name}")
        quality = replace(member.measure_link(message_bytes), software_s=software[member.name])
        if member.entry.bandwidth is not None:
            quality = replace(quality, bandwidth=member.entry.bandwidth)
        links[client, member.name] = links[member.name, client] = quality
    for done, (a, b) in enumerate(pairs, len(members)):
        progress(done, total, f"link {a.name} - {b.name}")
        # Nothing of ggml's RPC goes this way: hosts need not reach each other.
        with suppress(OallamaError) if via_client else nullcontext():
            quality = _between(a, b, message_bytes)
            added = (software[a.name] + software[b.name]) / 2
            links[a.name, b.name] = links[b.name, a.name] = replace(quality, software_s=added)
    progress(total, total, "links measured")
    return Network(links)


def _memory_of(member: Member) -> tuple[str, str]:
    """Members with the same one share their memory."""
    return member.hello["machine"], member.hello["device"]


def _between(a: Member, b: Member, message_bytes: int) -> LinkQuality:
    if a.has_tunnel or b.has_tunnel:
        raise OallamaError(f"devices {a.name} and {b.name} are behind tunnels")
    return a.measure_link_to(b, message_bytes)


def layer_seconds(model: Model, profile: Profile, name: str, kinds: Collection[str]) -> tuple[list[Points], Points]:
    """Seconds of each layer, and of embedding and head together, on the device at the model's tiers of token counts.

    kinds: of weights that are tiled there.
    """
    graph, context = model.graph, autoplan.context_of(model.settings)
    costs = CostModel(graph, profile, (), context, host=name, realisations=realised(graph, kinds))
    layers: list[list[tuple[int, float]]] = [[] for _ in range(graph.n_layer)]
    rest = []
    request = model.request
    for n_tokens in sorted(graph.tiers):
        each = [0.0] * (graph.n_layer + 1)
        layer = graph.n_layer  # embedding and head
        decode = n_tokens in (1, request.n_parallel)
        depth = request.middle if decode else request.depth + request.n_prompt // 2
        for cost in operator_costs(costs, n_tokens, depth, decode=decode):
            op = cost.op
            # An operator without a layer's name belongs to the one before it, until the head's weights come.
            layer = op.layer if op.layer is not None else graph.n_layer if op.weight else layer
            each[layer] += cost.seconds
        for il in range(graph.n_layer):
            layers[il].append((n_tokens, each[il]))
        rest.append((n_tokens, each[-1]))
    return [tuple(points) for points in layers], tuple(rest)


def _profile_devices(
    model: Model, members: Sequence[Member], options: dict[str, Any], progress: Progress
) -> list[dict[str, Any]]:
    """Machines at the same time, devices of one machine in turn: they share its cores."""
    graph = model.graph.to_json()
    hosts: dict[str, list[Member]] = {}
    for member in members:
        hosts.setdefault(member.hello["machine"], []).append(member)
    found: dict[str, dict[str, Any]] = {}

    def measure(group: list[Member]) -> None:
        for member in group:
            found[member.name] = member.profile(graph, options, progress)

    with ThreadPoolExecutor(len(hosts)) as pool:
        for task in [pool.submit(measure, group) for group in hosts.values()]:
            task.result()
    return [found[member.name] for member in members]


def _profile(member: Member, measured: Mapping[str, Any]) -> Profile:
    name, times = measured["name"], measured["times"]
    return Profile(
        created="",
        fingerprint={},
        devices=(DeviceInfo(name, member.hello["description"], "", 0, ""),),
        operators=tuple(OperatorTime(**entry | {"ne": tuple(entry["ne"])}) for entry in times["operators"]),
        attention=tuple(AttentionTime(**entry) for entry in times["attention"]),
    )


def _flops(model: Model) -> list[float]:
    """Of one token, by layer."""
    flops = [0.0] * model.graph.n_layer
    for op in model.graph.targets(min(model.graph.tiers)):
        if op.layer is not None and op.weight:
            k, m = model.graph.tensor[op.weight].ne[:2]
            flops[op.layer] += 2.0 * k * m * max(1, op.n_used)
    return flops


def _device(name: str, memory: int, given: Any, flops: Sequence[float], layers: Sequence[Points]) -> Device:
    """given: the entry of devices.toml, whose rates go before what was measured."""
    (_, one), (n, many) = ([sum(points[at][i] for points in layers) for i in (0, 1)] for at in (0, -1))
    n_tokens = n / len(layers)
    measured, prefill = sum(flops) / one, n_tokens * sum(flops) / many
    return Device(name, memory, given.flops or measured, given.prefill_flops or (None if given.flops else prefill))


def _layers(model: Model, flops: Sequence[float], seconds: Sequence[dict[str, Points]]) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    for at in range(model.graph.n_layer):
        weights = sum(t.nbytes for t in model.graph.tensors if t.layer == at)
        kv = model.kv_bytes if model.graph.attention[at] is not None else 0
        layers.append(Layer(flops[at], weights + kv, 4 * model.width, kv, seconds[at]))
    return tuple(layers)


def _embedding(model: Model, client: str, seconds: Points) -> Layer:
    graph = model.graph
    rest = [t for t in graph.tensors if t.layer is None and not (graph.tied_output and t.name == "output.weight")]
    k, m = graph.tensor["output.weight"].ne[:2]
    return Layer(2.0 * k * m, sum(t.nbytes for t in rest), 4 * model.width, 0, {client: seconds})
