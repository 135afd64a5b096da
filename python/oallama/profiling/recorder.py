"""The file of a profile: where it is, what it lacks, how it grows. Several processes may add to one at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from oallama.base.jsonfile import locked
from oallama.base.printing import say_once
from oallama.data.entries import (
    OTHER,
    AttentionTime,
    ChainTime,
    Concurrency,
    DeviceInfo,
    LinkTime,
    Note,
    OperatorTime,
    OtherLoad,
    Overlap,
    ShapeTime,
    SwitchTime,
)
from oallama.data.profile import Profile
from oallama.engine import device_list
from oallama.errors import OallamaError
from oallama.profiling.workload import LINK_SIZES, Task

_SAVE_EVERY = 8
BESIDE_OTHERS = "timed while other work had its CPUs, perhaps too long; measured again when the machine is quiet"
DISTURBED_AGAIN = "timed twice while other work had its CPUs, the second time on a machine that looked quiet"
THROTTLED = "timed while heat or power limits slowed the CPUs, perhaps too long; measured again at a later start"
THROTTLED_AGAIN = "timed twice while heat or power limits slowed the CPUs"
MEMORY_SHORT = "timed while memory was short, perhaps too long; measured again at a later start"
MEMORY_SHORT_AGAIN = "timed twice while memory was short"
# What a measurement is noted with that is to be taken once more, and what is said when that was no better.
DOUBTS = {BESIDE_OTHERS: DISTURBED_AGAIN, THROTTLED: THROTTLED_AGAIN, MEMORY_SHORT: MEMORY_SHORT_AGAIN}


def cache_dir() -> Path:
    """Where profiles are kept: `$XDG_CACHE_HOME/oallama`, by default `~/.cache/oallama`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oallama"


def cache_file(mark: dict[str, Any], cache: Path | None) -> Path:
    short = hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()[:12]
    return (cache or cache_dir()) / f"profile-{short}.json"


def is_kept(mark: Mapping[str, Any]) -> bool:
    """Whether there is a cached profile of this fingerprint."""
    return cache_file(dict(mark), None).is_file()


def _saved(path: Path, mark: Mapping[str, Any]) -> Profile | None:
    if path.is_file():
        with suppress(OallamaError):  # a damaged cache is measured anew
            profile = Profile.load(path)
            if not profile.is_stale(mark):
                return profile
    return None


def cached(path: Path, mark: dict[str, Any], names: Sequence[str]) -> Profile:
    if there := _saved(path, mark):
        return there
    infos = tuple(
        DeviceInfo(d.name, d.description, d.type, d.memory_total, d.backend, d.op_offload)
        for d in map(device_list.device, names)
    )
    return Profile(created=datetime.now(timezone.utc).isoformat(timespec="seconds"), fingerprint=mark, devices=infos)


_FIELDS: dict[type, str] = {
    OperatorTime: "operators",
    AttentionTime: "attention",
    LinkTime: "links",
    SwitchTime: "switches",
    Overlap: "overlaps",
    Concurrency: "concurrency",
    ChainTime: "chains",
    ShapeTime: "shapes",
    OtherLoad: "loads",
}


