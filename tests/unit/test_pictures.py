"""Plans and benchmarks as pictures: what is drawn is what the plan says, and no text breaks out of its place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from oallama.data.budget import format_bytes
from oallama.data.plan import HOST, PlacementPlan, TensorPlacement
from oallama.planning.planner import Candidates
from oallama.planning.tensor_seconds import TensorSeconds
from oallama.serving.page import page_options, render_page
from oallama.views.intervals_svg import Interval, intervals_svg
from oallama.views.memory_bars import PARTS, memory_bars
from oallama.views.placement_map import KV_CACHE, placement_map
from oallama.views.placement_svg import placement_svg
from oallama.views.plan_cells import drawn
from oallama.views.plan_report import plan_report
from support.planned import plan as planned
from support.plans import make

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '<img src=x onerror="alert(1)">&'


def root_of(plan: PlacementPlan) -> ElementTree.Element:
    return ElementTree.fromstring(placement_svg(placement_map(plan), standalone=False))


def cells(root: ElementTree.Element) -> Iterator[tuple[str, ElementTree.Element]]:
    """Every cell by the name that its first fact begins with."""
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "cell":
            title = group.find(f"{SVG}title")
            assert title is not None and title.text
            yield re.split(r", |\n", title.text)[0], group


def widths(group: ElementTree.Element) -> dict[str, float]:
    return {rect.get("class", ""): float(rect.get("width", "0")) for rect in group.iter(f"{SVG}rect")}


def test_every_weight_and_cache_is_a_cell_of_its_layer() -> None:
    plan = make()
    found = dict(cells(root_of(plan)))
    caches = {f"{KV_CACHE} of layer {layer}" for layer in range(12)}
    assert {*found} == {*drawn(plan), *caches}
    assert found["blk.7.ffn_up.weight"].get("data-column") == "7"
    assert "device0" in widths(found["blk.7.ffn_up.weight"])
    assert "device0" not in widths(found["blk.3.ffn_up.weight"])


def test_a_map_of_its_own_has_the_same_cells_and_a_title() -> None:
    alone = ElementTree.fromstring(placement_svg(placement_map(make()), title=f"a plan of {NASTY}"))
    inside = root_of(make())
    for part in ("host", "device0"):
        of_cells = sum(part in widths(group) for _, group in cells(inside))
        in_legend = 2 if part == "host" else 1
        assert sum(rect.get("class") == part for rect in alone.iter(f"{SVG}rect")) == of_cells + in_legend
    assert f"a plan of {NASTY}" in [text.text for text in alone.iter(f"{SVG}text")]


def test_kinds_of_one_short_name_have_rows_of_their_own() -> None:
    tensors = dict(make().tensors)
    for layer in range(12):
        tensors[f"blk.{layer}.attn_gate.weight"] = TensorPlacement.whole("f16", 10, HOST, "host", 0.5)
    drawn_map = placement_map(make(tensors=tensors))
    assert "ffn_gate" in drawn_map.labels and "attn_gate" in drawn_map.labels and "up" in drawn_map.labels
    found = dict(cells(root_of(make(tensors=tensors))))
    rows = {found[f"blk.0.{kind}.weight"].get("data-row") for kind in ("attn_gate", "ffn_gate", "ffn_up")}
    assert len(rows) == 3


def test_a_divided_weight_is_coloured_by_its_share() -> None:
    tensors = dict(make().tensors)
    whole = TensorPlacement.whole("f16", 10, HOST, "host", 0.5)
    tensors["blk.1.ffn_up.weight"] = TensorPlacement.divided(whole, "GPU0", 4, 10)
    group = dict(cells(root_of(make(tensors=tensors))))["blk.1.ffn_up.weight"]
    assert widths(group)["device0"] == pytest.approx(0.4 * widths(group)["host"], abs=0.01)


def test_uploads_and_streams_are_marked_without_colour() -> None:
    def marks(plan: PlacementPlan, name: str) -> int:
        return sum(path.get("class") == "mark" for path in dict(cells(root_of(plan)))[name].iter(f"{SVG}path"))

    name = "blk.5.ffn_up.weight"
    uploaded = make(upload=[name])
    streamed = TensorPlacement.whole("f16", 10, HOST, "stream", 0.5, stream_from=8)
    assert marks(uploaded, name) == 1 and marks(make(), name) == 0
    plan = make(tensors={**make().tensors, name: streamed})
    assert marks(plan, name) == 1
    assert next(cell for cell in placement_map(plan).cells if cell.name == name).facts[1] == (
        "on CPU, streamed from 8 tokens on"
    )


def test_a_cell_says_what_a_weight_takes_and_saves() -> None:
    plan = make()
    n_prompt, n_generate = plan.predicted.workload
    slow, fast = "blk.3.ffn_up.weight", "blk.4.ffn_up.weight"
    times = {
        slow: TensorSeconds({HOST: 3e-3, "GPU0": 1e-3}, {HOST: 0.5, "GPU0": 0.1}),
        fast: TensorSeconds({HOST: 2e-3, "GPU0": 1e-3}, {HOST: 0.2, "GPU0": 0.1}),
    }
    facts = {cell.name: cell.facts for cell in placement_map(plan, times).cells}
    assert "one token: CPU 3.0 ms, GPU0 1.0 ms" in facts[slow]
    assert f"{plan.context.n_ubatch} tokens: CPU 500.0 ms, GPU0 100.0 ms" in facts[slow]
    gained = (n_generate - 1) * 2e-3 + n_prompt / plan.context.n_ubatch * 0.4
    assert f"saves {1e9 * gained / 10:.2f} s of the request per GB on GPU0, rank 1 of 2" in facts[slow]
    assert any(line.endswith("rank 2 of 2") for line in facts[fast])
    assert not any("saves" in line for line in facts["blk.5.ffn_up.weight"])


def test_several_sequences_and_copied_caches_are_said() -> None:
    several = make(planner={"name": "exact", "params": {"n_parallel": 8}}, layers=(HOST,) * 13, stream_caches=True)
    times = {"blk.4.ffn_up.weight": TensorSeconds({HOST: 2e-3, "GPU0": 1e-3}, {})}
    facts = {cell.name: cell.facts for cell in placement_map(several, times).cells}
    assert "a token of each of 8: CPU 2.0 ms, GPU0 1.0 ms" in facts["blk.4.ffn_up.weight"]
    assert facts[f"{KV_CACHE} of layer 0"][1] == "on CPU, copied for attention on GPU0"


def test_layers_that_nobody_weighed_are_drawn_and_long_labels_fit() -> None:
    name = "blk.12.nextn.shared_head_head.weight"
    heads = TensorPlacement.whole("f16", 10, "GPU0", "resident")
    norm = "blk.12.nextn.enorm.weight"
    plan = make(tensors={**make().tensors, name: heads, norm: heads})
    root = root_of(plan)
    assert name in dict(cells(root)) and norm not in dict(cells(root))
    left = min(float(rect.get("x", "0")) for rect in root.iter(f"{SVG}rect"))
    assert left > 6 * len("nextn.shared_head_head")


class Page(HTMLParser):
    """What a page may load, and its ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.policy = ""
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.loads += [values[name] for name in ("src", "href", "action") if name in values]
        self.ids += [values["id"]] if "id" in values else []
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]


