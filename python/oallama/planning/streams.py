"""Which weights on the host are streamed, and from how many tokens on.

Streaming pays where copying a weight and computing on the accelerator, side by side, beat computing on the host. The
equations are in docs/streaming.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..data.workload import Workload
from .cost import CostModel, Floats
from .predict import Predictor
from .stage import Homes, Ints, Mask

# Shares of the weights worth streaming that are tried: where the link is the bottleneck the host computes the others.
SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
NEVER = np.iinfo(np.int32).max


def stream_pays(costs: CostModel, workload: Workload) -> Mask:
    """Targets that, when they live on the host, prefill the workload's micro-batches faster streamed."""
    if len(costs.names) < 2:
        return np.zeros(len(costs.targets), dtype=bool)
    pays: Mask = _gain(costs, workload) > 0
    return pays


def _gain(costs: CostModel, workload: Workload) -> Floats:
    sizes = [n for n, _ in workload.chunks(costs.context.n_ubatch)]
    gain = np.zeros(len(costs.targets))
    for n in sizes or [costs.context.n_ubatch]:
        gain += costs.stream_gain(n)
    return gain


def break_even(costs: CostModel) -> Ints:
    """Per target, the fewest tokens of a micro-batch from which streaming it pays; NEVER where it does not."""
    result: Ints = np.full(len(costs.targets), NEVER, dtype=np.intp)
    most = costs.context.n_ubatch
    sizes = sorted({*(min(most, 2**i) for i in range(most.bit_length() + 1)), most})
    pays = np.stack([costs.stream_gain(n) > 0 for n in sizes])
    # From the first size on at which, and at all larger ones, it pays.
    always = np.logical_and.accumulate(pays[::-1], axis=0)[::-1]
    for i in range(len(costs.targets)):
        if always[:, i].any():
            result[i] = sizes[int(np.argmax(always[:, i]))]
    return _refined(costs, result, sizes)


def _refined(costs: CostModel, coarse: Ints, sizes: list[int]) -> Ints:
    """Bisects between a size at which streaming pays and the one before, at which it does not."""
    low = np.array([max([s for s in sizes if s < n], default=0) for n in coarse], dtype=np.intp)
    high = coarse.copy()
    while ((high < NEVER) & (high - low > 1)).any():
        middle = np.where(high < NEVER, (low + high) // 2, NEVER)
        for n in {int(n) for n, h, lo in zip(middle, high, low, strict=True) if h < NEVER and h - lo > 1}:
            pays = costs.stream_gain(n) > 0
            at = (middle == n) & (high - low > 1)
            high = np.where(at & pays, n, high)
            low = np.where(at & ~pays, n, low)
    return high


def with_streams(predictor: Predictor, homes: Homes, mask: Mask, workload: Workload) -> Homes:
    """The homes with those of `mask` that live on the host streamed, as many of them as the prediction likes best.

    Each from its own break-even; `not_too_early` looks at the whole pass.
    """
    costs = predictor.costs
    candidates = np.flatnonzero(mask & (homes.targets == 0))
    if not len(candidates):
        return homes
    order = candidates[np.lexsort((_spread(len(candidates)), -_gain_per_copy(costs, workload)[candidates].round(3)))]
    own = break_even(costs)
    chunks = workload.chunks(costs.context.n_ubatch)
    # What pays for the workload is streamed in its micro-batches, whatever rounding made of its break-even.
    smallest = min([n for n, _ in chunks] or [costs.context.n_ubatch])
    found = [homes]
    for share in SHARES:
        chosen = order[: max(1, round(share * len(order)))]
        stream = np.zeros(len(costs.targets), dtype=np.intp)
        stream[chosen] = np.minimum(own[chosen], smallest)
        found.append(replace(homes, stream=stream))

    def prefill_s(candidate: Homes) -> float:
        last = len(chunks) - 1
        return sum(_pass(predictor, candidate, n, d, i == last) for i, (n, d) in enumerate(chunks))

    return min(found, key=prefill_s)


def _gain_per_copy(costs: CostModel, workload: Workload) -> Floats:
    """Seconds saved per second of the link."""
    sizes = [n for n, _ in workload.chunks(costs.context.n_ubatch)] or [costs.context.n_ubatch]
    gain: Floats = _gain(costs, workload) / (len(sizes) * costs.stream_copies())
    return gain


def _spread(n: int) -> Ints:
    """An order of 0..n-1 whose beginnings are spread evenly: the bits of each number reversed."""
    bits = max(1, (n - 1).bit_length())
    return np.array([int(f"{i:0{bits}b}"[::-1], 2) for i in range(n)], dtype=np.intp)


def for_longer_prompts(predictor: Predictor, homes: Homes, workload: Workload) -> Homes:
    """The homes with more weights on the host streamed in micro-batches that are larger than the workload's.

    What the host computes fast enough for the workload it may compute too slowly for a longer prompt. So for each power
    of two of tokens up to a full micro-batch, as many of the others are streamed from there on as its pass likes best.
    The workload's own seconds stay: so do realisations.
    """
    costs = predictor.costs
    n_ubatch = costs.context.n_ubatch
    largest = max((n for n, _ in workload.chunks(n_ubatch)), default=0)
    found = replace(homes, realisation=costs.realised(homes))
    for n in sorted({*(2**i for i in range(n_ubatch.bit_length())), n_ubatch}):
        if n <= largest:
            continue
        stream = np.zeros(len(costs.targets), dtype=np.intp) if found.stream is None else found.stream
        gain = costs.stream_gain(n)
        left = np.flatnonzero((gain > 0) & (homes.targets == 0) & (stream == 0) & ~homes.upload)
        if not len(left):
            continue
        per_copy = (gain / costs.stream_copies())[left].round(3)
        order = left[np.lexsort((_spread(len(left)), -per_copy))]
        tried = [found]
        for share in SHARES:
            more = stream.copy()
            more[order[: max(1, round(share * len(order)))]] = n
            tried.append(replace(found, stream=more))
        found = min(tried, key=lambda candidate: _pass(predictor, candidate, n, n))
    return homes if found.stream is homes.stream else found


def not_too_early(predictor: Predictor, homes: Homes, workload: Workload) -> Homes:
    """No weight is streamed below the size from which the whole pass gains; at the workload's it is known to."""
    if homes.stream is None:
        return homes
    n_ubatch = predictor.costs.context.n_ubatch
    known = min([n for n, _ in workload.chunks(n_ubatch)] or [n_ubatch])
    without = replace(homes, stream=None)
    # What is saved grows with the tokens: bisect over powers of two.
    sizes = [*(2**i for i in range(known.bit_length()) if 2**i < known), known]
    low, high = -1, len(sizes) - 1
    while high - low > 1:
        middle = (low + high) // 2
        n = sizes[middle]
        gains = _pass(predictor, homes, n, n) <= _pass(predictor, without, n, n)
        low, high = (low, middle) if gains else (middle, high)
    earliest = sizes[high]
    stream = np.where(homes.stream > 0, np.maximum(homes.stream, earliest), 0)
    return replace(homes, stream=stream)


def _pass(predictor: Predictor, homes: Homes, n_tokens: int, depth: int, logits: bool = True) -> float:
    return float(predictor.stage(homes, n_tokens, depth, logits).total[0])
