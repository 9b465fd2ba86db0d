"""A headless Chromium for tests of pages, where there is one. Each test has a page with an empty memory."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None where none is installed (`apt-get install chromium`); tests that need it skip."""

PATIENCE_MS = 120_000
"""The machine may be busy with other tests."""


@dataclass(kw_only=True)
class WatchedPage:
    """A page, and its problems: violations of its policy, errors, failed loads."""

    page: Page
    problems: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    """Addresses that it asked elsewhere than at its own origin."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    assert CHROMIUM is not None, "no chromium is installed"
    async with async_playwright() as driver:
        # Shared memory is small in containers; tests run as root there.
        flags = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--font-render-hinting=none"]
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def watched_page(browser: Browser, origin: str, **context: Any) -> AsyncIterator[WatchedPage]:
    """An empty page of a context of its own; `context` as Playwright's `new_context` takes it."""
    session = await browser.new_context(base_url=origin, **context)
    session.set_default_timeout(PATIENCE_MS)
    page = await session.new_page()
    watched = WatchedPage(page=page)

    def on_console(message: ConsoleMessage) -> None:
        # Chromium writes a line about every answer that is an error, which is the page's to handle.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            watched.problems.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: watched.problems.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(origin) else watched.foreign.append(asked.url))
    try:
        yield watched
    finally:
        await session.close()
