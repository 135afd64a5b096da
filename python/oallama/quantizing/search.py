"""Searches a type for every tensor: the least KL divergence within bytes of the file, or also within a plan's seconds.

The integer program (choose.py) proposes, the engine disposes: every proposal and every uniform type is written and
measured, and the best measured one is taken. So what is found is never worse than the best uniform type of the same
bytes, on the text that was measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..data.plan import PlacementPlan
from ..errors import OallamaError
from ..planning import format_bytes
from .choose import Limits, Problem, TypeAssignment, choose
from .divergence import Divergence
from .importance import Importance, Laboratory
from .machine import Machine
from .recipe import Recipe

UNIFORM, FOUND = "uniform", "found"
# Of a limit that a choice of the same sums has to meet again.
_SLACK = 1 + 1e-9
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Trial:
    """A variant that was measured.

    kind: "uniform", "found", or what a caller adds. types: of all tensors that can be quantised. expected: what the
    groups' divergences add up to. tpot_s: predicted for `plan`, None without a machine.
    """

    name: str
    kind: str
    types: Mapping[str, str]
    recipe: Recipe
    file_bytes: int
    expected: float
    divergence: Divergence
    plan: PlacementPlan | None = None
    tpot_s: float | None = None

    @property
    def kld(self) -> float:
        return self.divergence.kld


@dataclass
class Search:
    """Trials on one model; `run` makes them.

    machine: None leaves seconds out of it.
    """

    lab: Laboratory
    importance: Importance
    machine: Machine | None = None
    progress: Progress | None = None
    trials: list[Trial] = field(default_factory=list)

    def run(self, budgets: Sequence[int] = (), n_points: int = 6) -> list[Trial]:
        """Try every uniform type, and what the program proposes.

        Args:
            budgets: bytes of the whole file; without any, those of the uniform types.
            n_points: with a machine, proposals between the fastest choice and the one of least divergence.
        Raises:
            OallamaError: when no choice of types is as small as a budget.
        """
        uniform = {type: types for type in self.importance.types if (types := self.lab.uniform(type)) is not None}
        sizes = {type: self.lab.file_bytes(types) for type, types in uniform.items()}
        times = self.machine.times(self.importance) if self.machine else None
        problem = Problem(self.importance.kld, self.importance.nbytes, times)
        room = self.machine.room if self.machine and self.machine.accelerator else np.inf
        limits = [Limits(size - self.lab.base_bytes, room) for size in sorted({*budgets} or {*sizes.values()})]
        chosen = [(f"uniform {type}", UNIFORM, types) for type, types in uniform.items()]
        proposals = [choice for limit in limits for choice in self._proposals(problem, limit, n_points)]
        found = (self.importance.tensor_types(choice.types) for choice in proposals)
        chosen += [(f"found {number}", FOUND, types) for number, types in enumerate(found, 1)]
        for done, (name, kind, types) in enumerate(chosen):
            if self.progress:
                self.progress(done, len(chosen), name)
            self.add(name, kind, types)
        return self.trials

    def add(self, name: str, kind: str, types: Mapping[str, str]) -> None:
        """Measure one more variant, unless one of these types was measured."""
        if any(trial.types == types for trial in self.trials):
            return
        plan = tpot = None
        if self.machine:
            with tempfile.TemporaryDirectory(prefix="oallama-", dir=self.lab.folder) as folder:
                self.lab.write(types, variant := Path(folder) / "variant.gguf")
                plan = self.machine.plan(variant)
                tpot = self.machine.tpot(plan)
        divergence = self.lab.measure(types)
        recipe, expected = self.lab.recipe(name, types), self.importance.expected(types)
        self.trials.append(Trial(name, kind, types, recipe, divergence.file_bytes, expected, divergence, plan, tpot))

    def best(self, file_bytes: float = np.inf, tpot_s: float = np.inf, kinds: Iterable[str] = ()) -> Trial:
        """The trial of least measured divergence within the limits; kinds: of these only.

        Raises OallamaError when there is none, naming the smallest and the fastest.
        """
        kinds = set(kinds) or {trial.kind for trial in self.trials}
        of_kind = [trial for trial in self.trials if trial.kind in kinds]
        found = [t for t in of_kind if t.file_bytes <= file_bytes and (t.tpot_s or 0.0) <= tpot_s]
        if not found:
            smallest = min((trial.file_bytes for trial in of_kind), default=0)
            fastest = min((trial.tpot_s or 0.0 for trial in of_kind), default=0.0)
            raise OallamaError(
                f"no choice of types keeps within {format_bytes(int(min(file_bytes, 2**62)))} and {tpot_s:g} s per "
                f"token; the smallest file has {format_bytes(smallest)}, the fastest takes {fastest:.3g} s"
            )
        return min(found, key=lambda t: (t.kld, t.tpot_s or 0.0, t.file_bytes))

    def front(self) -> list[Trial]:
        """Trials that no other beats in divergence and in seconds (without a machine: bytes), fastest first."""
        front: list[Trial] = []
        for trial in sorted(self.trials, key=lambda t: (_cost(t), t.kld)):
            if not front or trial.kld < front[-1].kld:
                front.append(trial)
        return front

    def _proposals(self, problem: Problem, limits: Limits, n_points: int) -> Iterator[TypeAssignment]:
        best = choose(problem, limits)
        if best is None:
            smallest = np.where(np.isfinite(problem.kld), problem.nbytes, np.inf).min(axis=1).sum()
            raise OallamaError(
                f"no choice of {', '.join(self.importance.types)} makes a file of "
                f"{format_bytes(int(limits.nbytes + self.lab.base_bytes))}; the smallest has "
                f"{format_bytes(int(smallest + self.lab.base_bytes))}"
            )
        yield best
        if problem.times is None:
            return
        fastest = choose(problem, limits, fastest=True)
        if fastest is None:  # not found in time
            return
        for seconds in np.geomspace(fastest.seconds, best.seconds, n_points, endpoint=False):
            within = Limits(limits.nbytes, limits.device_bytes, seconds * _SLACK)
            if (choice := choose(problem, within)) is not None:
                yield choice


def _cost(trial: Trial) -> float:
    return trial.file_bytes if trial.tpot_s is None else trial.tpot_s
