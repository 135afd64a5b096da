"""How each weight on the host lies there: plain, as in the file, repacked for the CPU's faster kernels, or tiled, as in
the file with our kernels for many tokens.

Chosen from the profile's times of this machine alone; a weight that was measured in one realisation only is left to
llama.cpp. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ..data.operators import OUTPUT, OperatorGraph
from ..data.plan import HOST
from ..data.profile import Profile
from ..data.tuning import Crossover

PLAIN, REPACKED, TILED = "plain", "repacked", "tiled"
# What llama.cpp takes gives way to nothing that is faster by less: times of one machine come and go by as much.
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
    """The realisation in which the tiers take least time; the usual one (plain where a weight is never repacked) unless
    another saves more than `NOISE`.

    tiers: (tokens, how often) of the stages that compute the operator on `device`. crossover: of this type, by
    `oallama tune`; it says how repacked compares with plain at token counts that the profile did not measure. usual: by
    `usual_realisation`.
    """
    names = profile.realisations(device, weight.op, weight.type, weight.ne, weight.n_used)
    if len(names) < 2:
        return WeightRealisation(weight, "", {})

    def seconds(name: str, n_tokens: int) -> float:
        key = (device, weight.op, weight.type, weight.ne, n_tokens, weight.n_used)
        found = profile.op_time(*key, name)
        if name != REPACKED or found.source == "measured" or crossover is None:
            return found.seconds
        return profile.op_time(*key, PLAIN).seconds * crossover.ratio(n_tokens)

    total = {name: sum(times * seconds(name, n) for n, times in tiers) for name in names}
    fastest = min(names, key=total.__getitem__)
    default = usual if usual in total else PLAIN
    return WeightRealisation(weight, fastest if total[fastest] < (1 - NOISE) * total[default] else default, total)


@dataclass(frozen=True)
class Realisations:
    """The realisation of each weight, should it live on the host, by name; weights not named are left to llama.cpp.

    host: where all stages compute it there. moved: where its prefill runs elsewhere, because it is streamed.
    """

    host: Mapping[str, str]
    moved: Mapping[str, str]


NONE = Realisations({}, {})


def realise(
    graph: OperatorGraph,
    profile: Profile,
    decode: Tiers,
    prefill: Tiers,
    *,
    accelerators: Sequence[str] = (),
    repack: bool = True,
    crossovers: Mapping[str, Crossover] = MappingProxyType({}),
) -> Realisations:
    """The realisations of all targets of a model.

    decode, prefill: (tokens, how often) of a request. accelerators: beside the host. repack=False: all plain, so that a
    matrix gives the same bits on every CPU device. crossovers: by type, as in `choose`.
    """
    usual = usual_realisation(profile, accelerators)
    host: dict[str, str] = {}
    moved: dict[str, str] = {}
    chosen: dict[tuple[Weight, bool], tuple[str, str]] = {}
    for op in graph.targets(max(graph.tiers)):
        tensor, is_output = graph.tensor[op.weight or ""], op.weight == OUTPUT
        if not repack:
            host[tensor.name] = moved[tensor.name] = PLAIN
            continue
        weight = Weight(op.op, tensor.type, tensor.ne, op.n_used)
        if (weight, is_output) not in chosen:
            # A prompt has one row of logits.
            stages = [*decode, (1, 1.0)] if is_output and prefill else [*decode, *prefill]
            on_host, moved_away = (
                choose(weight, tiers, profile, crossover=crossovers.get(tensor.type), usual=usual).realisation
                for tiers in (stages, decode)
            )
            chosen[weight, is_output] = (on_host, moved_away)
        host[tensor.name], moved[tensor.name] = chosen[weight, is_output]
    return Realisations(host, moved)
