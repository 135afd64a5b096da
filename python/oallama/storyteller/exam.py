"""What a model knows of the stories: right answers by kind of question, and pages that agree with themselves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .grammar import QUESTIONS, questions, read, sentences
from .stories import Story
from .world import World

PAGE_END = "\n\n"
_MOST_TOKENS = 24  # an answer has at most a dozen


def ask(llm: Any, story: Story, question: str) -> str:
    """Return the most likely answer to a question about a story, by chat; llm: a `Llama`."""
    messages = [{"role": "user", "content": f"{story.text} {question}"}]
    reply = llm.create_chat_completion(messages, temperature=0.0, max_tokens=_MOST_TOKENS)
    return reply["choices"][0]["message"]["content"].strip()


def tell(llm: Any, start: str, n_tokens: int = 240) -> str:
    """Return start and what is most likely to follow, to the end of the page: a story, questions and answers."""
    reply = llm.create_completion(start, temperature=0.0, max_tokens=n_tokens, stop=[PAGE_END])
    return start + reply["choices"][0]["text"]


def right_answers(llm: Any, stories: Iterable[Story]) -> dict[str, tuple[int, int]]:
    """Return kind of question -> (right answers, questions); the kinds are those of grammar.QUESTIONS."""
    counts = {kind: (0, 0) for kind, _, _ in QUESTIONS}
    for story in stories:
        for question, answer in story.questions:
            kind = _kind(question)
            right, asked = counts[kind]
            counts[kind] = right + (ask(llm, story, question) == answer), asked + 1
    return counts


@dataclass(frozen=True)
class Marks:
    """How many sentences and answers of a page are true, and what is wrong with each other one."""

    true: int
    faults: list[str]


def mark(page: str) -> Marks:
    """Read a page by the grammar; what is wrong did not happen, and the rest is read on."""
    story, *lines = page.rstrip().split("\n")
    world, true, faults = World(), 0, []
    for sentence in sentences(story):
        try:
            read(sentence, world)
            true += 1
        except ValueError as error:
            faults.append(f"{sentence} ({error})")
    known = {f"Question: {q}": f"Answer: {a}" for q, a in questions(world)}
    for question, answer in zip(lines[::2], lines[1::2], strict=False):
        if known.get(question) == answer:
            true += 1
        else:
            faults.append(f"{question} {answer} (expected {known.get(question)})")
    return Marks(true, faults)


def _kind(question: str) -> str:
    first: Sequence[str] = question.split()[:3]
    if first[:2] == ["Where", "is"]:
        return "thing" if first[2] == "the" else "person"
    return {"Who": "holder", "What": "colour", "How": "number"}[first[0]]
