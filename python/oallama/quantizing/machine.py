"""Where a quantised model will run: seconds of every tensor in every type from the profile, and plans of variants."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..data.operators import OUTPUT, TOKEN_EMBEDDING, Operator, OperatorGraph, kind_of
from ..data.plan import HOST, PlacementPlan
from ..data.profile import Profile
from ..engine.load_settings import Settings
from ..errors import OallamaError
from ..loading import autoplan, start
from ..loading.autoplan import Choices, Progress
from ..loading.budgets import budgets_for
from .choose import Times
from .importance import Importance
from .types import TYPES, fits, n_bytes

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Machine:
    """A machine and the memory a plan may use there.

    vram: as for `Llama`, but no share of the weights, which depends on their types; None plans for the host alone.
    choices: of planning; at most one accelerator. progress: of profiling.

    Raises OallamaError for a share of the weights.
    """

    source: str | os.PathLike[str]
    vram: str | int | None = None
    settings: Settings = field(default_factory=Settings)
    choices: Choices = field(default_factory=Choices)
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if isinstance(self.vram, str) and self.vram.strip().endswith("%"):
            raise OallamaError(f"a share of the weights ({self.vram}) depends on their types; give bytes, like 8GiB")

    @cached_property
    def graph(self) -> OperatorGraph:
        return autoplan.read_graph(self.source, self._settings)

    @cached_property
    def _settings(self) -> Settings:
        raw = autoplan.read_graph(self.source, self.settings)
        return autoplan.resolve(self.settings, raw.n_ctx_train)

    @property
    def _choices(self) -> Choices:
        return self.choices if self.vram is not None else replace(self.choices, device=HOST)

    def plan(self, path: str | os.PathLike[str]) -> PlacementPlan:
        """The plan of a variant of the model."""
        return start.plan_model(path, self.vram, self._settings, self._choices, self.progress)

    def tpot(self, plan: PlacementPlan) -> float:
        """Predicted seconds per token in the middle of the default workload's answer."""
        workload = self.choices.workload or autoplan.default_workload(self._settings.n_ctx, self._settings.n_seq_max)
        return plan.predicted.tpot_s[min(workload.middle, max(plan.predicted.tpot_s))]

    @cached_property
    def accelerator(self) -> str | None:
        """The accelerator by name, None for the host alone. Raises OallamaError when there are several."""
        if self.vram is None:
            return None
        _, names = autoplan.profile_and_devices(self.graph, self._settings, self.choices, self.progress)
        if len(names) != 1:
            raise OallamaError(f"expected one accelerator, got {', '.join(names) or HOST}: name one of them")
        return names[0]

    @cached_property
    def room(self) -> float:
        """Bytes of the accelerator's budget for weights: without the KV cache and buffers that the input's plan has."""
        if (name := self.accelerator) is None:
            return 0.0
        plan = self.plan(self.source)
        elsewhere = self._profile(()) if self.choices.elsewhere else None
        budget = budgets_for(self.vram, (name,), self.graph.weights_bytes, elsewhere)[name]
        used = plan.predicted.devices.get(name)
        return budget.limit - (used.kv + used.compute if used else 0)

    def times(self, importance: Importance) -> Times:
        """Seconds per generated token of all tensors of the groups that an operator multiplies with.

        What is missing in the profile is measured, unless a profile was given: a type that it lacks raises
        OallamaError.
        """
        profile = self._profile(importance.types)
        tier = min(self.graph.tiers)
        group_of = {t.name: g for g, group in enumerate(importance.groups) for t in group.tensors}
        if self.graph.tied_output and TOKEN_EMBEDDING in group_of:
            group_of[OUTPUT] = group_of[TOKEN_EMBEDDING]
        readers: dict[str, list[Operator]] = {}
        for op in self.graph.targets(tier):
            if op.weight in group_of:
                readers.setdefault(op.weight or "", []).append(op)
        parts: dict[tuple[int | None, str], int] = {}
        part = [parts.setdefault(_part(self.graph.tensor[name].layer, name), len(parts)) for name in readers]
        names = [HOST] if self.accelerator is None else [HOST, self.accelerator]
        shape = len(readers), len(importance.types)
        seconds, nbytes = np.zeros((len(names), *shape)), np.zeros(shape, np.int64)
        for i, (name, ops) in enumerate(readers.items()):
            ne = self.graph.tensor[name].ne
            for t, type in enumerate(importance.types):
                if not np.isfinite(importance.kld[group_of[name], t]):
                    continue
                nbytes[i, t] = n_bytes(type, ne)
                for d, device in enumerate(names):
                    times = (profile.op_time(device, op.op, type, ne, op.n_tokens, op.n_used) for op in ops)
                    seconds[d, i, t] = sum(time.seconds for time in times)
        groups = [group_of[name] for name in readers]
        there = seconds[1] if self.accelerator else None
        return Times(groups, part, seconds[0], there, nbytes, self._cut(profile))

    def _cut(self, profile: Profile) -> float:
        """Seconds of a change of device between two parts: the change itself and one row of the residual stream."""
        if (name := self.accelerator) is None:
            return 0.0
        row = self.graph.tensor[TOKEN_EMBEDDING].ne[0] * _FLOAT_BYTES
        moved = (profile.link_time(name, "h2d", row, "pinned") + profile.link_time(name, "d2h", row, "pinned")) / 2
        return (profile.switch_time(name) or 0.0) + moved

    def _profile(self, types: Sequence[str]) -> Profile:
        """The profile with the times of every type."""
        choices = replace(self._choices, device=self.accelerator or HOST)
        profile, _ = autoplan.profile_and_devices(self.graph, self._settings, choices, self.progress)
        for type in types:
            graph = retyped(self.graph, {t.name: type for t in self.graph.tensors if t.type in TYPES and len(t.ne) > 1})
            profile, _ = autoplan.profile_and_devices(graph, self._settings, choices, self.progress)
        return profile


def retyped(graph: OperatorGraph, types: Mapping[str, str]) -> OperatorGraph:
    """The graph of the same model with the matrices of `types` in other types, where their rows are whole blocks."""
    targets = {op.weight for op in graph.targets(min(graph.tiers))}
    tensors = tuple(
        replace(t, type=types[t.name], nbytes=n_bytes(types[t.name], t.ne))
        if t.name in types and t.name in targets and fits(types[t.name], t.ne)
        else t
        for t in graph.tensors
    )
    return replace(graph, tensors=tensors)


def _part(layer: int | None, name: str) -> tuple[int | None, str]:
    """What shares a device: attention or feed-forward of a layer, or a tensor outside of all layers."""
    if layer is None:
        return None, name
    return layer, "attention" if kind_of(name).startswith("attn") else "feed-forward"
