"""Architectures that oallama does not make models of: they are planned, or refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oallama.engine.load_settings import Settings
from oallama.loading import autoplan
from oallama.planning import make_plans
from support.foreign_models import minimax_m3
from support.synthetic import profile, space

pytestmark = pytest.mark.engine


def test_sparse_attention_is_planned(tmp_path: Path) -> None:
    """The unfused form of minimax-m3 is dense: llama.cpp then reads two matrices less in a sparse layer."""
    path, settings = minimax_m3(tmp_path / "m.gguf"), Settings(n_ctx=512, n_threads=1)
    graphs = {form: autoplan.read_graph(path, replace(settings, flash_attn=form)) for form in ("auto", "off")}
    fused, unfused = (graphs[form] for form in ("auto", "off"))
    assert len(fused.targets(1)) == len(unfused.targets(1)) + 2
    machine = profile(fused, flash=(True, False))
    found = make_plans(space(fused, machine=machine, graphs=graphs, free_ubatch=True))
    assert "exact" in found.plans and set(found.best.tensors) == {t.name for t in fused.tensors}
