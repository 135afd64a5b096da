"""Random placements of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from oallama.engine.load_settings import Settings
from oallama.loading import autoplan

N_PLACEMENTS = 3


def random_table(path: Path, devices: list[str], seed: int) -> str:
    """Every tensor on a random device, every layer's KV cache too; host tensors in both modes."""
    rng = np.random.default_rng(seed)
    graph = autoplan.read_graph(path, Settings(n_ctx=64))
    pick = [*devices, "CPU"]
    lines = ["# oallama backend map v1"]
    lines += [f"layer {il} {rng.choice(pick)}" for il in range(graph.n_layer_all + 1)]
    targets = {op.weight for op in graph.targets(1)}
    for tensor in graph.tensors:
        # get_rows of the embedding and small tensors follow llama.cpp's own rule for them: the CPU takes any type.
        device = str(rng.choice(pick)) if tensor.name in targets else "CPU"
        mode = "resident" if device != "CPU" else str(rng.choice(["host", "upload"]))
        lines.append(f"tensor {tensor.name} {device} {mode}")
    return "\n".join(lines) + "\n"


def placed_jobs(path: Path, devices: list[str], rpc: list[str], folder: Path, **job: Any) -> list[dict[str, Any]]:
    jobs = []
    for seed in range(N_PLACEMENTS):
        table = folder / f"{path.stem}-{seed}.map"
        table.write_text(random_table(path, devices, seed))
        jobs.append({"model": str(path), "table": str(table), "devices": devices, "rpc": rpc, **job})
    return jobs
