"""Computes logits with whatever libllama LLAMA_CPP_LIB_PATH names, so that two builds can be compared bit for bit.

Reads one JSON job per line from stdin and writes the logits of every token as a float32 .npy. Imports llama_cpp and
numpy only: it must run on the unpatched build, too. Job keys: model, out, tokens, n_decode, and optionally table,
devices, rpc, n_ctx, n_gpu_layers, n_ubatch, flash_attn, type_k, type_v, use_extra_bufts, n_threads, abort_at,
split_mode ("tensor"), tensor_split.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

LIB = Path(os.environ["LLAMA_CPP_LIB_PATH"])
BASE = ctypes.CDLL(str(LIB / "libggml-base.so"))
GGML = ctypes.CDLL(str(LIB / "libggml.so"))
GGML.ggml_backend_dev_by_name.restype = ctypes.c_void_p
GGML.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
GGML.ggml_backend_register.argtypes = [ctypes.c_void_p]
GGML.ggml_backend_reg_count.restype = ctypes.c_size_t
if GGML.ggml_backend_reg_count() == 0:  # unpatched, with backends as modules: it does not look beside its libraries
    GGML.ggml_backend_load_all_from_path(str(LIB).encode())


@llama_cpp.llama_log_callback
def _only_errors(level: int, text: bytes, _data: Any) -> None:
    if level == 3:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode("utf-8", "replace"))


def add_rpc(endpoints: list[str]) -> None:
    rpc = ctypes.CDLL(str(LIB / "libggml-rpc.so"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    for endpoint in endpoints:
        GGML.ggml_backend_register(rpc.ggml_backend_rpc_add_server(endpoint.encode()))


def logits(job: dict[str, Any]) -> np.ndarray:
    os.environ["OALLAMA_BACKEND_MAP"] = job.get("table", "")
    model_params, params = llama_cpp.llama_model_default_params(), llama_cpp.llama_context_default_params()
    addresses = [GGML.ggml_backend_dev_by_name(name.encode()) for name in job.get("devices", [])]
    assert all(addresses), f"unknown device among {job.get('devices')}"
    array = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, None)
    model_params.devices = ctypes.addressof(array)
    model_params.n_gpu_layers = job.get("n_gpu_layers", -1)
    model_params.use_extra_bufts = job.get("use_extra_bufts", True)
    shares = [*job.get("tensor_split", [1] * len(addresses)), *[0] * llama_cpp.llama_max_devices()]
    split = (ctypes.c_float * llama_cpp.llama_max_devices())(*shares[: llama_cpp.llama_max_devices()])
    if job.get("split_mode") == "tensor":
        model_params.split_mode, model_params.tensor_split = llama_cpp.LLAMA_SPLIT_MODE_TENSOR, split
    params.n_ctx = job.get("n_ctx", 512)
    params.n_batch = params.n_ubatch = job.get("n_ubatch", 64)
    params.n_threads = params.n_threads_batch = job.get("n_threads", 2)
    params.flash_attn_type = job.get("flash_attn", -1)
    params.type_k = job.get("type_k", params.type_k)
    params.type_v = job.get("type_v", params.type_v)

    model = llama_cpp.llama_model_load_from_file(job["model"].encode(), model_params)
    if not model:
        raise SystemExit(f"cannot load {job['model']}")
    context = llama_cpp.llama_init_from_model(model, params)
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    tokens, rows = list(job["tokens"]), []
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
    if job.get("abort_at"):
        abort_once(context, batch, tokens[: params.n_batch], job["abort_at"])
    for at in range(0, len(tokens), params.n_batch):
        rows += decode(context, batch, tokens[at : at + params.n_batch], at, n_vocab)
    for step in range(job.get("n_decode", 0)):
        # Feed fixed tokens, not the argmax: both sides must see the same input.
        rows += decode(context, batch, [tokens[step % len(tokens)]], len(tokens) + step, n_vocab)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return np.stack(rows)


def abort_once(context: Any, batch: Any, tokens: list[int], at: int) -> None:
    """Stop a computation when the host has been asked `at` times whether to go on, and forget what it did."""
    asked = [0]

    @llama_cpp.ggml_abort_callback
    def stop(_data: Any) -> bool:
        asked[0] += 1
        return asked[0] >= at

    llama_cpp.llama_set_abort_callback(context, stop, None)
    fill(batch, tokens, 0)
    status = llama_cpp.llama_decode(context, batch)
    if status != 2:
        raise SystemExit(f"llama_decode returned {status}, 2 was expected (asked {asked[0]} times)")
    llama_cpp.llama_set_abort_callback(context, llama_cpp.ggml_abort_callback(), None)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)


def decode(context: Any, batch: Any, tokens: list[int], position: int, n_vocab: int) -> list[np.ndarray]:
    fill(batch, tokens, position)
    status = llama_cpp.llama_decode(context, batch)
    if status != 0:
        raise SystemExit(f"llama_decode returned {status}")
    return [
        np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), shape=(n_vocab,)).copy()
        for i in range(len(tokens))
    ]


def fill(batch: Any, tokens: list[int], position: int) -> None:
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i] = token, position + i
        batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1


def main(jobs: Iterable[str] = sys.stdin) -> None:
    llama_cpp.llama_log_set(_only_errors, ctypes.c_void_p(0))
    added: set[str] = set()
    for line in jobs:
        job = json.loads(line)
        new = [e for e in job.get("rpc", []) if e not in added]
        add_rpc(new)
        added.update(new)
        np.save(job["out"], logits(job))
        print(job["out"], flush=True)


if __name__ == "__main__":
    main()
