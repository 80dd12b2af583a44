"""A real browser: Debian's Chromium without a screen, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import serve as serve

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="`make test-browser` installs it")
    if CHROMIUM is None:
        pytest.skip("needs Chromium; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


class Screen:
    """A page, and what it must not have done."""

    def __init__(self, page: Any, root: str) -> None:
        self.page = page
        self.root = root
        #: Errors of scripts, and what the console shows as an error.
        self.errors: list[str] = []
        #: Requests to other hosts.
        self.outside: list[str] = []
        page.on("console", self._told)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._asked)

    def _told(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self.root):
            self.outside.append(request.url)

    def open(self) -> None:
        """Load the dashboard."""
        self.page.goto(f"{self.root}/dashboard")


@pytest.fixture
def screen(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Screen]]:
    """Open a page at an address; `phone` has the size of one, and is dark."""
    contexts = []

    def opened(root: str, phone: bool = False) -> Screen:
        size = {"width": 390, "height": 844} if phone else {"width": 1400, "height": 1000}
        context = browser.new_context(viewport=size, color_scheme="dark" if phone else "light")
        context.set_default_timeout(20_000)
        contexts.append(context)
        return Screen(context.new_page(), root)

    yield opened
    for context in contexts:
        context.close()
