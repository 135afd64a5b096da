"""How often a mixture's experts are used that an accelerator has: by the engine's counters, beside what was expected.

The engine counts layers whose experts are on both sides, in batches of a few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from oallama.base.printing import say_once
from oallama.data.budget import format_bytes
from oallama.data.layer_experts import ExpectedExperts
from oallama.data.plan import HOST, PlacementPlan

if TYPE_CHECKING:
    from oallama.engine.expert_counts import ExpertCounts

LEAST_TOKENS = 256  # fewer say little of a text
FEWER = 0.2  # of what was expected: so much less is said
_EVERY = 64  # tokens


@dataclass(frozen=True)
class ExpertHits:
    """What the counters say, layer by layer.

    Attributes:
        counts: of the layers whose experts are on both sides, since the model was loaded.
        expected: of the plan, None where it says nothing.
        device: the accelerator, in words.
    """

    counts: tuple[ExpertCounts, ...]
    expected: ExpectedExperts | None
    device: str

    @property
    def uses(self) -> int:
        return sum(count.uses for count in self.counts)

    @property
    def hits(self) -> int:
        return sum(count.hits for count in self.counts)

    @property
    def uploads(self) -> int:
        return sum(count.uploads for count in self.counts)

    @property
    def uploaded_bytes(self) -> int:
        return sum(count.uploaded_bytes for count in self.counts)

    @property
    def expected_share(self) -> float | None:
        """Of the uses of these layers; None where the plan says nothing."""
        return None if self.expected is None else self.expected.share("decode", [c.layer for c in self.counts])

    def describe(self) -> str:
        """One line: "experts: 71% of 12288 uses hit those on CUDA0, 70% were expected; 12 uploads, 3.1 MiB"."""
        expected = self.expected_share
        words = f"experts: {self.hits / max(1, self.uses):.0%} of {self.uses} uses hit those on {self.device}"
        words += "" if expected is None else f", {expected:.0%} were expected"
        return words + (f"; {self.uploads} uploads, {format_bytes(self.uploaded_bytes)}" if self.uploads else "")

    def fewer(self) -> str | None:
        """What to do where clearly fewer uses hit than were expected; None before LEAST_TOKENS."""
        if self.expected is None:
            return None
        return fewer_hits(self.uses, self.hits, self.expected, [count.layer for count in self.counts], self.device)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values; "expected" of a layer and "fewer" may be None."""
        layers = self.expected.layers if self.expected else {}
        of_layers = [
            {**asdict(count), "expected": layers[count.layer].decode if count.layer in layers else None}
            for count in self.counts
        ]
        totals = {"uses": self.uses, "hits": self.hits, "uploads": self.uploads, "uploaded_bytes": self.uploaded_bytes}
        return {"device": self.device, **totals, "layers": of_layers, "fewer": self.fewer()}


def expert_hits(counts: Sequence[ExpertCounts], plan: PlacementPlan | None) -> ExpertHits | None:
    """None where nothing was counted."""
    if not any(count.uses for count in counts):
        return None
    if plan is None:
        return ExpertHits(tuple(counts), None, "the accelerator")
    return ExpertHits(tuple(counts), plan.predicted.experts, next(name for name in plan.devices if name != HOST))


def fewer_hits(uses: int, hits: int, expected: ExpectedExperts, layers: Sequence[int], device: str) -> str | None:
    """What to do where clearly fewer of these layers' uses hit than were expected; None before LEAST_TOKENS."""
    share = expected.share("decode", layers)
    if uses < LEAST_TOKENS * expected.n_used * len(layers) or hits / max(1, uses) >= (1 - FEWER) * share:
        return None
    known = "the plan's routing trace" if expected.routing == "trace" else "uniform routing, which the plan assumes"
    return (
        f"{hits / uses:.0%} of the experts' uses hit those on {device}, and {share:.0%} were expected by {known}; "
        "record a trace of such text (`oallama profile MODEL.gguf --routing TEXT`) and plan again"
    )


class HitsWatch:
    """Says once, while a model generates, that fewer uses hit than its plan expects."""

    def __init__(self, plan: PlacementPlan, counts: Callable[[], Sequence[ExpertCounts]]) -> None:
        self._plan, self._counts, self._tokens = plan, counts, 0
        expected = plan.predicted.experts
        self._ended = expected is None or not expected.divided()

    def step(self) -> None:
        """After each evaluation; looks now and then."""
        self._tokens += 1
        if self._ended or self._tokens % _EVERY:
            return
        found = expert_hits(self._counts(), self._plan)
        if found and (words := found.fewer()):
            self._ended = True
            say_once(words)
