"""MTP heads of a model file: layers behind the model's own that guess tokens from its hidden states.

llama.cpp loads them where they are asked for, and runs them in a second context of the same model. What it cannot run
would end the process (an assertion), so it is refused here: by what its sources say (src/models/*.cpp), then by a trial
in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from oallama.engine import runtime, skeleton
from oallama.engine.load_settings import Settings
from oallama.engine.model_file import identity
from oallama.engine.outline import metadata, outline
from oallama.errors import OallamaError

# Architectures whose heads have a graph of their own (LLM_GRAPH_TYPE_DECODER_MTP): of one head, of several in a chain.
ONE_HEAD = frozenset(
    (
        *("bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe"),
        *("nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"),
    )
)
CHAINS = frozenset(("hy_v3", "mimo2", "step35"))
# Recurrent and hybrid ones that keep earlier states to take a wrong guess back (llm_arch_supports_rs_rollback).
KEEP_STATES = frozenset(("bailingmoe3", "deepseek4", "nemotron_h_moe", "qwen35", "qwen35moe"))
# Weights of every head that the graphs assert.
ASSERTED = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm")
ROPE_OF_IMAGES = 8  # GGML_ROPE_TYPE_MROPE, which the graph of GLM-4.5's head does not know
_LEAVE_OUT = "leave --heads out"
_TRIAL = "oallama.engine.heads_trial"


def count_heads(path: str | Path) -> int:
    """MTP heads in the file, 1 or more; with several each guess of a step is the next one's.

    Raises:
        OallamaError: in one line, for a file without heads, or with heads that llama.cpp does not run.
    """
    name = Path(path).name
    runtime.quiet()
    llama_cpp = runtime.llama_cpp()
    with outline(path) as model:
        arch = metadata(model, "general.architecture")
        n_heads = int(metadata(model, f"{arch}.nextn_predict_layers") or 0)
        recurrent = llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model)
    if not n_heads:
        raise OallamaError(f"{name} has no MTP heads; {_LEAVE_OUT}, or give a draft model with --draft")
    if arch not in ONE_HEAD | CHAINS:
        raise OallamaError(f"llama.cpp does not run the MTP heads of {name} (architecture {arch!r}); {_LEAVE_OUT}")
    if n_heads > 1 and arch not in CHAINS:
        raise OallamaError(f"{name} has {n_heads} MTP heads; llama.cpp runs one of architecture {arch!r}; {_LEAVE_OUT}")
    if recurrent and arch not in KEEP_STATES:
        raise OallamaError(
            f"{name} keeps recurrent states, which llama.cpp takes back by copying them and computing again after "
            f"wrong guesses; {_LEAVE_OUT}"
        )
    _check_graph(path, arch, n_heads)
    if assertion := _how_it_ends(os.fspath(path), arch in KEEP_STATES, identity(path)):
        raise OallamaError(f"llama.cpp ends the process on the MTP heads of {name} ({assertion}); {_LEAVE_OUT}")
    return n_heads


def keeps_states(path: str | Path) -> bool:
    """Whether earlier recurrent states have to be kept for wrong guesses, one for each token of a guess."""
    with outline(path) as model:
        return metadata(model, "general.architecture") in KEEP_STATES


def _check_graph(path: str | Path, arch: str, n_heads: int) -> None:
    """Converted files may have the model or its heads alone, and the other's number of layers all the same."""
    raw = skeleton.read_graphs(path, replace(Settings(n_ctx=256), heads="loaded"), [1])
    names, name = {t["name"] for t in raw["tensors"]}, Path(path).name
    layers = range(raw["n_layer"], raw["n_layer"] + n_heads)
    kinds = (*ASSERTED, "attn_qkv") if arch == "mimo2" else ASSERTED
    if missing := [wanted for il in layers for kind in kinds if (wanted := f"blk.{il}.{kind}.weight") not in names]:
        raise OallamaError(
            f"{name} has {n_heads} MTP heads by its metadata, but no {missing[0]}; {_LEAVE_OUT}, or convert the model "
            "with them"
        )
    ropes = [node["op_params"][2] for node in raw["graphs"]["1"] if node["op"] == "ROPE"]
    if arch == "glm4moe" and any(mode & ROPE_OF_IMAGES for mode in ropes):
        raise OallamaError(f"llama.cpp does not run the MTP head of {name}, which takes images; {_LEAVE_OUT}")


@lru_cache(maxsize=64)
def _how_it_ends(path: str, keeps: bool, _: object) -> str:
    """The assertion by which a process ends that makes the contexts of the heads; "" where it goes on.

    Errors that llama.cpp reports are left to the caller, who meets them, too.
    """
    command = [sys.executable, "-m", _TRIAL, path, str(int(keeps))]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode >= 0:
        return ""
    found = re.search(r"([\w-]+\.cpp:\d+: .*)", done.stderr)
    return found[1] if found else f"signal {-done.returncode}"
