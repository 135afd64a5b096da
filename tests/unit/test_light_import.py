"""The command line is imported without the engine, so that help and wrong arguments need none."""

from __future__ import annotations

from support.processes import ran_python


def test_the_command_line_loads_no_engine() -> None:
    program = "import sys, oallama.cli.app; print({'llama_cpp', 'oallama._core'} & set(sys.modules))"
    assert ran_python(program).stdout == "set()\n"
