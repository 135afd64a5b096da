"""The author: very short stories with questions about them, as many as wanted, the same for the same seed.

Events are proposed at random and happen if the world allows them (world.py). Only Random.random() is used: Python
promises its numbers to stay the same from version to version, and no other method's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from .grammar import SENTENCES, questions, write
from .words import NUMBERS, PEOPLE, SLOTS
from .world import Event, World

HELD_OUT_SEED = 1  # never trained on
_KINDS = ("come", "go", "go", "own", "own", *["give"] * 6, "count", "find", "eat", "feel", "see")
_FORMS = {kind: [template for other, template in SENTENCES if other == kind] for kind, _ in SENTENCES}
T = TypeVar("T")


@dataclass(frozen=True)
class Story:
    """A story of one paragraph about two people at first, and questions with their answers."""

    people: tuple[str, str]
    text: str
    questions: list[tuple[str, str]]

    def page(self) -> str:
        """Return it as plain text: the story, then a line for each question and each answer."""
        lines = [line for q, a in self.questions for line in (f"Question: {q}", f"Answer: {a}")]
        return "\n".join([self.text, *lines, ""])


class Author:
    """Writes stories without end."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of choices."""
        return choices[int(self._random.random() * len(choices))]

    def story(self) -> Story:
        """Return the next story: 6 to 10 sentences, one more for every thanks, and 2 to 4 questions."""
        cast = self._several(PEOPLE, self.pick((2, 2, 3)))
        world, text = World(), []
        text.append(self._happen(self._proposal("meet", cast[:1], cast[1:2], world), world))
        for _ in range(self.pick((5, 6, 7, 8, 9))):
            text.append(self._next(cast, world))
            if world.last and world.last.kind == "give" and self.pick((True, False)):
                text.append(self._happen(Event("thank", {"p": world.last.slots["q"]}), world))
        return Story((cast[0], cast[1]), " ".join(text), self._several(questions(world), self.pick((2, 3, 4))))

    def _next(self, cast: Sequence[str], world: World) -> str:
        while True:
            try:
                return self._happen(self._proposal(self.pick(_KINDS), cast, cast, world), world)
            except ValueError:
                pass

    def _happen(self, event: Event, world: World) -> str:
        subject = self.pick((world.subject, None))
        world.apply(event)
        return write(event, self.pick(range(len(_FORMS[event.kind]))), subject)

    def _proposal(self, kind: str, cast: Sequence[str], others: Sequence[str], world: World) -> Event:
        chosen = {name: self.pick(SLOTS[name]) for name in re.findall(r"\{(\w+)\}", _FORMS[kind][0])}
        chosen |= {name: self.pick(who) for name, who in (("p", cast), ("q", others)) if name in chosen}
        if kind == "give":
            chosen["thing"] = self.pick([t for t, p in world.holder.items() if p == chosen["p"]] or [""])
        if kind == "go" and self.pick((True, False)):
            chosen["place"] = self.pick(list(world.place.values()))  # people meet
        if "n" in chosen:
            chosen["n"] = self.pick(NUMBERS[1:7])
        if "m" in chosen and chosen["p"] in world.fruit:
            before, chosen["fruit"] = world.fruit[chosen["p"]]
            after = before + NUMBERS.index(chosen["n"]) * (1 if kind == "find" else -1)
            chosen["m"] = NUMBERS[after] if 0 < after < len(NUMBERS) else chosen["m"]
        return Event(kind, chosen)

    def _several(self, choices: Sequence[T], n: int) -> list[T]:
        left = list(choices)
        return [left.pop(int(self._random.random() * len(left))) for _ in range(min(n, len(left)))]


def held_out_text(n_stories: int = 120) -> str:
    """Return stories of a seed that training never sees, a blank line between them."""
    author = Author(HELD_OUT_SEED)
    return "\n".join(author.story().page() for _ in range(n_stories))
