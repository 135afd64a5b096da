"""Judges the ranks' reports (preflight.py): may they start, and which share of the model does each take? Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oallama.data.budget import format_bytes
from oallama.data.operators import OperatorGraph
from oallama.errors import OallamaError
from oallama.planning.realisation import NOISE

from .rank import OURS, RANK_KERNELS

# Share of a host's free memory that weights may take; the rest is for KV caches and compute buffers.
WEIGHTS_SHARE = 0.85
INSTEAD = "run its layers one after the other with `oallama cluster plan` and `cluster run --plan`"


def check_reports(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raises OallamaError when a rank cannot start, or ranks have different engines or model files."""
    for rank, found in enumerate(reports):
        if "error" in found:
            raise OallamaError(f"rank {rank} on {found['host']} cannot start: {found['error']}")
    first = reports[0]
    for rank, found in enumerate(reports):
        if found["engine"] != first["engine"]:
            raise OallamaError(
                f"{found['host']} (rank {rank}) runs engine {found['engine']}, {first['host']} runs {first['engine']}; "
                "install the same oallama on all hosts"
            )
        if found["model"] != first["model"]:
            sizes = f"{found['model']['nbytes']} and {first['model']['nbytes']} bytes"
            raise OallamaError(
                f"the model file on {found['host']} (rank {rank}) is not the one on {first['host']} ({sizes}); copy it "
                "there again"
            )


def check_splits(graph: OperatorGraph, supported: bool) -> None:
    """Raises OallamaError when llama.cpp's tensor split cannot run the model: ggml would abort when the ranks compute.

    supported: what llama.cpp says of the architecture. It says nothing of a row that is normalised and has to be split,
    as that of a single head of keys (upstream's ggml-backend-meta.cpp, handle_per_row).
    """
    if not supported:
        raise OallamaError(f"llama.cpp cannot split models of architecture {graph.arch!r} over ranks; {INSTEAD}")
    for il in range(graph.n_layer):
        for what, name in (("queries", "attn_q"), ("keys", "attn_k")):
            norm, weight = (graph.tensor.get(f"blk.{il}.{n}.weight") for n in (f"{name}_norm", name))
            if norm and weight and norm.ne[0] == weight.ne[1]:
                raise OallamaError(
                    f"llama.cpp cannot split this {graph.arch} model over ranks: layer {il} normalises its {what} as "
                    f"one row of {norm.ne[0]}; {INSTEAD}"
                )


def faster_kernels(reports: Sequence[Mapping[str, Any]]) -> str:
    """Whose kernels the ranks compute with: ours where the slowest rank is faster by them, in prompts or in answers,
    and in the other not slower beyond noise.
    """
    gains = []
    for times in (tuple(r[stage] for r in reports) for stage in ("kernels", "prompt")):
        ggml, ours = ([found[name] for found in times] for name in RANK_KERNELS)
        if None in (*ggml, *ours):
            return RANK_KERNELS[0]
        gains.append(max(ggml) / max(ours))
    return OURS if max(gains) > 1 + NOISE and min(gains) > 1 - NOISE else RANK_KERNELS[0]


def shares(reports: Sequence[Mapping[str, Any]], seconds: Sequence[float | None], resident: bool = True) -> list[float]:
    """Each rank's share of the model (they add up to 1): by its speed, as far as its memory goes.

    Ranks of one host share its memory. What a rank cannot hold goes to the others, again by speed. seconds: of the same
    work on each rank; one without the memory to measure that (None) counts as the slowest. resident: whether weights
    are in memory.

    Raises:
        OallamaError: when all hosts together have too little memory, saying by how much.
    """
    nbytes = float(reports[0]["model"]["nbytes"])
    room = weights_room(reports) if resident else [nbytes for _ in reports]
    if sum(room) < nbytes:
        hosts = dict.fromkeys(r["host"] for r in reports)
        offered = ", ".join(f"{host} {format_bytes(int(_memory(reports, host)))}" for host in hosts)
        missing = format_bytes(int(nbytes - sum(room)))
        raise OallamaError(
            f"the model takes {format_bytes(int(nbytes))}, all hosts together may hold {format_bytes(int(sum(room)))} "
            f"({WEIGHTS_SHARE:.0%} of what is free: {offered}): {missing} too little"
        )
    slowest = max((s for s in seconds if s), default=1.0)
    speed = [1 / (s or slowest) for s in seconds]
    share = [0.0] * len(reports)
    open_ranks, left = set(range(len(reports))), 1.0
    while open_ranks:
        total = sum(speed[i] for i in open_ranks)
        full = {i for i in open_ranks if left * speed[i] / total * nbytes > room[i]}
        for i in full or open_ranks:
            share[i] = room[i] / nbytes if full else left * speed[i] / total
        left -= sum(share[i] for i in full)
        open_ranks = open_ranks - full if full else set()
    return share


def ranks_of_host(reports: Sequence[Mapping[str, Any]]) -> list[int]:
    """By rank, how many share its host's memory."""
    return [sum(other["host"] == report["host"] for other in reports) for report in reports]


def weights_room(reports: Sequence[Mapping[str, Any]]) -> list[int]:
    """Bytes of weights that each rank's part of its host's free memory can hold."""
    return [int(WEIGHTS_SHARE * r["memory"] / n) for r, n in zip(reports, ranks_of_host(reports), strict=True)]


def disk_floors(reports: Sequence[Mapping[str, Any]], shares: Sequence[float]) -> Iterator[str]:
    """Of ranks whose weights are in a file, and more than the host can cache: how long a token takes at least, because
    the rest is read from the disk for each.
    """
    for rank, (found, share, room) in enumerate(zip(reports, shares, weights_room(reports), strict=True)):
        weights = share * reports[0]["model"]["nbytes"]
        if weights <= room:
            continue
        missing = weights - room
        said = f"rank {rank} on {found['host']}: {format_bytes(int(missing))} of {format_bytes(int(weights))} are read"
        rate = found["disk"]
        speed = f": {missing / rate:.2f} s at {format_bytes(int(rate))}/s" if rate else ""
        yield f"{said} from the disk for each token, at least{speed}"


def _memory(reports: Sequence[Mapping[str, Any]], host: str) -> float:
    return float(next(r["memory"] for r in reports if r["host"] == host))
