"""A model and its draft: planned together in one budget, the share of right guesses measured."""

from .acceptance import Acceptance, keep, known, measure
from .heads import plan_with_heads
from .joint import Joint, plan_jointly

__all__ = ["Acceptance", "Joint", "keep", "known", "measure", "plan_jointly", "plan_with_heads"]
