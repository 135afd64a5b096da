"""How often the experts of a loaded model were used where two devices share them, and how often they moved."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.engine import native


@dataclass(frozen=True)
class ExpertCounts:
    """One layer whose experts are divided between the host and an accelerator, since the model was loaded.

    Batches of more than 8 tokens, prompts, do not count.

    Attributes:
        uses: experts that its router chose, summed over tokens.
        hits: uses of experts that the accelerator had.
        uploads: experts that were copied into slots; 0 where the experts stay the same.
        uploaded_bytes: of those.
    """

    layer: int
    uses: int
    hits: int
    uploads: int
    uploaded_bytes: int


def expert_counts(context: int) -> list[ExpertCounts]:
    """Of the model of a context (the address of its llama_context), in the order of layers; [] where none is."""
    return sorted((ExpertCounts(*row) for row in native.core().expert_counts(context)), key=lambda c: c.layer)
