"""What the model is trained on: stories as plain pages and as conversations, cut into rows of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from oallama.storyteller.stories import Author, Story
from tokenizer import END, TURN, TURN_END


def documents(seed: int, n: int) -> list[str]:
    """Return n documents with their special tokens: one to three plain pages, or a conversation."""
    author = Author(seed)
    return [author.pick((_pages, _talk))(author) for _ in range(n)]


def rows(tokenizer: Any, texts: list[str], length: int) -> np.ndarray:
    """Return [n, length] int32: every row starts with a document, and only its last one may be cut off."""
    filled, row = [], []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        row += encoding.ids
        if len(row) >= length:
            filled.append(row[:length])
            row = []
    return np.array(filled, np.int32)


def _pages(author: Author) -> str:
    stories = [author.story() for _ in range(author.pick((1, 1, 2, 3)))]
    return END + "\n".join(story.page() for story in stories)


def _talk(author: Author) -> str:
    story = author.story()
    turns = author.pick((_asked, _told))(story)
    return END + "".join(f"{TURN}{role}\n{text}{TURN_END}\n" for role, text in turns)


def _asked(story: Story) -> list[tuple[str, str]]:
    """The user tells the story and asks."""
    (first, answer), *more = story.questions
    turns = [("user", f"{story.text} {first}"), ("assistant", answer)]
    return turns + [turn for q, a in more for turn in (("user", q), ("assistant", a))]


def _told(story: Story) -> list[tuple[str, str]]:
    """The user wishes for a story and asks about it."""
    turns = [("user", "Tell me a story about {} and {}.".format(*story.people)), ("assistant", story.text)]
    return turns + [turn for q, a in story.questions for turn in (("user", q), ("assistant", a))]


def tokenizer_text(seed: int, n: int) -> list[str]:
    """Return text to learn a tokenizer from: n plain pages, and the words that only conversations have."""
    author = Author(seed)
    return [author.story().page() for _ in range(n)] + ["user\nassistant\n Tell me a story about"] * n
