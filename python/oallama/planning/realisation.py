"""How each weight on the host lies there: plain, as in the file, repacked for the CPU's faster kernels, tiled, as in
the file with our kernels for many tokens, or twice: repacked for few tokens, tiled for many.

Chosen from the profile's times of this machine alone; a weight that was measured in one realisation only is left to
llama.cpp. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ..data.entries import form_at
from ..data.operators import OUTPUT, OperatorGraph
from ..data.plan import HOST
from ..data.profile import Profile
from ..data.tuning import Crossover

PLAIN, REPACKED, TILED, TWICE = "plain", "repacked", "tiled", "repacked+tiled"
# What llama.cpp takes gives way to nothing that is faster by less: times of one machine come and go by as much. Nor
# does a weight lie in memory twice to gain less.
NOISE = 0.05
# Backends without host memory of their own: beside these alone llama.cpp repacks what it can, beside others nothing.
HOSTLESS = ("RPC", "BLAS", "Metal")
Tiers = Sequence[tuple[int, float]]


class Weight(NamedTuple):
    """What decides how fast a target operator is: ggml's operator, type and shape (k, m[, n_expert]), experts used."""

    op: str
    type: str
    ne: tuple[int, ...]
    n_used: int = 1


@dataclass(frozen=True)
class WeightRealisation:
    """The realisation of one weight. seconds: by realisation, over all tiers; empty where there is but one."""

    weight: Weight
    realisation: str
    seconds: Mapping[str, float]

    def gain_twice(self) -> float:
        """Seconds that it saves to be in memory twice; 0 for no more than `NOISE`."""
        once, twice = self.seconds.get(self.realisation, 0.0), self.seconds.get(TWICE, math.inf)
        return once - twice if twice < (1 - NOISE) * once else 0.0

    def __str__(self) -> str:
        """
        >>> print(choose(Weight("MUL_MAT", "q4_K", (4096, 4096)), [(1, 127.0), (512, 1.0)], profile))
        q4_K 4096x4096: repacked (plain 120 ms, repacked 85 ms)
        """
        times = ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in self.seconds.items())
        shape = "x".join(map(str, self.weight.ne))
        return f"{self.weight.type} {shape}: {self.realisation or 'as llama.cpp likes'} ({times or 'no choice'})"


def usual_realisation(profile: Profile, accelerators: Sequence[str]) -> str:
    """What llama.cpp makes of a weight on the host beside these accelerators, where it can be repacked."""
    hostless = all(profile.device(name).backend.startswith(HOSTLESS) for name in accelerators)
    return REPACKED if hostless else PLAIN


def choose(
    weight: Weight,
    tiers: Tiers,
    profile: Profile,
    device: str = HOST,
    crossover: Crossover | None = None,
    usual: str = PLAIN,
) -> WeightRealisation:
    """The realisation in which the tiers take least time, in memory once; the usual one (plain where a weight is never
    repacked) unless another saves more than `NOISE`.

    tiers: (tokens, how often) of the stages that compute the operator on `device`. crossover: of this type, by
    `oallama tune`; it says how repacked compares with plain at token counts that the profile did not measure. usual: by
    `usual_realisation`.
    """
    names = profile.realisations(device, weight.op, weight.type, weight.ne, weight.n_used)
    if len(names) < 2:
        return WeightRealisation(weight, "", {})

    def seconds(name: str, n_tokens: int) -> float:
        name = form_at(name, n_tokens, (*weight.ne, 1)[2], weight.n_used)
        key = (device, weight.op, weight.type, weight.ne, n_tokens, weight.n_used)
        found = profile.op_time(*key, name)
        if name != REPACKED or found.source == "measured" or crossover is None:
            return found.seconds
        return profile.op_time(*key, PLAIN).seconds * crossover.ratio(n_tokens)

    total = {name: sum(times * seconds(name, n) for n, times in tiers) for name in names}
    fastest = min(names, key=total.__getitem__)
    default = usual if usual in total else PLAIN
    chosen = fastest if total[fastest] < (1 - NOISE) * total[default] else default
    if {REPACKED, TILED} <= total.keys():
        total[TWICE] = sum(times * seconds(TWICE, n) for n, times in tiers)
    return WeightRealisation(weight, chosen, total)


@dataclass(frozen=True)
class Realisations:
    """The realisation of each weight, should it live on the host, by name; weights not named are left to llama.cpp.

    host: where all stages compute it there. moved: where its prefill runs elsewhere, because it is streamed. divided:
    as host, of weights that are divided: those are not in memory twice.
    """

    host: Mapping[str, str]
    moved: Mapping[str, str]
    divided: Mapping[str, str]


NONE = Realisations({}, {}, {})


def realise(
    graph: OperatorGraph,
    profile: Profile,
    decode: Tiers,
    prefill: Tiers,
    *,
    accelerators: Sequence[str] = (),
    repack: bool = True,
    crossovers: Mapping[str, Crossover] = MappingProxyType({}),
    spare: int = 0,
) -> Realisations:
    """The realisations of all targets of a model.

    decode, prefill: (tokens, how often) of a request. accelerators: beside the host. repack=False: all plain, so that a
    matrix gives the same bits on every CPU device. crossovers: by type, as in `choose`. spare: bytes of the host's
    memory that weights may take to lie there twice, all of one kind or none; those that gain most by byte are first.
    """
    usual = usual_realisation(profile, accelerators)
    kinds: dict[tuple[Weight, bool], dict[str, int]] = {}  # bytes of each weight
    for op in graph.targets(max(graph.tiers)):
        tensor = graph.tensor[op.weight or ""]
        kind = Weight(op.op, tensor.type, tensor.ne, op.n_used), op.weight == OUTPUT
        kinds.setdefault(kind, {})[tensor.name] = tensor.nbytes
    if not repack:
        plain = {name: PLAIN for names in kinds.values() for name in names}
        return Realisations(plain, plain, plain)

    found: list[tuple[WeightRealisation, dict[str, int]]] = []
    host: dict[str, str] = {}
    moved: dict[str, str] = {}
    for (weight, is_output), sizes in kinds.items():
        # A prompt has one row of logits.
        stages = [*decode, (1, 1.0)] if is_output and prefill else [*decode, *prefill]
        on_host, moved_away = (
            choose(weight, tiers, profile, crossover=crossovers.get(weight.type), usual=usual)
            for tiers in (stages, decode)
        )
        host |= dict.fromkeys(sizes, on_host.realisation)
        moved |= dict.fromkeys(sizes, moved_away.realisation)
        found.append((on_host, sizes))
    return Realisations(host | _twice(found, spare), moved, host)


def _twice(found: Sequence[tuple[WeightRealisation, Mapping[str, int]]], spare: int) -> dict[str, str]:
    """Weights that lie in memory twice, of kinds of weights with the bytes of each: as far as `spare` goes."""
    twice: dict[str, str] = {}
    for chosen, sizes in sorted(found, key=lambda each: -each[0].gain_twice() / max(1, *each[1].values())):
        nbytes = sum(sizes.values())
        if chosen.gain_twice() and nbytes <= spare:
            spare -= nbytes
            twice |= dict.fromkeys(sizes, TWICE)
    return twice
