"""The demo model under a plan: a page that can be read and checked, beside the one of unpatched llama.cpp."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from rich.markup import escape

from oallama.bench import find_baseline_lib
from oallama.engine.engine import Settings
from oallama.errors import OallamaError
from oallama.loading import autoplan
from oallama.loading.autoplan import Choices
from oallama.loading.completion import complete
from oallama.storyteller import demo_model
from oallama.storyteller.exam import PAGE_END, mark

from ..cli.terminal import interruptible, out, progress_bar

START = "One sunny day, Anna and Ben were in the garden. Anna found a red ball."
BUDGET = "50%"
_CONTEXT, _TOKENS = 512, 240
_PLAIN = f"""
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx={_CONTEXT}, n_threads=int(sys.argv[3]), verbose=False)
page = llm.create_completion(sys.argv[2], temperature=0.0, max_tokens={_TOKENS}, stop=[{PAGE_END!r}])
sys.stdout.write(page["choices"][0]["text"])
"""


def speak(settings: Settings, choices: Choices) -> None:
    """Let the demo model write a page with up to half of its weights on the device, and say how much of it is true."""
    from oallama.llama import Llama

    path = demo_model()
    wanted = replace(settings, n_ctx=_CONTEXT, n_batch=_CONTEXT, n_ubatch=_CONTEXT)
    shared = replace(choices, planner="oato")  # "auto" may leave a model of this size on the CPU
    with progress_bar("profiling") as report:
        plan = autoplan.plan_model(path, BUDGET, wanted, shared, report)
    with interruptible():
        llm = Llama(str(path), plan=plan, verbose=False, n_threads=settings.n_threads)
    out.print(f"{path.name}, up to {BUDGET} of its weights on {' and '.join(plan.budgets)}:", soft_wrap=True)
    out.print(f"[dim]{START}[/]", end="")
    _, text = complete(llm, START, _TOKENS, 0.0, None, stop=[PAGE_END])
    llm.close()
    marks = mark(START + text)
    out.print(f"{marks.true} of {marks.true + len(marks.faults)} sentences and answers are true.")
    out.print(escape(_beside_plain(text, settings.n_threads)), soft_wrap=True)


def _beside_plain(text: str, n_threads: int) -> str:
    try:
        lib = find_baseline_lib()
    except OallamaError as error:
        return f"left out: {error}"
    # In a process of its own, because a process has one libllama.
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(lib), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", _PLAIN, str(demo_model()), START, str(n_threads)]
    plain = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    other = "the same page." if plain == text else f"another page:\n{START}{plain}"
    return f"Unpatched llama.cpp on the CPU writes {other}"
