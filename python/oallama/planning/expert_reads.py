"""What a batch of tokens reads of a mixture's weights: distinct experts, and the share of the seconds that takes.

An operator on experts reads each expert that one of the tokens chose, and computes a row for each choice:

    seconds = distinct experts * seconds to read one + choices * seconds to compute one

Profiles measure it with random choices. A text chooses fewer distinct experts. Both parts follow from the seconds of
one token, which reads as many experts as it computes rows, and those of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..data.curves import Estimate
from ..data.expert_hits import uniform_union, union_widths
from ..data.operators import TensorInfo
from ..data.profile import Profile

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Unions:
    """Distinct experts that tokens beside each other use, means of the layers.

    widths: numbers of tokens: 1, 2, 4, .. experts: [widths, experts + 1]: of the k most used ones, k = 0 and up.
    """

    widths: tuple[int, ...]
    experts: Floats

    @classmethod
    def of_ids(cls, ids: NDArray[np.uint16], order: NDArray[np.intp]) -> Unions:
        """Of a trace's choices [layers, tokens, used]; order: [layers, experts], the most used first."""
        n_layers, n_experts = order.shape
        total: list[Floats] = []
        for layer, ranked in zip(ids, order, strict=True):
            used = np.zeros((len(layer), n_experts + 1), dtype=bool)
            np.put_along_axis(used, np.minimum(layer, n_experts).astype(np.intp), True, axis=1)
            used = used[:, ranked]  # without the column of no expert
            for place, _ in enumerate(union_widths(len(layer))):
                if place == len(total):
                    total.append(np.zeros(n_experts))
                total[place] += used.mean(axis=0) / n_layers
                whole = len(used) // 2 * 2
                used = used[0:whole:2] | used[1:whole:2]
        return cls(union_widths(ids.shape[1]), np.insert(np.cumsum(total, axis=1), 0, 0.0, axis=1))

    def at(self, n_tokens: int) -> Floats:
        """[experts + 1] of a row; between the widths in proportion to the logarithm, the widest beyond."""
        place = float(np.interp(np.log2(n_tokens), np.log2(self.widths), np.arange(len(self.widths))))
        low = int(place)
        high = min(low + 1, len(self.widths) - 1)
        found: Floats = self.experts[low] + (place - low) * (self.experts[high] - self.experts[low])
        return found


def reading(one: float, many: float, n_tokens: int, n_experts: int, n_used: int) -> float:
    """The share of reading in `many`, an operator's seconds of n tokens of random choices; `one`: of one token."""
    rows, union = n_tokens * n_used, uniform_union(n_experts, n_used, n_tokens)
    each = one / n_used
    if rows <= union or each <= 0:
        return 1.0
    compute = float(np.clip((many - union * each) / (rows - union) / each, 0.0, 1.0))
    return union * (1 - compute) / (union * (1 - compute) + rows * compute)


class ExpertTimes:
    """Seconds of a model's matrices by a profile, of those on experts by what a trace's batches read.

    unions: None without a trace: choices are random.
    """

    def __init__(self, profile: Profile, unions: Unions | None) -> None:
        self._profile, self._unions = profile, unions

    def op_time(
        self, device: str, op: str, tensor: TensorInfo, n_tokens: int, n_used: int, realisation: str = ""
    ) -> Estimate:
        """As `Profile.op_time`."""
        found = self._profile.op_time(device, op, tensor.type, tensor.ne, n_tokens, n_used, realisation)
        if self._unions is None or op != "MUL_MAT_ID":
            return found
        share = self._reading(found.seconds, device, op, tensor, n_tokens, n_used, realisation)
        return found._replace(seconds=found.seconds * (1 - share * (1 - self._of_random(tensor, n_tokens, n_used))))

    def reading(
        self, device: str, op: str, tensor: TensorInfo, n_tokens: int, n_used: int, realisation: str = ""
    ) -> float:
        """The share of these seconds that reads experts."""
        found = self._profile.op_time(device, op, tensor.type, tensor.ne, n_tokens, n_used, realisation)
        share = self._reading(found.seconds, device, op, tensor, n_tokens, n_used, realisation)
        less = share * self._of_random(tensor, n_tokens, n_used)
        return less / (1 - share + less)

    def uploaded_bytes(self, op: str, tensor: TensorInfo, n_tokens: int, n_used: int) -> float:
        """Bytes of a weight that llama.cpp uploads for a batch: of experts those that it chose."""
        if op != "MUL_MAT_ID":
            return tensor.nbytes
        union = self._of_random(tensor, n_tokens, n_used) * uniform_union(tensor.ne[2], n_used, n_tokens)
        return tensor.nbytes * union / tensor.ne[2]

    def _reading(self, many: float, device: str, op: str, tensor: TensorInfo, n: int, n_used: int, as_: str) -> float:
        one = self._profile.op_time(device, op, tensor.type, tensor.ne, 1, n_used, as_).seconds
        return reading(one, many, n, tensor.ne[2], n_used)

    def _of_random(self, tensor: TensorInfo, n_tokens: int, n_used: int) -> float:
        """Distinct experts of a batch, as a share of those that random choices would use."""
        if self._unions is None:
            return 1.0
        return float(self._unions.at(n_tokens)[-1]) / uniform_union(tensor.ne[2], n_used, n_tokens)
