"""Every architecture that upstream writes a tiny model of is planned and loaded, and keeps the CPU's logits."""

from __future__ import annotations

from pathlib import Path

import pytest

from oallama.engine.rpc import LocalRpcServer
from support.archs import PAGE, TOKENS, architectures, page, problems, take_through, write_models
from support.logits import compute_logits
from support.placements import placed_jobs

# Each with something that the four of our own model maker lack.
FEW = {
    "gpt2": "biases, learnt positions",
    "qwen4exp": "lookups by n-grams",
    "mamba2": "a scan in place of attention",
    "lfm2": "convolutions",
    "qwen3next": "gated delta rule",
    "minimax-m3": "sparse attention",
    "deepseek2": "compressed keys and values",
}


def test_a_few_architectures_keep_the_model(tmp_path: Path) -> None:
    models = write_models(tmp_path / "models", f"^({'|'.join(FEW)})$")
    assert {path.stem.rsplit("-", 1)[0] for path in models} == set(FEW)
    wrong = problems(take_through(models, tmp_path))
    assert not wrong, "\n".join(wrong)


def test_fused_operators_stay_fused_where_matrices_are_elsewhere(lib: Path, tmp_path: Path) -> None:
    """Upstream takes an operator that runs elsewhere than its layer's cache for one that the device lacks."""
    models = write_models(tmp_path / "models", "^(qwen3next|deepseek4)$")
    with LocalRpcServer(threads=1, register=False) as server:
        jobs = []
        for path in models:
            common = {"tokens": TOKENS, "n_ctx": 128, "n_ubatch": 32}
            jobs += placed_jobs(path, ["RPC0"], [server.endpoint], tmp_path, **common)
        compute_logits(lib, jobs, tmp_path, log=tmp_path / "log")
    assert "set to disabled" not in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_architectures_keep_the_model(tmp_path: Path) -> None:
    answers = take_through(write_models(tmp_path / "models"), tmp_path, n_workers=2)
    assert len(answers) > 120
    wrong = problems(answers)
    assert not wrong, f"{len(wrong)} of {len(answers)} models:\n" + "\n".join(wrong)
    assert PAGE.read_text() == page(answers), "docs/architectures.md is stale: PYTHONPATH=tests python -m support.archs"


def test_the_page_names_every_architecture() -> None:
    text = PAGE.read_text()
    assert [name for name in architectures() if f"| {name} |" not in text] == []
