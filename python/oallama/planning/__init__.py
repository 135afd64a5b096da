"""Decides where every weight lives: operators + profile -> PlacementPlan. Pure functions, no engine."""

from ..data.budget import Budget, format_bytes, gpu_reserve, parse_budget, parse_margin
from ..data.operators import AttentionShape, Operator, OperatorGraph, TensorInfo
from ..data.workload import Workload
from .planner import Candidates, PlannerName, make_plans
from .space import BudgetTooSmall, Space
from .stock import StockFlags
from .verdict import Verdict, compare

__all__ = [
    "AttentionShape",
    "Budget",
    "BudgetTooSmall",
    "Candidates",
    "Operator",
    "OperatorGraph",
    "PlannerName",
    "Space",
    "StockFlags",
    "TensorInfo",
    "Verdict",
    "Workload",
    "compare",
    "format_bytes",
    "gpu_reserve",
    "make_plans",
    "parse_budget",
    "parse_margin",
]
