"""Which of several plans is predicted to be fastest, in one sentence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..data.plan import PlacementPlan
from ..errors import OallamaError
from .uncertainty import ratio_range

# Above this noise llama.cpp's threads, which spin where they wait, may lose any factor (docs/decode.md).
_BUSY = 0.1


@dataclass(frozen=True)
class Verdict:
    """Plans by predicted request time, fastest first, and one sentence that says so."""

    best: str
    seconds: Mapping[str, float]
    sentence: str


def compare(plans: Mapping[str, PlacementPlan], noise: float = 0.0, spinning: Collection[str] = ()) -> Verdict:
    """Which of several plans for one model and workload is predicted to be fastest, and by how much.

    `plans` maps a name to show ("oato", "CPU alone") to a plan. spinning: the names of those that llama.cpp's own
    threads compute. The sentence has the range in which each ratio is expected (`uncertainty.ratio_range`, which takes
    `noise`). Beside other programs it has one end between plans of which one spins. Plans within 1 % count as equal.
    Raises OallamaError when there are no plans or their workloads differ.
    """
    if not plans:
        raise OallamaError("no plans to compare")
    if len({plan.predicted.workload for plan in plans.values()}) > 1:
        raise OallamaError("plans made for different workloads cannot be compared; make them with the same one")
    fastest_first = sorted(plans.items(), key=lambda item: item[1].predicted.request_s)
    seconds = {name: plan.predicted.request_s for name, plan in fastest_first}
    names = list(seconds)
    best = names[0]
    n_prompt, n_generate = plans[best].predicted.workload
    request = f"{n_prompt} + {n_generate} tokens"
    if len(names) == 1:
        return Verdict(best, seconds, f"{best} is predicted to take {seconds[best]:.3g} s for {request}")
    others = []
    for name in names[1:]:
        ratio = seconds[name] / seconds[best] if seconds[best] > 0 else 1.0
        least, most = ratio_range(plans[best], plans[name], noise)
        expected = f"{least:.2f} to {most:.2f}"
        if noise > _BUSY and (name in spinning) != (best in spinning):
            expected = f"{least:.2f} or more" if name in spinning else f"{most:.2f} or less"
        others.append(f"{'' if ratio < 1.01 else f'{ratio:.2f}x ({expected}) '}as fast as {name}")
    sentence = f"{best} is predicted to be fastest for {request} ({seconds[best]:.3g} s): {', '.join(others)}"
    return Verdict(best, seconds, sentence)
