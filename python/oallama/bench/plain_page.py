"""The page that llama.cpp lets the demo model write, to compare that of a plan with."""

from __future__ import annotations

import os
import subprocess
import sys

from ..engine.runtime import with_bindings
from ..storyteller import demo_model
from ..storyteller.exam import PAGE_END
from .baselines import stock_lib

START = "One sunny day, Anna and Ben were in the garden. Anna found a red ball."
BUDGET = "50%"
CONTEXT, TOKENS = 512, 240
_PROGRAM = f"""
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx={CONTEXT}, n_threads=int(sys.argv[3]), verbose=False)
page = llm.create_completion(sys.argv[2], temperature=0.0, max_tokens={TOKENS}, stop=[{PAGE_END!r}])
sys.stdout.write(page["choices"][0]["text"])
"""


def plain_page(n_threads: int) -> str:
    """What follows START without a plan on the CPU, in a process of its own, because a process has one libllama."""
    lib, variables = stock_lib()
    environment = {
        **os.environ,
        **variables,
        "LLAMA_CPP_LIB_PATH": str(lib),
        "PYTHONPATH": with_bindings(os.environ.get("PYTHONPATH")),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", _PROGRAM, str(demo_model()), START, str(n_threads)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
