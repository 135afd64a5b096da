"""Tiny models of architectures that oallama does not make: what users bring that no test of ours was written for."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

from oallama.modelmaker.gguf_header import pack_header, padded
from oallama.modelmaker.vocab import load_vocab

N_VOCAB, N_EMBD, N_FF, N_HEAD, HEAD_DIM = 4096, 256, 512, 4, 64
F16, F32 = GGMLQuantizationType.F16, GGMLQuantizationType.F32


def gemma3(path: Path) -> Path:
    """One head of keys, as in the small published ones, norms after attention and feed-forward, sliding windows."""
    head_dim = 128
    metadata = _metadata("gemma3", 2, head_dim)
    metadata |= {"gemma3.attention.sliding_window": 128, "gemma3.attention.head_count_kv": 1}
    tensors = {"token_embd.weight": (N_EMBD, N_VOCAB), "output_norm.weight": (N_EMBD,)}
    for il in range(2):
        layer = _attention(head_dim, 1) | _feed_forward(N_FF)
        layer |= {"post_attention_norm": (N_EMBD,), "post_ffw_norm": (N_EMBD,)}
        tensors |= {f"blk.{il}.{name}.weight": ne for name, ne in layer.items()}
    return _write(path, metadata, tensors)


def minimax_m3(path: Path) -> Path:
    """A dense layer and one with experts, whose fused attention is sparse and reads two matrices more."""
    arch, n_expert, n_ff_expert = "minimax-m3", 4, 128
    metadata = _metadata(arch, 2, HEAD_DIM) | {
        f"{arch}.leading_dense_block_count": 1,
        f"{arch}.expert_count": n_expert,
        f"{arch}.expert_used_count": 2,
        f"{arch}.expert_shared_count": 1,
        f"{arch}.expert_feed_forward_length": n_ff_expert,
        f"{arch}.expert_gating_func": 2,
        f"{arch}.attention.indexer.head_count": N_HEAD // 2,
        f"{arch}.attention.indexer.key_length": HEAD_DIM,
        f"{arch}.attention.indexer.top_k": 2,
        f"{arch}.attention.indexer.block_size": 64,
        f"{arch}.attention.indexer.local_blocks": 1,
    }
    layers = (
        _attention(HEAD_DIM) | _feed_forward(N_FF),
        _attention(HEAD_DIM)
        | {
            "ffn_norm": (N_EMBD,),
            "ffn_gate_inp": (N_EMBD, n_expert),
            "ffn_gate_exps": (N_EMBD, n_ff_expert, n_expert),
            "ffn_up_exps": (N_EMBD, n_ff_expert, n_expert),
            "ffn_down_exps": (n_ff_expert, N_EMBD, n_expert),
            "ffn_gate_shexp": (N_EMBD, n_ff_expert),
            "ffn_up_shexp": (N_EMBD, n_ff_expert),
            "ffn_down_shexp": (n_ff_expert, N_EMBD),
            "indexer.q_proj": (N_EMBD, N_HEAD // 2 * HEAD_DIM),
            "indexer.k_proj": (N_EMBD, HEAD_DIM),
            "indexer.q_norm": (HEAD_DIM,),
            "indexer.k_norm": (HEAD_DIM,),
        },
    )
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_EMBD, N_VOCAB), "output_norm.weight": (N_EMBD,)}
    tensors |= {"output.weight": (N_EMBD, N_VOCAB), "blk.1.exp_probs_b.bias": (n_expert,)}
    for il, layer in enumerate(layers):
        tensors |= {f"blk.{il}.{name}.weight": ne for name, ne in layer.items()}
    return _write(path, metadata, tensors)


def with_long_table(model: Path, path: Path, table: str, n_rows: int) -> Path:
    """A copy of a model whose table has so many rows, all but the first ones a hole in the file."""
    reader = GGUFReader(model)
    tensors = sorted(reader.tensors, key=lambda tensor: tensor.name == table)
    directory, offset = b"", 0
    for tensor in tensors:
        name, ne = tensor.name.encode(), [int(n) for n in tensor.shape]
        nbytes = tensor.n_bytes
        if tensor.name == table:
            ne[1], nbytes = n_rows, tensor.n_bytes // ne[1] * n_rows
        directory += struct.pack(
            f"<Q{len(name)}sI{len(ne)}QIQ", len(name), name, len(ne), *ne, tensor.tensor_type, offset
        )
        offset += padded(nbytes)
    metadata = model.read_bytes()[: min(tensor.field.offset for tensor in tensors)]
    header = metadata + directory
    with open(path, "wb") as file:
        file.write(header + bytes(padded(len(header)) - len(header)))
        for tensor in tensors:
            file.write(tensor.data.tobytes())
            file.write(bytes(padded(tensor.n_bytes) - tensor.n_bytes))
        file.truncate(padded(len(header)) + offset)
    return path


def _metadata(arch: str, n_layer: int, head_dim: int) -> dict[str, Any]:
    own = {
        "block_count": n_layer,
        "context_length": 4096,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "vocab_size": N_VOCAB,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD // 2,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": head_dim,
    }
    return {"general.architecture": arch, "general.name": f"tiny {arch}"} | {f"{arch}.{k}": v for k, v in own.items()}


def _attention(head_dim: int, n_head_kv: int = N_HEAD // 2) -> dict[str, tuple[int, ...]]:
    n_q, n_kv = N_HEAD * head_dim, n_head_kv * head_dim
    return {
        "attn_norm": (N_EMBD,),
        "attn_q": (N_EMBD, n_q),
        "attn_k": (N_EMBD, n_kv),
        "attn_v": (N_EMBD, n_kv),
        "attn_q_norm": (head_dim,),
        "attn_k_norm": (head_dim,),
        "attn_output": (n_q, N_EMBD),
    }


def _feed_forward(n_ff: int) -> dict[str, tuple[int, ...]]:
    return {"ffn_norm": (N_EMBD,), "ffn_gate": (N_EMBD, n_ff), "ffn_up": (N_EMBD, n_ff), "ffn_down": (n_ff, N_EMBD)}


def _write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    random = np.random.default_rng(0)
    rows, data = [], []
    for name, ne in tensors.items():
        small = len(ne) == 1 or name.endswith("ffn_gate_inp.weight")
        values = random.standard_normal(math.prod(ne), dtype=np.float32) / math.sqrt(ne[0])
        block = (np.ones_like(values) if len(ne) == 1 else values).astype(np.float32 if small else np.float16).tobytes()
        rows.append((name, ne, F32 if small else F16, len(block)))
        data.append(block + bytes(padded(len(block)) - len(block)))
    header = pack_header(metadata | load_vocab("llama", N_VOCAB).metadata(), rows)
    path.write_bytes(header + b"".join(data))
    return path
