"""Upstream's tiny mixtures with more experts than their two, so that routers have something to choose."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from oallama.modelmaker.gguf_header import read_metadata
from support.mtp_model import write_model
from support.mtp_recipes import Tensor

# Weights, biases and scales with an expert in the last dimension.
_OF_EXPERTS = re.compile(r"blk\.\d+\.(ffn_(up|gate|down|gate_up)_(exps|chexps)|ffn_gate_inp|exp_probs_b)(\.|$)")


def with_experts(
    source: Path, path: Path, n_experts: int = 16, n_used: int = 4, groups: tuple[int, int] = (1, 1)
) -> Path:
    """The mixture with other random experts. groups: how many there are, and how many of them a token may use."""
    metadata = read_metadata(source)
    arch = metadata["general.architecture"].decode()
    metadata = {k: v for k, v in metadata.items() if not (isinstance(v, int) and v < 0)}  # none, as without the key
    metadata = {k: _plain(v) if isinstance(v, np.ndarray) else v for k, v in metadata.items()}
    metadata |= {f"{arch}.expert_count": n_experts, f"{arch}.expert_used_count": n_used}
    if groups[0] > 1:
        metadata |= {f"{arch}.expert_group_count": groups[0], f"{arch}.expert_group_used_count": groups[1]}
    rng = np.random.default_rng(1)
    tensors: list[Tensor] = []
    for t in GGUFReader(source).tensors:
        ne, data = tuple(int(n) for n in t.shape), t.data
        if _OF_EXPERTS.match(t.name):
            ne = (*ne[:-1], n_experts)
            data = rng.normal(0, 0.1, int(np.prod(ne))).astype(t.data.dtype)
        tensors.append((t.name, ne, t.tensor_type, data.tobytes()))
    write_model(path, metadata, tensors)
    return path


def _plain(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32 if values.dtype.kind == "f" else np.int32)
