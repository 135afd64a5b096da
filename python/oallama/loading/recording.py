"""Keeps what a loaded model's runs took, for later predictions."""

from __future__ import annotations

from oallama.data.plan import PlacementPlan
from oallama.engine import runtime
from oallama.loading.learning import keep_runs, run_of
from oallama.loading.run_times import times_of
from oallama.profiling.other_work import OtherWork


class RunRecorder:
    """Made when a planned model was loaded, asked before it is closed. Counts other programs' work in between."""

    def __init__(self, plan: PlacementPlan, n_threads: int) -> None:
        self._plan, self._n_threads = plan, n_threads
        self._others = OtherWork()
        self._others.__enter__()

    def record(self, context: int) -> None:
        """Keep what a live context computed since its load, if that was enough to tell something."""
        times = times_of(context, self._plan)
        if times is None or not self._plan.predicted.terms:
            return
        llama_cpp = runtime.llama_cpp()
        used = llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(context), 0) + 1
        depth = max(0, used - times.n_generate // 2)
        keep_runs(self._n_threads, [run_of(self._plan, times, depth, self._others.so_far())])
