"""Ranks on hosts with less memory than their weights take: a control group, so that the page cache is limited, too."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from oallama.engine import runtime
from oallama.modelmaker import make_model
from support.control_group import limited_memory
from support.servers import OALLAMA

N_TOKENS = 4


def run(model: Path, memory: str, group: Path | None) -> subprocess.CompletedProcess[str]:
    """Two ranks with one thread each, in the group."""
    command = [OALLAMA, "cluster", "run", str(model), "Once upon a time", "-n", "2", "--memory", memory, "--ctx", "256"]
    command += ["--n-generate", str(N_TOKENS), "--temperature", "0", "--json"]
    join = (lambda: group.write_text(str(os.getpid()))) if group else None
    return subprocess.run(command, capture_output=True, text=True, timeout=500, preexec_fn=join)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(not (runtime.lib_dir() / "liboallama-ranks.so").is_file(), reason="this build has no MPI")
def test_minimal_runs_where_resident_does_not_fit(tmp_path: Path) -> None:
    shape = {"n_layer": 6, "n_embd": 3200, "n_ff": 8640, "n_head": 32, "n_head_kv": 32}  # 1 GB
    model = make_model(tmp_path / "model.gguf", arch="llama", shape="small", file_type="Q8_0", overrides=shape)
    nbytes = model.stat().st_size
    with limited_memory(int(0.7 * nbytes)) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        refused = run(model, "resident", group)
        assert refused.returncode == 2 and "all hosts together may hold" in refused.stderr, refused.stderr
        done = run(model, "minimal", group)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"rank \d on .* are read from the disk for each token, at least", done.stderr)) == 2
    free = run(model, "minimal", None)
    assert "disk" not in free.stderr
    assert json.loads(done.stdout)["text"] == json.loads(free.stdout)["text"] != ""
