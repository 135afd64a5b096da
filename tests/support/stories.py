"""What the demo model says."""

from __future__ import annotations

from typing import Any

from oallama.storyteller import Author
from oallama.storyteller.exam import ask, tell

EXAM_SEED = 4
CONTEXT: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
OPENINGS = (
    "One sunny day, Anna and Ben were in the garden.",
    "One rainy day, Leo and Mia were in the library. Mia had three apples.",
    "One cold day, Kate and Paul were in the barn. Paul found a blue kite. He gave the kite to Kate.",
)


def stories(n: int) -> list[Any]:
    author = Author(EXAM_SEED)
    return [author.story() for _ in range(n)]


def said(llm: Any) -> list[str]:
    return [tell(llm, OPENINGS[0])] + [ask(llm, story, q) for story in stories(2) for q, _ in story.questions]