class Recorder:
    """Adds entries to a profile, knows what is missing, and saves now and then."""

    def __init__(self, profile: Profile, path: Path) -> None:
        self.profile = profile
        self._path = path
        self._unsaved = 0
        self._tried: set[tuple[str, str]] = set()  # device and task, with or without a note
        self._keys = {_key(e) for field in _FIELDS.values() for e in getattr(profile, field)}

    def missing(self, device: str, tasks: Sequence[Task]) -> list[Task]:
        return [task for task in tasks if _task_key(device, task) not in self._keys]

    def doubtful(self, device: str, tasks: Sequence[Task]) -> list[Task]:
        """Tasks that are to be measured once more (DOUBTS), the longest first."""
        noted = {note.task for note in self.profile.notes if note.device == device and note.text in DOUBTS}
        return sorted((task for task in tasks if task.describe() in noted), key=lambda task: -task.cost)

    def add(self, entries: Sequence[Any]) -> None:
        """Add measurements, in place of older ones of the same."""
        new = {_key(entry) for entry in entries}
        for name in {_FIELDS[type(entry)] for entry in entries}:
            kept = [entry for entry in getattr(self.profile, name) if _key(entry) not in new]
            kept += [entry for entry in entries if _FIELDS[type(entry)] == name]
            grown: dict[str, Any] = {name: tuple(kept)}
            self.profile = replace(self.profile, **grown)
        self._keys |= new
        self._unsaved += 1
        if self._unsaved >= _SAVE_EVERY:
            self.save()

    def note(self, device: str, task: Task, *notes: Note) -> None:
        """Add them in place of older ones on the same task."""
        same = (device, task.describe())
        self._tried.add(same)
        kept = tuple(note for note in self.profile.notes if (note.device, note.task) != same)
        self._unsaved += kept + notes != self.profile.notes
        self.profile = replace(self.profile, notes=kept + notes)

    def save(self) -> None:
        """Write what is new, beside what another process has added meanwhile.

        Where the cache cannot be written this is said once: what was measured holds for this process.
        """
        if not self._unsaved:
            return
        self._unsaved = 0
        try:
            with locked(self._path.parent, "profile"):
                there = _saved(self._path, self.profile.fingerprint)
                if there:
                    self._adopt(there)
                self.profile.save(self._path)
        except OallamaError as error:
            say_once(f"{error}; the times that were measured are not kept")

    def _adopt(self, other: Profile) -> None:
        grown: dict[str, Any] = {}
        for name in _FIELDS.values():
            new = tuple(entry for entry in getattr(other, name) if _key(entry) not in self._keys)
            grown[name] = (*getattr(self.profile, name), *new)
            self._keys.update(map(_key, new))
        notes = tuple(note for note in other.notes if (note.device, note.task) not in self._tried)
        kept = tuple(note for note in self.profile.notes if (note.device, note.task) in self._tried)
        self.profile = replace(self.profile, **grown, notes=kept + notes)


def _key(entry: Any) -> tuple[Any, ...]:
    if isinstance(entry, OperatorTime):
        k, m, n_expert = (*entry.ne, 1, 1)[:3]
        return (entry.device, entry.op, entry.type, k, m, n_expert, entry.n_used, entry.n_tokens, entry.realisation)
    if isinstance(entry, AttentionTime):
        shape = (entry.n_head, entry.n_head_kv, entry.head_dim_k, entry.head_dim_v)
        return (entry.device, shape, entry.type_k, entry.type_v, entry.n_tokens, entry.depth, entry.flash, entry.kernel)
    if isinstance(entry, ChainTime):
        return (entry.device, entry.kind, entry.type, *entry.ne, entry.n_tokens)
    if isinstance(entry, ShapeTime):
        return (entry.device, entry.shape)
    if isinstance(entry, LinkTime):
        return (entry.device, "LinkTime", entry.direction, entry.memory, entry.bytes)
    return (entry.device, type(entry).__name__)


_SINGLE = {"switch": "SwitchTime", "overlap": "Overlap", "concurrency": "Concurrency"}


def _task_key(device: str, task: Task) -> tuple[Any, ...]:
    a = task.args
    if task.kind == "mul_mat":
        op = "MUL_MAT_ID" if a["n_expert"] else "MUL_MAT"
        weight = (a["k"], a["m"], max(1, a["n_expert"]))
        return (device, op, a["type"], *weight, max(1, a["n_used"]), a["n_tokens"], a["realisation"])
    if task.kind == "attention":
        shape = (a["n_head"], a["n_head_kv"], a["head_dim_k"], a["head_dim_v"])
        return (device, shape, a["type_k"], a["type_v"], a["n_tokens"], a["depth"], a["flash"], a["kernel"])
    if task.kind == "small":
        return (device, OTHER, "f32", a["n_embd"], 1, 1, 1, a["n_tokens"], "")
    if task.kind == "chain":
        return (device, a["chain"], a["type"], a["ne0"], a["ne1"], a["n_tokens"])
    if task.kind == "shape":
        return (device, a["shape"].key)
    if task.kind == "links":
        return (device, "LinkTime", "h2d", "pageable", LINK_SIZES[0])
    return (device, _SINGLE[task.kind])
