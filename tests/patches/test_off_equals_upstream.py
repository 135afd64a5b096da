"""With no plan and no switch set, the patched engine gives the logits of the unpatched build, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.logits import AMX, ARCHITECTURES, compute_logits


@pytest.mark.parametrize("file_type", ["F16", "Q8_0", "Q4_0", "Q4_K_M"])
def test_logits_are_bit_identical(
    file_type: str, tiny: Callable[..., Path], lib: Path, baseline_lib: Path, tmp_path: Path
) -> None:
    def jobs() -> list[dict[str, object]]:
        return [
            {"model": str(tiny(arch, file_type)), "flash_attn": flash, "n_gpu_layers": 0}
            for arch in ARCHITECTURES
            for flash in (0, 1)
        ]

    ours = compute_logits(lib, jobs(), tmp_path, AMX)
    (tmp_path / "baseline").mkdir()
    theirs = compute_logits(baseline_lib, jobs(), tmp_path / "baseline")
    for job, a, b in zip(jobs(), ours, theirs, strict=True):
        assert np.isfinite(a).all(), job
        assert np.array_equal(a, b), f"{job}: first difference at {np.argwhere(a != b)[0]}"
    # The comparison can fail: another architecture's logits are not these.
    assert not np.array_equal(ours[0][:, :1000], ours[4][:, :1000])
