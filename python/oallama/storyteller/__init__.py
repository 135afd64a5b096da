"""Demo models of a few megabytes that tell very short stories and answer questions about them.

They were trained by scripts/train on text that stories.py writes by a grammar, so whatever they say can be checked:
grammar.py reads a story, keeps its facts and knows the answers.
"""

from pathlib import Path

from ..errors import OallamaError
from .grammar import questions, read_story
from .stories import Author, Story, held_out_text

__all__ = ["Author", "Story", "demo_model", "held_out_text", "questions", "read_story"]

_FILES = {"dense": "storyteller-F16.gguf", "mixture": "storyteller-mixture-Q4_0.gguf"}


def demo_model(kind: str = "dense") -> Path:
    """Return the path of a demo model: 5 MB.

    Args:
        kind: "dense": llama, F16, every row a multiple of 256 wide. "mixture": qwen3moe with 32 experts, 4 used;
            experts in Q4_0, 64 wide, other matrices in Q8_0.
    Raises:
        OallamaError: another kind.

    >>> llm = oallama.Llama(str(oallama.demo_model()), vram="50%")
    """
    if kind not in _FILES:
        raise OallamaError(f"unknown demo model {kind!r}: choose one of {', '.join(_FILES)}")
    return Path(__file__).with_name(_FILES[kind])
