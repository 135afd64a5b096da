"""Whether llama-server can let one model file guess for another: both are read without weights, vocabularies compared.

The rules are those of `common_speculative_are_compatible` (common/speculative.cpp), where a failure is a line in a log
and a server without its draft.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oallama.engine import runtime
from oallama.engine.outline import metadata, outline
from oallama.errors import OallamaError

_SIZES_DIFFER = 128  # SPEC_VOCAB_MAX_SIZE_DIFFERENCE
_FIRST_TOKEN = 5  # SPEC_VOCAB_CHECK_START_TOKEN_ID
# Files that hold only a head; it reads the hidden states of its target.
HEADS = ("eagle3", "dflash", "gemma4-assistant")


def check_pair(target: str | Path, draft: str | Path) -> None:
    """Raises OallamaError, in one line, unless the draft is a model of its own that can guess for the target."""
    runtime.quiet()
    with outline(target) as model, outline(draft) as guesser:
        _refuse_states(target, model)
        _refuse_states(draft, guesser)
        _refuse_heads(Path(target), Path(draft), guesser)
        if difference := _vocabularies_differ(model, guesser):
            raise OallamaError(
                f"{Path(draft).name} cannot guess for {Path(target).name}: {difference}; take a draft with the same "
                "vocabulary, of the same family of models"
            )


def _refuse_states(path: str | Path, model: Any) -> None:
    llama_cpp = runtime.llama_cpp()
    if llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model):
        raise OallamaError(
            f"{Path(path).name} keeps recurrent states, which llama.cpp takes back by copying them and computing again "
            "after wrong guesses; leave --draft out"
        )


def _refuse_heads(target: Path, draft: Path, guesser: Any) -> None:
    arch = metadata(guesser, "general.architecture")
    n_heads, n_layer = (int(metadata(guesser, f"{arch}.{key}") or 0) for key in ("nextn_predict_layers", "block_count"))
    if n_heads and draft.resolve() == target.resolve():
        raise OallamaError(f"{draft.name} is the model itself; take --heads in place of --draft for its MTP heads")
    if arch in HEADS or n_heads >= n_layer > 0:
        raise OallamaError(
            f"{draft.name} is a head on the hidden states of its target (MTP, EAGLE-3 or the like) in a file of its "
            "own, which oallama does not plan (docs/drafts.md); give a draft model"
        )


def _vocabularies_differ(model: Any, guesser: Any) -> str | None:
    """How, if they do."""
    llama_cpp = runtime.llama_cpp()
    ours, theirs = map(llama_cpp.llama_model_get_vocab, (model, guesser))
    kinds = [llama_cpp.llama_vocab_type(vocab) for vocab in (ours, theirs)]
    if kinds[0] != kinds[1]:
        return "their tokenizers are of different types"
    for what, adds, token in (
        ("BOS", llama_cpp.llama_vocab_get_add_bos, llama_cpp.llama_vocab_bos),
        ("EOS", llama_cpp.llama_vocab_get_add_eos, llama_cpp.llama_vocab_eos),
    ):
        if adds(ours) != adds(theirs) or (adds(ours) and token(ours) != token(theirs)):
            return f"their {what} tokens differ"
    n_ours, n_theirs = (llama_cpp.llama_vocab_n_tokens(vocab) for vocab in (ours, theirs))
    if abs(n_ours - n_theirs) > _SIZES_DIFFER:
        return f"it has {n_theirs} tokens, the model {n_ours}"
    text = llama_cpp.llama_vocab_get_text
    for token in range(_FIRST_TOKEN, min(n_ours, n_theirs)):
        if text(ours, token) != text(theirs, token):
            return f"token {token} is {text(theirs, token)!r}, the model's is {text(ours, token)!r}"
    return None
