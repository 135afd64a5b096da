"""A headless Chromium for pages and reports: what they say on the console, and what they ask for, is kept."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@dataclass
class Visit:
    """A page that is open. complaints: errors and warnings of its scripts. requests: every URL that it asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextmanager
def visiting(url: str, *, dark: bool = False, width: int = 1280, height: int = 800) -> Iterator[Visit]:
    """The test is skipped where no browser is installed; `scripts/setup.sh` installs one."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)}")
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        scheme = "dark" if dark else "light"
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        visit = Visit(page)
        page.on("console", lambda said: visit.complaints.append(said.text) if said.type in ("error", "warning") else 0)
        page.on("pageerror", lambda error: visit.complaints.append(str(error)))
        page.on("request", lambda request: visit.requests.append(request.url))
        page.goto(url)
        try:
            yield visit
        finally:
            browser.close()
