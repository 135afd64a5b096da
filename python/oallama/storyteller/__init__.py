"""The demo model: 2.5M parameters that tell very short stories and answer questions about them.

It was trained by scripts/train on text that stories.py writes by a grammar, so whatever it says can be checked:
grammar.py reads a story, keeps its facts and knows the answers.
"""

from pathlib import Path

from .grammar import questions, read_story
from .stories import Author, Story, held_out_text

__all__ = ["Author", "Story", "demo_model", "held_out_text", "questions", "read_story"]


def demo_model() -> Path:
    """Return the path of the demo model, F16: 5 MB, every row a multiple of 256 wide.

    >>> llm = oallama.Llama(str(oallama.demo_model()), vram="50%")
    """
    return Path(__file__).with_name("storyteller-F16.gguf")
