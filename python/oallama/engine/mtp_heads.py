"""MTP heads of a model file: layers behind the model's own that guess tokens from its hidden states.

llama.cpp loads them where they are asked for, and runs them in a second context of the same model. What it cannot run
would end the process (an assertion), so it is refused here, by what its sources say (src/models/*.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oallama.engine import runtime, skeleton
from oallama.engine.load_settings import Settings
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
_LEAVE_OUT = "leave --heads out"


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
    _check_tensors(path, n_heads, ASSERTED + (("attn_qkv",) if arch == "mimo2" else ()))
    return n_heads


def keeps_states(path: str | Path) -> bool:
    """Whether earlier recurrent states have to be kept for wrong guesses, one for each token of a guess."""
    with outline(path) as model:
        return metadata(model, "general.architecture") in KEEP_STATES


def _check_tensors(path: str | Path, n_heads: int, kinds: Sequence[str]) -> None:
    """Converted files may have the model or its heads alone, and the other's number of layers all the same."""
    raw = skeleton.read_graphs(path, replace(Settings(n_ctx=256), heads="loaded"), [1])
    names = {t["name"] for t in raw["tensors"]}
    layers = range(raw["n_layer"], raw["n_layer"] + n_heads)
    if missing := [name for il in layers for kind in kinds if (name := f"blk.{il}.{kind}.weight") not in names]:
        raise OallamaError(
            f"{Path(path).name} has {n_heads} MTP heads by its metadata, but no {missing[0]}; {_LEAVE_OUT}, or convert "
            "the model with them"
        )
