"""Names of modules from earlier versions still work, and say what they are called now."""

from __future__ import annotations

import pytest

from support.processes import ran_python


@pytest.mark.parametrize(
    ("program", "notice"),
    [
        ("from oallama.plan import PlacementPlan; import oallama; assert PlacementPlan is oallama.PlacementPlan",
         "oallama.plan is oallama.data.plan now"),
        ("from oallama.runtime import lib_dir; from oallama.engine import runtime; assert lib_dir is runtime.lib_dir",
         "oallama.runtime is oallama.engine.runtime now"),
    ],
)  # fmt: skip
def test_an_old_name_works_with_one_line_of_notice(program: str, notice: str) -> None:
    done = ran_python(program)
    assert done.stderr.count(notice) == 1 and done.stderr.count("FutureWarning") == 1


def test_other_names_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("oallama.plans")
