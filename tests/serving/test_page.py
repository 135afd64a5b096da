"""The page at / in a real browser: a chat with streaming and stop, by keyboard alone, and nothing from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.browser import visiting
from support.cli import oallama
from support.servers import serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

WAIT_MS = 60_000


def wait_for(page: Page, place: str, text: str | re.Pattern[str]) -> None:
    """Until the element has exactly this text. The page's policy lets nobody evaluate strings, tests neither."""
    from playwright.sync_api import expect

    expect(page.locator(place)).to_have_text(text, timeout=WAIT_MS)


def wait_for_the_end(page: Page) -> None:
    page.locator("#stop").wait_for(state="hidden", timeout=WAIT_MS)


@pytest.fixture(scope="module")
def served(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A model half of whose weights are on a loopback device. Its context is longer than any test waits for."""
    log = tmp_path_factory.mktemp("page") / "log"
    with serving(log, tiny("llama"), "--local-rpc", "--vram", "60%", "--ctx", "32768", "--threads", "1") as port:
        yield port


def test_a_chat_by_keyboard(served: int) -> None:
    with visiting(f"http://127.0.0.1:{served}/") as visit:
        page = visit.page
        wait_for(page, "#state", "ready")
        page.keyboard.type("hello")  # the text has the focus from the beginning
        page.keyboard.press("Enter")
        page.wait_for_selector(".message.assistant")
        page.keyboard.press("Escape")
        wait_for_the_end(page)
        assert page.locator(".message.user").inner_text().endswith("hello")
        assert page.locator(".message.failed").count() == 0
        page.keyboard.type("again")  # it has it once more after an answer
        page.keyboard.press("Enter")
        page.locator(".message.assistant").nth(1).wait_for(timeout=WAIT_MS)
        page.keyboard.press("Escape")
        wait_for_the_end(page)
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".message").count() == 0
        assert visit.complaints == []
        assert {url.split("/")[2] for url in visit.requests if not url.startswith("data:")} == {f"127.0.0.1:{served}"}


def test_an_answer_that_fills_the_context_is_said_to_be_cut(tiny: Callable[..., Path], tmp_path: Path) -> None:
    arguments = [tiny("llama"), "--no-plan", "--device", "CPU", "--ctx", "256", "--threads", "1"]
    with serving(tmp_path / "log", *arguments) as port, visiting(f"http://127.0.0.1:{port}/") as visit:
        page = visit.page
        wait_for(page, "#state", "ready")
        page.fill("#text", "tell me everything")
        page.keyboard.press("Enter")
        wait_for(page, ".message.failed", re.compile("cut: the context is full"))
        wait_for(page, "#last", re.compile("tokens/s, first one after"))
        wait_for(page, "#generation", re.compile("tokens/s"))
        assert visit.complaints == []


def test_the_map_says_where_a_weight_is(served: int) -> None:
    with visiting(f"http://127.0.0.1:{served}/") as visit:
        page = visit.page
        first = page.locator(".placement .cell[tabindex='0']")
        first.focus()
        facts = page.locator("p.facts")
        assert facts.inner_text().startswith("KV cache of layer 0")
        page.keyboard.press("ArrowDown")
        assert facts.inner_text().startswith("blk.0.")
        page.keyboard.press("ArrowRight")
        assert facts.inner_text().startswith("blk.1.")
        assert page.locator(".bar .piece").count() >= 2
        assert visit.complaints == []


def test_a_key_is_asked_for(tiny: Callable[..., Path], tmp_path: Path) -> None:
    arguments = [tiny("llama"), "--no-plan", "--device", "CPU", "--ctx", "256", "--threads", "1"]
    with (
        serving(tmp_path / "log", *arguments, more=["--api-key", "secret"]) as port,
        visiting(f"http://127.0.0.1:{port}/") as visit,
    ):
        page = visit.page
        page.wait_for_selector("#key-form:not([hidden])", timeout=WAIT_MS)
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        wait_for(page, "#state", "ready")
        assert page.locator("#model option").count() == 1


def test_a_router_offers_its_models(tiny: Callable[..., Path], tmp_path: Path) -> None:
    arguments = ["--hot", tiny("llama"), "--cold", tiny("qwen2"), "--guests", "0", "--parallel", "1", "--ctx", "256"]
    arguments += ["--no-plan"]
    with serving(tmp_path / "log", *arguments) as port, visiting(f"http://127.0.0.1:{port}/") as visit:
        page = visit.page
        wait_for(page, "#state", "ready")
        names = page.locator("#model option").all_inner_texts()
        assert sorted(names) == sorted(tiny(arch).stem for arch in ("llama", "qwen2"))
        page.select_option("#model", label=tiny("qwen2").stem)
        page.fill("#text", "hello")
        page.keyboard.press("Enter")
        wait_for(page, "#last", re.compile("tokens/s"))
        wait_for_the_end(page)
        assert page.locator(".message.assistant .who").first.inner_text() == tiny("qwen2").stem
        wait_for(page, "#generation", re.compile("tokens/s"))
        assert visit.complaints == []


@pytest.mark.parametrize("dark", [False, True])
def test_a_report_in_a_browser(dark: bool, tiny: Callable[..., Path], tmp_path: Path) -> None:
    report, picture = tmp_path / "plan.html", tmp_path / "plan.svg"
    made = oallama(
        "plan", tiny("llama"), "--local-rpc", "--vram", "60%", "--ctx", "512", "--html", report, "--svg", picture
    )
    assert made.returncode == 0, made.stderr
    assert f"{report}, {picture}" in " ".join(made.stdout.split())
    with visiting(report.as_uri(), dark=dark) as visit:
        page = visit.page
        page.locator(".placement .cell").first.hover()
        assert page.locator("p.facts").inner_text().startswith("KV cache of layer 0")
        page.locator(".placement .cell[data-row='1']").first.hover()
        assert "one token: CPU" in page.locator("p.facts").inner_text()
        page.locator("summary").click()
        assert page.locator("details li").count() == page.locator(".placement .cell").count()
        assert visit.complaints == [] and visit.requests == [report.as_uri()]
    with visiting(picture.as_uri(), dark=dark) as visit:
        assert visit.page.locator("rect.host").count() > 1 and visit.complaints == []
