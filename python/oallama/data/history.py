"""What plans took when they ran: a small file beside the profile, from which later predictions learn.

One file per machine, like the profile. It is bounded, and nothing depends on it: a file that cannot be read counts as
none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..base.jsonfile import read_json_object, write_text_atomic
from ..errors import OallamaError
from .entries import QUIET_CPUS

SCHEMA = "oallama.history/2"
KEPT = 200  # runs; the oldest go


@dataclass(frozen=True)
class Run:
    """One run of a plan, or what was measured of it beside others.

    Attributes:
        created: when, ISO 8601 in UTC. profile: when the plan's profile was made.
        model, plan, planner: the model's name, the plan's hash, its planner.
        source: "run", or "trial" for what was measured to choose a plan.
        n_prompt, n_generate: tokens computed as prompts, and one by one. depth: tokens in the cache in the middle of
            the answer. n_ubatch: the micro-batch.
        prefill_s: seconds of all prompts; tpot_s: seconds per generated token; None: too few tokens.
        predicted_prefill_s, predicted_tpot_s: what the plan predicts for these.
        others_cpus: CPUs that other work kept busy meanwhile.
        batch: sequences that generated beside each other, one token each in a step.
        terms: predicted seconds by stage ("prefill" of all prompts, "decode" of a token), and by device and kind of
            work, before what was learned.
    """

    created: str
    profile: str
    model: str
    plan: str
    planner: str
    source: str
    n_prompt: int
    n_generate: int
    depth: int
    n_ubatch: int
    prefill_s: float | None
    tpot_s: float | None
    predicted_prefill_s: float | None
    predicted_tpot_s: float | None
    others_cpus: float = 0.0
    terms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    batch: int = 1

    @property
    def clean(self) -> bool:
        """Whether other work kept off the CPUs."""
        return self.others_cpus < QUIET_CPUS

    @property
    def ratio(self) -> float | None:
        """Measured by predicted seconds per token; None where one is missing."""
        return self.tpot_s / self.predicted_tpot_s if self.tpot_s and self.predicted_tpot_s else None


@dataclass(frozen=True)
class History:
    """Runs in the order of time, and the hashes of plans that were chosen anew because runs contradicted them."""

    runs: tuple[Run, ...] = ()
    revised: tuple[str, ...] = ()

    def with_run(self, run: Run) -> History:
        return History((*self.runs, run)[-KEPT:], self.revised)

    def with_revised(self, plan: str) -> History:
        return History(self.runs, (*self.revised, plan)[-KEPT:])

    def of_plan(self, plan: str) -> list[Run]:
        """Runs of one plan, by its hash."""
        return [run for run in self.runs if run.plan == plan]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file aside, then rename. Raises OallamaError when it cannot be written."""
        content = {"schema": SCHEMA, "runs": [asdict(run) for run in self.runs], "revised": [*self.revised]}
        write_text_atomic(path, json.dumps(content, indent=1) + "\n", "history")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Read the file; a missing one is an empty history.

        Raises OallamaError for one that is damaged or of another version.
        """
        if not Path(path).exists():
            return cls()
        content = read_json_object(path, "history", _REMEDY)
        if content.get("schema") != SCHEMA:
            raise OallamaError(f"history {path} has schema {content.get('schema')!r}, expected {SCHEMA!r}; {_REMEDY}")
        try:
            return cls(_runs(content["runs"]), tuple(map(str, content["revised"])))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise OallamaError(f"history {path} is not a valid {SCHEMA} ({error}); {_REMEDY}") from None


_REMEDY = "drop it with `oallama history --forget`"


def _runs(rows: Sequence[Mapping[str, Any]]) -> tuple[Run, ...]:
    known = {f.name for f in fields(Run)}
    runs = tuple(Run(**{name: value for name, value in row.items() if name in known}) for row in rows)
    for run in runs:
        for name in ("prefill_s", "tpot_s", "predicted_prefill_s", "predicted_tpot_s"):
            seconds = getattr(run, name)
            if seconds is not None and not 0 < seconds < 1e6:
                raise ValueError(f"{name} is {seconds!r}")
        for terms in run.terms.values():
            if any(not 0 <= seconds < 1e6 for seconds in terms.values()):
                raise ValueError("a term is not a number of seconds")
    return runs
