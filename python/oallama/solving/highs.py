"""A mixed-integer program for HiGHS, collected row by row; the objective is in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from .deadline import Deadline
from .layered import Floats

_OBJECTIVE = 1e4  # costs are scaled so that the scale given is about this much: HiGHS' tolerances are absolute
GAP = 1e-7  # relative; below it two allocations cost the same


@dataclass(frozen=True)
class Solution:
    """values: of all columns, None when none was found. bound: no solution costs less (inf: there is none)."""

    values: Floats | None
    bound: float


class Program:
    """Minimise cost @ x, rows within limits. Whole columns are integers.

    cost: [columns], seconds. upper: [columns]; every lower bound is 0. whole: [columns] bool. scale: seconds of a
    typical solution. gap: how far above its bound a solution may end, relative to the solution.
    """

    def __init__(self, cost: Floats, upper: Floats, whole: np.ndarray, scale: float, gap: float = GAP) -> None:
        self._scale = _OBJECTIVE / scale if scale > 0 else 1.0
        self._rows: list[tuple[float, float, np.ndarray, np.ndarray]] = []
        self._n_rows = 0
        self._model = highspy.Highs()
        options = {
            "output_flag": False,
            "threads": 1,
            "mip_rel_gap": gap,
            "mip_abs_gap": 0.0,
            "mip_feasibility_tolerance": 1e-9,
            "primal_feasibility_tolerance": 1e-9,
            "dual_feasibility_tolerance": 1e-9,
        }
        for option, value in options.items():
            self._model.setOptionValue(option, value)
        n, empty = len(cost), np.empty(0)
        self._model.addCols(
            n, cost * self._scale, np.zeros(n), upper, 0, np.zeros(n, np.int32), empty.astype(np.int32), empty
        )
        at = np.flatnonzero(whole).astype(np.int32)
        integer = np.full(len(at), int(highspy.HighsVarType.kInteger), np.uint8)
        self._model.changeColsIntegrality(len(at), at, integer)

    def row(
        self,
        columns: Sequence[int] | np.ndarray,
        values: float | Sequence[float] | np.ndarray,
        lower: float,
        upper: float,
    ) -> int:
        """lower <= sum of values * columns <= upper; one value serves all columns, infinities leave a side open.

        Returns the number of the row.
        """
        at = np.asarray(columns, np.int32)
        self._rows.append((lower, upper, at, np.broadcast_to(np.asarray(values, float), at.shape)))
        self._n_rows += 1
        return self._n_rows - 1

    def limit(self, row: int, upper: float) -> None:
        """Another upper limit for a row without a lower one."""
        self._add_rows()
        self._model.changeRowBounds(row, -highspy.kHighsInf, upper)

    def start(self, values: Floats) -> None:
        """A solution to begin with."""
        solution = highspy.HighsSolution()
        solution.col_value = values.tolist()
        self._model.setSolution(solution)

    def solve(self, deadline: Deadline) -> Solution:
        """The optimum, or the best at `deadline`, and its bound. Rows may be added in between."""
        self._add_rows()
        left = deadline.left_s
        if left <= 0:
            return Solution(None, -math.inf)
        self._model.setOptionValue("time_limit", self._model.getRunTime() + left)
        self._model.run()
        status, info = self._model.getModelStatus(), self._model.getInfo()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Solution(None, math.inf)
        bound = info.mip_dual_bound / self._scale
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return Solution(None, bound)
        return Solution(np.asarray(self._model.getSolution().col_value), bound)

    def _add_rows(self) -> None:
        if not self._rows:
            return
        lower, upper, columns, values = zip(*self._rows, strict=True)
        starts = np.r_[0, np.cumsum([len(c) for c in columns])]
        inf = highspy.kHighsInf
        self._model.addRows(
            len(lower),
            np.clip(np.array(lower), -inf, inf),
            np.clip(np.array(upper), -inf, inf),
            int(starts[-1]),
            starts[:-1].astype(np.int32),
            np.concatenate(columns),
            np.concatenate(values),
        )
        self._rows = []
