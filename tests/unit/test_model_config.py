"""Settings of single models behind one address: how their file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from oallama.engine.load_settings import Settings
from oallama.errors import OallamaError
from oallama.serving.model_config import ModelConfig, read_model_config
from support.plans import make

NAMES = ["big", "small"]


def read(folder: Path, text: str) -> dict[str, ModelConfig]:
    path = folder / "models.toml"
    path.write_text(text)
    return read_model_config(path, NAMES)


def test_what_is_given_counts_more_than_what_holds_for_all(tmp_path: Path) -> None:
    found = read(tmp_path, '[big]\nctx = 0\nparallel = 6\n"type-k" = "q8_0"\n[small]\nthreads = 3\n')
    of_all = Settings(n_ctx=512, n_seq_max=4, n_threads=1, flash_attn="on")
    big, small = found["big"].settings(of_all), found["small"].settings(of_all)
    assert (big.n_ctx, big.n_seq_max, big.type_k, big.type_v, big.n_threads) == (0, 6, "q8_0", "f16", 1)
    assert (small.n_ctx, small.n_seq_max, small.n_threads, small.flash_attn) == (512, 4, 3, "on")
    assert read(tmp_path, "") == {}


def test_a_plan_counts_more_than_what_holds_for_all(tmp_path: Path) -> None:
    """Its file is looked for beside the one that names it."""
    plan = make()
    plan.save(tmp_path / "plan.json")
    found = read(tmp_path, '[small]\nplan = "plan.json"\nctx = 256\n')["small"]
    assert found.plan == plan
    settings = found.settings(Settings(n_ctx=4096, n_batch=7, n_seq_max=4, n_threads=5))
    assert settings.n_ctx == 256 and settings.n_threads == 5
    assert (settings.n_batch, settings.n_seq_max) == (plan.context.n_batch, plan.context.n_seq_max)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ctx = 512", r"'ctx' belongs to no model; write it below \[\"big\"\]"),
        ("[huge]\nctx = 512", "no model is called 'huge'; there are big, small"),
        ("[big]\nctxt = 512", "there is no option 'ctxt' of big; did you mean 'ctx'?"),
        ("[big]\nhost = 'all'", "there is no option 'host' of big$"),
        ("[big]\nctx = -1", "'ctx' of big is a whole number from 0 on, got -1"),
        ("[big]\nbatch = 0", "'batch' of big is a whole number from 1 on, got 0"),
        ("[big]\nparallel = true", "'parallel' of big is a whole number from 1 on, got True"),
        ("[big]\nthreads = 1.5", "'threads' of big is a whole number from 0 on, got 1.5"),
        ("[big]\ntype-k = 'q9'", "'type-k' of big is one of f32, f16, .*, got 'q9'"),
        ("[big]\nflash-attn = ['on']", r"'flash-attn' of big is one of auto, off, on, got \['on'\]"),
        ("[big]\nplan = 3", "'plan' of big is a path, got 3"),
        ("[big]\nplan = 'none.json'", "models.toml: 'plan' of big: .*none.json"),
        ("[big", "models.toml is not TOML: "),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OallamaError, match=message):
        read(tmp_path, text)


def test_names_with_dots_are_quoted(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text('["Llama-3.2-1B"]\nctx = 512\n')
    assert read_model_config(path, ["Llama-3.2-1B"])["Llama-3.2-1B"].given == {"n_ctx": 512}
    path.write_text("[Llama-3.2-1B]\nctx = 512\n")
    with pytest.raises(OallamaError, match=r'no model is called \'Llama-3\'; .*; write \["Llama-3.2-1B"\]'):
        read_model_config(path, ["Llama-3.2-1B"])


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OallamaError, match=r"none\.toml cannot be read: No such file"):
        read_model_config(tmp_path / "none.toml", NAMES)
    with pytest.raises(OallamaError, match="cannot be read: Is a directory"):
        read_model_config(tmp_path, NAMES)
