"""The examples for LangChain and LlamaIndex, with the real packages in an environment of their own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGES = ("langchain-community>=0.3", "llama-index-core>=0.12")
WITHOUT_ITS_PACKAGES = "llama-index-llms-llama-cpp>=0.4"  # llama-cpp-python, which pip would compile


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment above this one, with the packages; skips where no index is reachable."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    program = folder / "bin" / "python"
    own = subprocess.check_output([program, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    here = sysconfig.get_path("purelib")
    Path(own.strip(), "below.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    for packages in (PACKAGES, ("--no-deps", WITHOUT_ITS_PACKAGES)):
        installed = subprocess.run([program, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
        if installed.returncode:
            pytest.skip(f"the packages cannot be installed: {installed.stderr.strip().splitlines()[-1]}")
    return program


@pytest.mark.slow
@pytest.mark.parametrize("example", ["langchain_llama", "llamaindex_llama"])
def test_an_example_answers_as_llama_cpp_python_does(example: str, python: Path, tiny: Callable[..., Path]) -> None:
    model, question = tiny("llama"), "the fox jumps"
    command = [python, ROOT / "examples" / f"{example}.py", model, question]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    from oallama import Llama

    llm = Llama(str(model), n_ctx=512, verbose=False)
    wanted = llm.create_completion(question, max_tokens=16, temperature=0.0)["choices"][0]["text"]
    llm.close()
    assert ran.stdout.rstrip("\n") == wanted.rstrip("\n") and wanted
