"""Speculative decoding: what a step of a model and its draft costs and gives, and which way is predicted to be fastest.

A step of llama-server with a draft model or an MTP head: it guesses n tokens, one pass each; the target checks them in
one pass over n + 1 tokens; the draft computes the same n + 1 tokens again (its cache was taken back to where the step
began). The tokens up to the first wrong guess are kept, and the target's own one after them. Model: Leviathan et al.,
2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..data.operators import OperatorGraph
from ..data.plan import HOST, PlacementPlan
from ..data.profile import Profile
from ..data.workload import Workload
from .cost import CostModel
from .predict import Predictor

LONGEST = 4  # tokens guessed at a time, at most
# A draft has to be worth more than this: an acceptance counted over 128 tokens is off by up to 4 points itself.
WORTH = 0.05


def tokens_per_step(acceptance: float, n: int) -> float:
    """Expected tokens of a step that guesses n, each right with this probability while those before it are: the
    geometric sum (1 - a^(n+1)) / (1 - a), which is n + 1 for a = 1.
    """
    return sum(acceptance**i for i in range(n + 1))


@dataclass(frozen=True)
class Pair:
    """A plan of the target, and of a draft beside it, as far as the choice needs them; all in seconds.

    Attributes:
        draft_on: device of the draft or of the MTP heads; None: there is none.
        ttft_s: the prompt through target and draft.
        check_s: by n, the target's pass over n + 1 tokens of every sequence; n = 0 is a step without a draft.
        guess_s: by n, the draft's passes that guess n tokens of every sequence.
        repeat_s: by n, the draft's pass over n + 1 tokens of every sequence.
        nbytes: of both, by device.
    """

    draft_on: str | None
    ttft_s: float
    check_s: Mapping[int, float]
    guess_s: Mapping[int, float]
    repeat_s: Mapping[int, float]
    nbytes: Mapping[str, int]

    def step_s(self, n: int) -> float:
        """One step that guesses n tokens."""
        return self.check_s[n] + (self.guess_s[n] + self.repeat_s[n] if n else 0.0)


@dataclass(frozen=True)
class Choice:
    """A way to generate: a pair by its name, and the tokens guessed at a time (0 without a draft)."""

    pair: str
    n: int
    tokens: float
    step_s: float
    request_s: float

    @property
    def token_s(self) -> float:
        """Expected seconds per token."""
        return self.step_s / self.tokens


def choose(pairs: Mapping[str, Pair], acceptance: float, workload: Workload) -> list[Choice]:
    """Every way, the one to take first: the fastest predicted request; without a draft unless one is worth it.

    acceptance: probability that a guess is right, from 0 to 1.
    """
    found = []
    for name, pair in pairs.items():
        for n in sorted(pair.check_s) if pair.draft_on else (0,):
            if pair.draft_on and not n:
                continue
            tokens, step = tokens_per_step(acceptance, n), pair.step_s(n)
            request = pair.ttft_s + max(0, workload.n_generate - 1) * step / tokens
            found.append(Choice(name, n, tokens, step, request))
    found.sort(key=lambda choice: choice.request_s)
    plain = [choice for choice in found if not choice.n and choice.request_s <= found[0].request_s * (1 + WORTH)]
    return [*plain, *(choice for choice in found if choice not in plain)]


class Passes:
    """Predicted passes of a model under a plan."""

    def __init__(self, graph: OperatorGraph, profile: Profile, plan: PlacementPlan) -> None:
        """graph: with the plan's form of attention."""
        accelerators = [name for name in plan.devices if name != HOST]
        costs = CostModel(graph, profile, accelerators, plan.context)
        self._predictor, self._homes = Predictor(costs), costs.homes(plan)
        self._n_ubatch = plan.context.n_ubatch

    def ttft(self, workload: Workload) -> float:
        return self._predictor.ttft(self._homes, workload.n_prompt, workload.depth)

    def check(self, n_tokens: int, workload: Workload) -> float:
        """A pass over n_tokens of every sequence at once, with the logits of all of them."""
        n, depth = workload.n_parallel, workload.middle
        step = self._predictor.stage(self._homes, n * n_tokens, depth, decode=True)
        if n_tokens == 1:
            return float(step.total[0])
        # The tokens of a sequence attend together, to one cache; those of a decode step each to their own.
        together = self._predictor.stage(self._homes, n_tokens, depth)
        return float((step.total - step.attention + n * together.attention)[0])

    def repeat(self, n_tokens: int, workload: Workload, logits: bool = True) -> float:
        """A pass over n_tokens of every sequence, with the logits of the last one, or with none."""
        stage = self._predictor.stage(self._homes, workload.n_parallel * n_tokens, workload.middle, logits)
        return float(stage.total[0])

    def read(self, workload: Workload) -> float:
        """The prompt without any logits, as it goes through an MTP head."""
        chunks = Workload(workload.n_prompt, 1, workload.depth).chunks(self._n_ubatch)
        return sum(float(self._predictor.stage(self._homes, n, after, False).total[0]) for n, after in chunks)

    def guess(self, n: int, workload: Workload, chained: bool = False) -> float:
        """The passes that guess n tokens of every sequence.

        chained: each by another MTP head, which begins with the tokens of the guesses before.
        """
        if not chained:
            return n * self.check(1, workload)
        later = (self.repeat(i, workload) for i in range(2, n + 1))
        return sum(later, self.check(1, workload)) if n else 0.0