def pages() -> dict[str, str]:
    named = make(model={"name": NASTY, "size": 7})
    found = Candidates({"oato": named}, {}, {"layers": 1.25})
    return {
        "report": plan_report(named, found, command=f"oallama plan {NASTY}"),
        "page": render_page(named),
        "page without a plan": render_page(None),
    }


@pytest.mark.parametrize("which", pages())
def test_pages_load_nothing_and_run_nothing_of_others(which: str) -> None:
    page = Page(pages()[which])
    assert all(url.startswith("data:") for url in page.loads), page.loads
    assert page.policy.startswith("default-src 'none'")
    assert len(page.ids) == len(set(page.ids))
    assert "img" not in page.tags


def test_a_report_has_all_that_the_terminal_shows() -> None:
    plan = planned()
    found = Candidates({"exact": plan}, {}, {"layers": 1.25})
    text = plan_report(plan, found, command="oallama plan m.gguf")
    for words in ("layers is not made: it would take 1.25 s at least", "exact (chosen)", "oallama plan m.gguf"):
        assert words in text
    memory = plan.predicted.devices[plan.devices[0]]
    assert format_bytes(memory.weights) in text and plan.hash[:8] in text


def test_memory_bars_are_shares_of_the_budget() -> None:
    (gpu, host) = memory_bars(make())
    assert gpu.has_budget and not host.has_budget
    assert gpu.shares == (0.1, 0.2, 0.3, 0.0) and len(PARTS) == len(gpu.shares)  # of 1000 bytes
    assert host.shares[0] == pytest.approx(100 * 4 / 6, abs=0.01)  # of the largest sum
    over = replace(make(), budgets={"GPU0": 3})
    assert sum(memory_bars(over)[0].shares) == pytest.approx(100, abs=0.05)


def test_intervals_share_a_scale_from_zero() -> None:
    rows = [Interval("pp32", "ours", 0.8, 1.0, 1.2, 0.9), Interval("pp32", "theirs", 1.8, 2.0, 2.4, None, ", 0.50x")]
    root = ElementTree.fromstring(intervals_svg(rows))
    ours, theirs = (float(circle.get("cx", "")) for circle in root.iter(f"{SVG}circle"))
    left = float(next(p for p in root.iter(f"{SVG}path") if p.get("class") == "rail").get("d", "")[1:].split()[0])
    assert (theirs - left) == pytest.approx(2 * (ours - left), abs=0.1)
    assert sum(path.get("class") == "expected" for path in root.iter(f"{SVG}path")) == 1
    assert intervals_svg([]) == ""


@pytest.mark.parametrize("given", [["--path", "/srv/www"], ["--no-ui"], ["--no-webui"]])
def test_who_has_another_page_keeps_it(given: list[str]) -> None:
    with page_options(make(), given) as options:
        assert options == []


def test_the_page_is_a_file_while_the_server_runs() -> None:
    with page_options(make(), ["-lv", "5"]) as (option, folder):
        assert option == "--path" and [path.name for path in Path(folder).iterdir()] == ["index.html"]
    assert not Path(folder).exists()
