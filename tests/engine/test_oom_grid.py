"""oallama.studies.oom_grid: a dozen of its cells load within their budgets, and the bytes others hold are kept free."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from oallama import OallamaError
from oallama.engine import skeleton
from oallama.engine.load_settings import Settings
from oallama.loading import autoplan, start
from oallama.planning import parse_budget
from oallama.studies import oom_grid
from support.made_profile import made_profile

# Every twelfth, and two whose dry run once took other splits than the load.
SOME = oom_grid.grid()[5::12] + [
    cell
    for cell in oom_grid.grid()
    if str(cell) in ("minicpm3-share-f16-x1-4096-exact", "minicpm3-part of the KV-q4_0-x4-2048-auto")
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, rpc: Any) -> oom_grid.Grid:
    return oom_grid.Grid(tmp_path_factory.mktemp("grid"), rpc.devices[0])


def test_the_grid_covers_what_it_promises() -> None:
    cells = oom_grid.grid()
    assert len({str(cell) for cell in cells}) == len(cells) >= 100
    seen = {(c.arch, c.kv, c.n_seq_max, c.draft) for c in cells}
    kinds = ((1, False), (4, False), (1, True))
    assert seen == {(a, kv, *k) for a, kv, k in product(oom_grid.ARCHITECTURES, ("f16", "q8_0", "q4_0"), kinds)}
    assert {(c.planner, c.kv) for c in cells} >= set(product(oom_grid.PLANNERS, ("f16", "q8_0", "q4_0")))
    assert {(c.planner, c.draft) for c in cells} >= set(product(oom_grid.PLANNERS, (False, True)))


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_a_cell_stays_within_its_budget(cell: oom_grid.Cell, runner: oom_grid.Grid) -> None:
    facts = runner.run(cell)
    assert facts["outcome"] == "ok", facts
    assert facts["measured"] <= facts["limit"]
    assert abs(facts["difference"]) <= facts["predicted"] // 100


def test_a_plan_over_its_budget_is_seen(runner: oom_grid.Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: the same plans, held against a limit one byte below what they take."""
    cell = SOME[0]
    taken = runner.run(cell)["measured"]
    plans, _ = runner.plan(cell)
    monkeypatch.setattr(runner, "plan", lambda _: (plans, taken - 1))
    assert runner.run(cell)["outcome"] == "over budget"


def test_reserved_bytes_are_not_planned(tiny: Callable[..., Path], rpc: Any) -> None:
    path, device = tiny("llama"), rpc.devices[0]
    settings = Settings(n_ctx=256, n_batch=128, n_ubatch=128, n_threads=2)
    everything = sum(skeleton.dry_run(path, settings)[device].values())
    profile = made_profile(path, device, settings)

    def taken(reserve: dict[str, int]) -> int:
        choices = autoplan.Choices(device=device, profile=profile, planner="layers", reserve=reserve)
        return start.plan_model(path, everything, settings, choices).predicted.devices[device].total

    assert taken({}) > everything // 2 >= taken({device: everything - everything // 2, "CPU": 2**40})
    with pytest.raises(OallamaError, match="reserved for others"):
        taken({device: everything})
    with pytest.raises(OallamaError, match="expected 0 or more"):
        taken({device: -1})


def test_a_reserve_leaves_shares_of_the_weights_alone() -> None:
    share = parse_budget("50%", weights_bytes=1000, free_bytes=0)
    assert share.less(400) == share
    auto = parse_budget("auto", weights_bytes=0, free_bytes=1000).less(400)
    assert (auto.bytes_total, auto.is_auto) == (600, True)
    assert parse_budget("1KB", weights_bytes=0, free_bytes=0).less(400).text == "1KB less 400 B"
