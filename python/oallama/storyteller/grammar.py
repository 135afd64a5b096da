"""Sentences: from an event to words and back, and the questions that a story answers.

Invariant: a sentence is read only as what would be written for the same event, so number and gender must agree.
"""

from __future__ import annotations

import re
from functools import cache

from .words import MEN, SLOTS
from .world import Event, World

SENTENCES = (
    ("meet", "One {weather} day, {p} and {q} were in the {place}."),
    ("come", "{p} was in the {place}."),
    ("go", "{p} went to the {place}."),
    ("go", "{p} walked to the {place}."),
    ("own", "{p} had a {colour} {thing}."),
    ("own", "{p} found a {colour} {thing}."),
    ("give", "{p} gave the {thing} to {q}."),
    ("thank", '"Thank you!" said {p}.'),
    ("count", "{p} had {n} {fruit}."),
    ("find", "{p} found {n} more {fruit} and then had {m}."),
    ("eat", "{p} ate {n} {fruit} and then had {m}."),
    ("feel", "{p} was {mood}."),
    ("see", "{p} saw a {animal} there."),
)
QUESTIONS = (
    ("person", "Where is {p}?", "{p} is in the {place}."),
    ("holder", "Who has the {thing}?", "{p} has the {colour} {thing}."),
    ("colour", "What colour is the {thing}?", "The {thing} is {colour}."),
    ("thing", "Where is the {thing}?", "The {thing} is with {p} in the {place}."),
    ("number", "How many {fruits} does {p} have?", "{p} has {n} {fruit}."),
)


def write(event: Event, form: int = 0, subject: str | None = None) -> str:
    """Return the sentence of an event; form counts the kind's sentences; subject: who may be "he" or "she"."""
    templates = [template for kind, template in SENTENCES if kind == event.kind]
    words = dict(event.slots)
    if words["p"] == subject and templates[form].startswith("{p}"):
        words["p"] = "He" if subject in MEN else "She"
    return _fill(templates[form], words)


def read(sentence: str, world: World) -> Event:
    """Return the event that a sentence tells and let it happen in world.

    Raises: ValueError where it is no sentence of the grammar or contradicts the world.
    """
    for kind, template in SENTENCES:
        found = _pattern(template).fullmatch(sentence)
        if not found:
            continue
        slots, subject = found.groupdict(), None
        if slots["p"] in ("He", "She"):
            subject = world.subject
            slots["p"] = subject or ""
        event = Event(kind, slots)
        form = [other for name, other in SENTENCES if name == kind].index(template)
        if write(event, form, subject) == sentence:
            world.apply(event)
            return event
    raise ValueError(f"no sentence of the grammar: {sentence!r}")


def read_story(text: str) -> World:
    """Return the facts after a story of complete sentences.

    Raises: ValueError naming the first sentence that is none, or that contradicts those before.
    """
    world = World()
    for sentence in sentences(text):
        try:
            read(sentence, world)
        except ValueError as error:
            raise ValueError(f"{sentence}: {error}") from None
    return world


def sentences(text: str) -> list[str]:
    """Split a text after every full stop."""
    return [part.strip() for part in re.findall(r"[^.]*\.|[^.]+$", text) if part.strip()]


def questions(world: World) -> list[tuple[str, str]]:
    """List every question that the facts answer, with the one right answer."""
    facts = [{"kind": "person", "p": p, "place": place} for p, place in world.place.items()]
    for thing, p in world.holder.items():
        fact = {"p": p, "thing": thing, "colour": world.colour[thing], "place": world.place[p]}
        facts += [{"kind": kind, **fact} for kind in ("holder", "colour", "thing")]
    for p, (n, fruit) in world.fruit.items():
        facts.append({"kind": "number", "p": p, "n": SLOTS["n"][n - 1], "fruit": fruit, "fruits": fruit + "s"})
    forms = {kind: (question, answer) for kind, question, answer in QUESTIONS}
    return [(_fill(forms[fact["kind"]][0], fact), _fill(forms[fact["kind"]][1], fact)) for fact in facts]


def _fill(template: str, words: dict[str, str]) -> str:
    if "n" in words and words["n"] != "one" and "fruit" in words:
        words = words | {"fruit": words["fruit"] + "s"}
    return template.format(**words)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)
    for i in range(1, len(parts), 2):
        name = parts[i]
        words = SLOTS[name] + (("He", "She") if name == "p" and i == 1 and not parts[0] else ())
        parts[i] = f"(?P<{name}>{'|'.join(words)})" + ("s?" if name == "fruit" else "")
    parts[::2] = map(re.escape, parts[::2])
    return re.compile("".join(parts))
