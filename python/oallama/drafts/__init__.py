"""A model and its draft: planned together in one budget, the share of right guesses measured."""

from .acceptance import Acceptance, known, measure
from .joint import Joint, plan_jointly

__all__ = ["Acceptance", "Joint", "known", "measure", "plan_jointly"]
