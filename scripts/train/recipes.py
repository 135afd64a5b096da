"""What is trained: shapes, steps and file types of the demo models."""

from __future__ import annotations

from dataclasses import dataclass

from oallama.modelmaker.shapes import Shape

TOKENS_PER_STEP = 2048


@dataclass(frozen=True)
class Recipe:
    """One model. steps: tokens of a row -> steps. The rate falls to zero in the steps of the rows behind the first.

    experts: the type of the experts' matrices in the file, other: that of all other matrices. room, balance: of a
    mixture: how many tokens an expert takes, as a multiple of the mean, and the weight of balanced use in the loss.
    """

    name: str
    shape: Shape
    steps: dict[int, int]
    other: str = "F16"
    experts: str = "F16"
    room: float = 0.0
    balance: float = 0.0

    @property
    def n_steps(self) -> int:
        """Steps in all."""
        return sum(self.steps.values())

    @property
    def rounds(self) -> bool:
        """Whether experts are rounded while the rate falls."""
        return self.experts == "Q4_0"

    def rounding(self, step: int) -> float:
        """Return the part of the rounding at a step, 0 or 1."""
        return float(step >= next(iter(self.steps.values())))

    def factor(self, step: int) -> float:
        """Return the part of the full rate at a step."""
        first, *long = self.steps.values()
        return min(1.0, (step + 1) / 10, (first + sum(long) - step) / sum(long))


DENSE = Recipe(
    "storyteller",
    Shape("llama", 4, 256, 512, 4, 2, 64, 640, 512, 10000.0, 1e-5, tied=True),
    {128: 420, 256: 190, 512: 90},
)
_MIXTURE = Shape(
    "qwen3moe", 4, 256, 512, 4, 2, 64, 640, 512, 10000.0, 1e-6, tied=True, n_expert=32, n_expert_used=4, n_ff_expert=64
)
MIXTURE = Recipe("storyteller-mixture", _MIXTURE, {128: 900, 256: 190, 512: 90}, "Q8_0", "Q4_0", room=2.0, balance=0.01)
