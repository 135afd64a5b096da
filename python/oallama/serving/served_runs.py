"""What a served model's requests took, for later predictions: llama-server's own counters, read while it runs."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from oallama.base.printing import say_once
from oallama.data.plan import HOST, PlacementPlan
from oallama.data.predicted import predicted_times
from oallama.loading.expert_hits import fewer_hits
from oallama.loading.learning import batch_of, keep_runs, run_of
from oallama.loading.run_times import RunTimes
from oallama.profiling.other_work import OtherWork

_EVERY_S = 10.0
_OTHER_BATCH = 0.1  # sequences at a time, on average, may differ by this share
_COUNTER = re.compile(r"^llamacpp:(\w+) ([-+.\deE]+)$", re.MULTILINE)
_OF_DEVICE = re.compile(r'^llamacpp:(\w+)\{device="[^"]*"\} (\d+)$', re.MULTILINE)


@contextmanager
def recorded(plan: PlacementPlan | None, address: str, n_threads: int) -> Iterator[None]:
    """Within the block a server of this plan runs at the address; afterwards its means are kept as one run.

    The counters are read every 10 s. Where a mixture's experts hit clearly less than the plan expects, one line says
    so. Nothing is kept without a plan, of a server whose counters cannot be read, and where another number of sequences
    generated beside each other than the plan was made for.
    """
    if plan is None:
        yield
        return
    reader = _Reader(f"{address}/metrics", plan)
    with OtherWork() as others:
        reader.start()
        try:
            yield
        finally:
            reader.stop()
    times = times_of(reader.counters, plan)
    depth = round(reader.counters.get("n_tokens_max", 0.0) / 2)
    keep_runs(n_threads, [run_of(plan, times, depth, others.cpus, batch_of(plan))] if times else [])


def times_of(counters: Mapping[str, float], plan: PlacementPlan) -> RunTimes | None:
    """The counters beside the plan's predictions, at half of the longest sequence.

    None before any request, and where the mean batch is not the plan's. Seconds of generation are summed over
    sequences, and each waits while another one's prompt is computed: that is taken off. In a larger batch the steps of
    prompts have tokens of others in them, so prompts have no time of their own.
    """
    n_prompt, n_generate = (
        round(counters.get(name, 0.0)) for name in ("prompt_tokens_total", "tokens_predicted_total")
    )
    if not n_generate:
        return None
    prefill_s, decode_s = (counters.get(f"{name}_seconds_total", 0.0) for name in ("prompt", "tokens_predicted"))
    batch = batch_of(plan)
    waited_s = (batch - 1) * prefill_s
    if abs(counters.get("n_busy_slots_per_decode", 1.0) / batch - 1) > _OTHER_BATCH or waited_s > decode_s / 2:
        return None
    decode_s -= waited_s
    longest = round(counters.get("n_tokens_max", 0.0))
    _, tpot = predicted_times(plan, 0, longest)
    # Prompts of many lengths add up to one number, which no prediction is made for.
    of_prompts = prefill_s if batch == 1 else None
    return RunTimes(n_prompt, of_prompts or None, None, n_generate, decode_s / n_generate or None, tpot)


def counters_of(text: str) -> dict[str, float]:
    """llama-server's counters by name; those of single devices are added up."""
    counters = {name: float(value) for name, value in _COUNTER.findall(text)}
    for name, value in _OF_DEVICE.findall(text):
        counters[name] = counters.get(name, 0.0) + float(value)
    return counters


def hits_remark(counters: Mapping[str, float], plan: PlacementPlan) -> str | None:
    """What to do where clearly fewer of a mixture's uses hit than the plan expects, else None."""
    expected = plan.predicted.experts
    divided = [*expected.divided()] if expected else []
    if not expected or not divided:
        return None
    uses, hits = (round(counters.get(f"expert_{what}_total", 0.0)) for what in ("uses", "hits"))
    device = next((name for name in plan.devices if name != HOST), HOST)
    return fewer_hits(uses, hits, expected, divided, device)


class _Reader(threading.Thread):
    """Reads the counters until it is stopped; `counters` are the last ones that came."""

    def __init__(self, url: str, plan: PlacementPlan) -> None:
        super().__init__(daemon=True)
        self._url, self._plan, self._ended = url, plan, threading.Event()
        self._said = False
        self.counters: dict[str, float] = {}

    def run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._read()

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _read(self) -> None:
        try:
            with urllib.request.urlopen(self._url, timeout=2.0) as answer:
                text = answer.read().decode()
        except (OSError, ValueError):  # not up yet, ended, or it wants a key
            return
        self.counters = counters_of(text)
        if not self._said and (remark := hits_remark(self.counters, self._plan)):
            self._said = True
            say_once(remark)
