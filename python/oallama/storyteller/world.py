"""The facts of a story: who is where, who has what, in which colour, how many.

Invariant: an event that does not fit the facts raises ValueError and changes nothing. Both the author (stories.py) and
the reader (grammar.py) go through apply(), so that what one writes the other accepts, and there is one set of rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from .words import NUMBERS

MOST = len(NUMBERS) - 1
T = TypeVar("T")


@dataclass(frozen=True)
class Event:
    """One thing that happens: a kind, a key of RULES, and the words of its slots."""

    kind: str
    slots: Mapping[str, str]


@dataclass
class World:
    """What is known after some events; subject is whom "he" or "she" means, last the event before."""

    place: dict[str, str] = field(default_factory=dict)  # of a person
    holder: dict[str, str] = field(default_factory=dict)  # of a thing
    colour: dict[str, str] = field(default_factory=dict)  # of a thing
    fruit: dict[str, tuple[int, str]] = field(default_factory=dict)  # of a person: how many, of which kind
    subject: str | None = None
    last: Event | None = None

    def apply(self, event: Event) -> None:
        """Let an event happen.

        Raises: ValueError naming the fact that it contradicts.
        """
        RULES[event.kind](self, **event.slots)
        self.subject = None if event.kind == "meet" else event.slots["p"]
        self.last = event

    def _meet(self, p: str, q: str, place: str, weather: str) -> None:
        _hold(self.last is None and p != q, "a story starts once, with two people")
        self.place |= {p: place, q: place}

    def _come(self, p: str, place: str) -> None:
        _hold(self.last is not None and p not in self.place, f"{p} was there before")
        self.place[p] = place

    def _go(self, p: str, place: str) -> None:
        _hold(self._of(self.place, p) != place, f"{p} is in the {place} already")
        self.place[p] = place

    def _own(self, p: str, colour: str, thing: str) -> None:
        self._of(self.place, p)
        _hold(thing not in self.holder, f"there is a {thing} already")
        self.holder[thing], self.colour[thing] = p, colour

    def _give(self, p: str, q: str, thing: str) -> None:
        _hold(self.holder.get(thing) == p, f"{p} does not have the {thing}")
        _hold(p != q and self._of(self.place, p) == self._of(self.place, q), f"{q} is not beside {p}")
        self.holder[thing] = q

    def _thank(self, p: str) -> None:
        given = self.last is not None and self.last.kind == "give" and self.last.slots["q"] == p
        _hold(given, f"{p} was given nothing")

    def _count(self, p: str, n: str, fruit: str) -> None:
        self._of(self.place, p)
        _hold(p not in self.fruit, f"{p} has fruit already")
        self.fruit[p] = NUMBERS.index(n), fruit

    def _find(self, p: str, n: str, fruit: str, m: str) -> None:
        self._change(p, NUMBERS.index(n), fruit, m)

    def _eat(self, p: str, n: str, fruit: str, m: str) -> None:
        self._change(p, -NUMBERS.index(n), fruit, m)

    def _feel(self, p: str, mood: str) -> None:
        self._of(self.place, p)

    def _see(self, p: str, animal: str) -> None:
        self._of(self.place, p)

    def _change(self, p: str, by: int, fruit: str, m: str) -> None:
        before, kind = self._of(self.fruit, p)
        after = before + by
        _hold(kind == fruit and 1 <= after <= MOST, f"{p} has {NUMBERS[before]} of {kind}")
        _hold(NUMBERS[after] == m, f"that makes {NUMBERS[after]}, not {m}")
        self.fruit[p] = after, fruit

    @staticmethod
    def _of(facts: Mapping[str, T], who: str) -> T:
        _hold(who in facts, f"nothing is known of {who}")
        return facts[who]


def _hold(true: bool, otherwise: str) -> None:
    if not true:
        raise ValueError(otherwise)


RULES: dict[str, Callable[..., None]] = {
    "meet": World._meet,
    "come": World._come,
    "go": World._go,
    "own": World._own,
    "give": World._give,
    "thank": World._thank,
    "count": World._count,
    "find": World._find,
    "eat": World._eat,
    "feel": World._feel,
    "see": World._see,
}
