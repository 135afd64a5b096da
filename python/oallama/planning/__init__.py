"""Decides where every weight lives: operators + profile -> PlacementPlan. Pure functions, no engine."""

from .budget import Budget, format_bytes, parse_budget
from .cost import Workload
from .operators import AttentionShape, Operator, OperatorGraph, TensorInfo
from .planner import BudgetTooSmall, Verdict, compare, make_plan

__all__ = [
    "AttentionShape",
    "Budget",
    "BudgetTooSmall",
    "Operator",
    "OperatorGraph",
    "TensorInfo",
    "Verdict",
    "Workload",
    "compare",
    "format_bytes",
    "make_plan",
    "parse_budget",
]
