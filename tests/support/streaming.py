"""Tables with streamed weights, and jobs that compare them with resident ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from oallama.bench.maps import backend_map
from oallama.data.operators import TensorInfo
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from support import logits

PROMPTS = (1, 31, 32, 33, 160)
SEED = 11


def table(path: Path, device: str, streamed: Callable[[str], int], slots: int = 3, caches: bool = False) -> str:
    """All on `device`, but for weights that are streamed from `streamed(name)` tokens on (0: resident).

    caches: KV caches are on the host and streamed, too.
    """
    graph = autoplan.read_graph(path, Settings(n_ctx=64))
    targets = {op.weight for op in graph.targets(1)}

    def place(tensor: TensorInfo) -> str:
        n_tokens = streamed(tensor.name) if tensor.name in targets else 0
        return f"CPU stream {n_tokens}" if n_tokens else f"{device} resident"

    return backend_map(graph, "CPU" if caches else device, place, [f"slots {slots}", *["caches stream"] * caches])


def some(name: str) -> int:
    """Two thirds of the weights, of every size."""
    return int(sum(name.encode()) % 3 > 0)


def tokens(n: int) -> list[int]:
    return logits.tokens(n, SEED)


def jobs(
    path: Path, device: str, folder: Path, slots: int, prompts: tuple[int, ...], **job: Any
) -> list[dict[str, Any]]:
    """For every prompt: all resident, then all streamed, some of them, and all with the KV caches."""
    result = []
    tables = [
        table(path, device, lambda name: 0),
        table(path, device, lambda name: 1, slots),
        table(path, device, some, slots),
        table(path, device, lambda name: 1, slots, caches=True),
    ]
    for i, text in enumerate(tables):
        file = folder / f"{path.stem}-{i}.map"
        file.write_text(text)
        result += [
            {"model": str(path), "table": str(file), "devices": [device], "tokens": tokens(n), **job} for n in prompts
        ]
    return result


def assert_same(found: list[np.ndarray], prompts: tuple[int, ...]) -> None:
    resident = found[: len(prompts)]
    for i, streamed in enumerate(found[len(prompts) :]):
        n = prompts[i % len(prompts)]
        assert np.array_equal(resident[i % len(prompts)], streamed), f"{n} tokens, table {i // len(prompts) + 1}"
