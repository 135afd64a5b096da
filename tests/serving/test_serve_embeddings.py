"""Embeddings through `oallama serve`: by models that were made for them, and refused clearly by others."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from oallama import Llama
from oallama.engine.outline import pooling_of
from oallama.modelmaker.gguf_header import read_metadata
from support.cli import oallama
from support.mtp_model import write_model
from support.processes import until
from support.servers import answers, call, complete, serving

TEXTS = ["the quick brown fox", "a lazy dog"]
LAST = 3  # llama.cpp's number


def with_pooling(source: Path, path: Path) -> Path:
    metadata = read_metadata(source)
    metadata[f"{metadata['general.architecture'].decode()}.pooling_type"] = LAST
    tensors = [
        (t.name, tuple(int(n) for n in t.shape), t.tensor_type, t.data.tobytes()) for t in GGUFReader(source).tensors
    ]
    write_model(
        path, {k: v for k, v in metadata.items() if not isinstance(v, np.ndarray) or v.dtype.kind in "fi"}, tensors
    )
    return path


def unit(vector: list[float]) -> np.ndarray:
    values = np.array(vector, np.float64).ravel()
    return values / np.linalg.norm(values)


def test_a_model_made_for_embeddings_gives_them_under_a_plan(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = with_pooling(tiny("llama"), tmp_path / "embedder.gguf")
    assert pooling_of(model) == "last" and pooling_of(tiny("llama")) == ""
    log = tmp_path / "log"
    with serving(log, model, "--local-rpc", "--vram", "60%", "--ctx", "256", "--threads", "1") as port:
        found = call(port, "/v1/embeddings", {"input": TEXTS})["data"]
    assert "loading embedder.gguf for embeddings (last) by plan" in log.read_text(errors="replace")
    llm = Llama(str(model), n_ctx=256, embedding=True, verbose=False)
    wanted = [llm.embed(text) for text in TEXTS]
    llm.close()
    for one, other in zip(found, wanted, strict=True):
        assert unit(one["embedding"]) @ unit(other) == pytest.approx(1, abs=1e-3)  # kernels round differently
    assert unit(wanted[0]) @ unit(wanted[1]) < 0.9  # two texts differ


def test_one_of_two_models_gives_embeddings(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Beside a hot one that generates, by a plan of its own."""
    hot, cold = tiny("qwen2"), with_pooling(tiny("llama"), tmp_path / "embedder.gguf")
    arguments = ["--hot", hot, "--cold", cold, "--ctx", "512", "--parallel", "2", "--threads", "1", "--no-verify"]
    with serving(tmp_path / "log", *arguments, seconds=600) as port:
        until(lambda: answers(port, hot))
        found = call(port, "/v1/embeddings", {"model": cold.stem, "input": TEXTS})["data"]
        assert complete(port, hot, TEXTS[0], 4)
    assert "embedder by plan" in (tmp_path / "log").read_text(errors="replace")
    llm = Llama(str(cold), n_ctx=256, embedding=True, verbose=False)
    wanted = [llm.embed(text) for text in TEXTS]
    llm.close()
    for one, other in zip(found, wanted, strict=True):
        assert unit(one["embedding"]) @ unit(other) == pytest.approx(1, abs=1e-3)  # kernels round differently


def test_a_model_made_for_embeddings_has_no_guests(tiny: Callable[..., Path], tmp_path: Path) -> None:
    hot = with_pooling(tiny("llama"), tmp_path / "embedder.gguf")
    done = oallama("serve", "--hot", hot, "--cold", tiny("qwen2"))
    assert done.returncode == 2 and "is made for embeddings" in done.stderr and "give --guests 0" in done.stderr


def test_a_model_that_generates_refuses_them(tiny: Callable[..., Path], tmp_path: Path) -> None:
    arguments = [tiny("llama"), "--no-plan", "--device", "CPU", "--ctx", "256", "--threads", "1"]
    with serving(tmp_path / "log", *arguments) as port, pytest.raises(urllib.error.HTTPError) as refused:
        call(port, "/v1/embeddings", {"input": TEXTS})
    assert "--embeddings" in json.loads(refused.value.read())["error"]["message"]
