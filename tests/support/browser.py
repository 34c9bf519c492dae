"""A browser for the tests: Playwright with whatever Chromium this machine has."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = (
    "needs Playwright and a Chromium: pip install 'revcompile[browser]', and Debian's package "
    "chromium (or python -m playwright install chromium)"
)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason=MISSING)
    with playwright.sync_playwright() as driver:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        try:
            # Inside a container, as root, Chromium's own sandbox does not start.
            browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"{MISSING}: {str(error).splitlines()[0]}")
        try:
            yield browser
        finally:
            browser.close()
