"""llama-cpp-python's own test-suite with `oallama.Llama` in the place of `llama_cpp.Llama`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.paths import ROOT

UPSTREAM = ROOT / "third_party" / "llama.cpp"
SUITE = UPSTREAM / ".download" / "llama-cpp-python-tests"

# Where only the kind of a downloaded model matters, a tiny one of ours takes its place (CONFTEST).
DESELECTED = {
    "test_real_model": "needs the text of Qwen3.5-0.8B (download)",
    "test_real_llama": "needs the text of Qwen3.5-0.8B (download)",
    "test_real_llama_repeated_prompt_cache": "needs the text of Qwen3.5-0.8B (download)",
    "test_recurrent_model_prompt_cache_reset": "needs mamba-130m (download)",
    "test_hybrid_model_prompt_cache_reset": "needs Falcon-H1-Tiny (download)",
    "test_real_llama_embeddings": "needs the encoder bge-small-en (download)",
}
# Their parameter for a transformer runs.
DESELECTED_PARAMETERS = {
    "llama_cpp_recurrent_model_path-True-False": "needs mamba-130m (download)",
    "llama_cpp_hybrid_model_path-False-True": "needs Falcon-H1-Tiny (download)",
}
PARAMETRISED = (
    "test_exact_cached_prompt_reuse_matches_fresh",
    "test_loaded_exact_cached_prompt_reuse_matches_fresh",
    "test_ram_cache_exact_prompt_hit_matches_fresh",
    "test_shorter_prompt_prefix_reuse_matches_fresh",
)

CONFTEST = """
from support.paths import ROOT
from oallama import Llama  # first: it decides which libllama is loaded

import huggingface_hub
import llama_cpp

llama_cpp.Llama = llama_cpp.llama.Llama = Llama

def download(repo, filename):
    assert repo == "ggml-org/models", f"a deselected test asks for {repo}"
    return MODEL

huggingface_hub.hf_hub_download = download

def pytest_sessionfinish(session):
    assert llama_cpp.Llama.__module__ == "oallama.llama"
"""


def deselected() -> list[str]:
    return [*DESELECTED, *(f"{test}[{parameter}]" for test in PARAMETRISED for parameter in DESELECTED_PARAMETERS)]


def test_suite_passes(tiny: Callable[..., Path], tmp_path: Path) -> None:
    assert list(SUITE.glob("test_*.py")), f"no tests in {SUITE}: run third_party/llama.cpp/upstream.py fetch"
    (tmp_path / "vendor").mkdir()
    (tmp_path / "vendor" / "llama.cpp").symlink_to(UPSTREAM / "upstream")
    shutil.copytree(SUITE, tmp_path / "tests")
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("MODEL", repr(str(tiny("llama", "F16")))))
    deselect = [f"--deselect=tests/test_llama.py::{test}" for test in deselected()]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *deselect, "tests"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", result.stdout)[1])  # type: ignore[index]
    assert passed >= 11, result.stdout[-2000:]
    assert "skipped" not in result.stdout
