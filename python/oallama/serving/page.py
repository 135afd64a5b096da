"""The page that `oallama serve` shows at /: a chat, the speed, and where the model is."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..data.plan import PlacementPlan
from ..views.memory_bars import PARTS, memory_bars
from ..views.placement_map import placement_map
from ..views.placement_svg import placement_svg
from ..views.plan_table import describe_speed, plan_title
from ..views.style import COLOURS
from ..views.templates import render

# Arguments of llama-server after which it shows another page or none.
_OTHERS = {"--path", "--no-ui", "--no-webui"}


def render_page(plan: PlacementPlan | None) -> str:
    """One HTML file without scripts, styles or pictures from elsewhere. plan: of the model, where it has one."""
    plans = [plan] if plan else []
    shown = [
        {
            "title": plan_title(each),
            "speed": describe_speed(each),
            "memory": memory_bars(each),
            "map": placement_svg(placement_map(each), standalone=False),
        }
        for each in plans
    ]
    return render("page.html", plans=shown, parts=PARTS, colours=COLOURS)


@contextmanager
def page_options(plan: PlacementPlan | None, given: Sequence[str]) -> Iterator[list[str]]:
    """Arguments with which llama-server shows the page; none where those that are given say otherwise."""
    if _OTHERS & {*given}:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="oallama-page-") as folder:
        Path(folder, "index.html").write_text(render_page(plan))
        yield ["--path", folder]
