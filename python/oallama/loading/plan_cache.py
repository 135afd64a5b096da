"""Plans that were made before: equal questions get equal answers at every start, at once.

A plan is kept as a file in `plans/` of the cache folder, which may be read, compared and deleted. It answers for one
model file, machine, profile, budget and set of options; a change of any of them, or of oallama, makes a new plan.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oallama.base.environment import PLAN_CACHE
from oallama.data.plan import HOST, PlacementPlan
from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.profiling.fingerprint import cpu_set, fingerprint
from oallama.profiling.recorder import DOUBTS, cache_dir, cache_file

if TYPE_CHECKING:
    from oallama.loading.autoplan import Choices

KEPT = 100  # files; the oldest go
# The budget "auto" is what is free: a plan for a little less than that is still the plan.
_LEAST_OF_FREE = 0.95
_SAID_ABOVE = ("profile", "device")
_SOURCES = ("data", "planning", "solving", "loading")


class Question:
    """What a plan is asked for; what is kept as its answer is found at the next start.

    accelerators: devices that the plan may use, in order. auto: bytes that the budget "auto" stands for now, of those
    that have this budget.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        vram: str | int | None,
        settings: Settings,
        choices: Choices,
        accelerators: tuple[str, ...],
        auto: Mapping[str, int],
    ) -> None:
        self._auto = auto
        self._file: Path | None = None
        if os.environ.get(PLAN_CACHE.name) == "0":
            return
        names = (*accelerators, HOST)
        mark = fingerprint(names, settings.n_threads or len(cpu_set()))
        profile = cache_file(mark, None) if choices.profile is None else choices.profile
        file = Path(path)
        if not isinstance(profile, (str, os.PathLike)) or not (Path(profile).is_file() and file.is_file()):
            return
        found = file.stat()
        asked = {
            "model": [str(file.resolve()), found.st_size, found.st_mtime_ns],
            "machine": mark,
            "profile": hashlib.sha256(Path(profile).read_bytes()).hexdigest(),
            "oallama": _sources(),
            "devices": names,
            "vram": vram,
            "settings": asdict(settings),
            "choices": {f.name: repr(getattr(choices, f.name)) for f in fields(choices) if f.name not in _SAID_ABOVE},
        }
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
        self._file = cache_dir() / "plans" / f"{file.stem}-{digest}.json"

    def answer(self) -> PlacementPlan | None:
        """The plan that was kept, if it still holds."""
        if self._file is None or not self._file.is_file():
            return None
        with suppress(OallamaError):  # a damaged file: the plan is made anew
            plan = PlacementPlan.load(self._file)
            if all(_LEAST_OF_FREE * free <= plan.budgets.get(name, 0) <= free for name, free in self._auto.items()):
                return plan
        return None

    def keep(self, plan: PlacementPlan) -> bool:
        """Keep the answer, if the cache can be written; whether it is kept.

        A plan from doubtful times is not kept, unless it was measured itself: those times are measured again.
        """
        doubtful = not plan.measured and any(doubt in note for note in plan.predicted.notes for doubt in DOUBTS)
        if self._file is None or doubtful:
            return False
        try:
            plan.save(self._file)
        except OallamaError:
            return False
        kept = sorted(self._file.parent.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in kept[KEPT:]:
            file.unlink(missing_ok=True)
        return True


def forget(path: str | os.PathLike[str]) -> None:
    """Drop the plans of a model file: something that they say of it has changed."""
    for file in (cache_dir() / "plans").glob(f"{glob.escape(Path(path).stem)}-*.json"):
        with suppress(OSError):  # a cache that cannot be written
            file.unlink(missing_ok=True)


@cache
def _sources() -> list[Any]:
    """What of oallama decides about plans: its files with sizes and times."""
    package = Path(__file__).resolve().parents[1]
    files = (file for folder in _SOURCES for file in sorted((package / folder).glob("*.py")))
    return [[str(file.relative_to(package)), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
