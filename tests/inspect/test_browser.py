"""The page in a real browser: stages open, modules are found, nothing is fetched, it fits."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn import compiled

from revcompile.inspect.drawing.page import page
from revcompile.inspect.source import code_text

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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def tab(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """The tower's page, as it opens from a disk; whatever goes wrong in it fails the test."""
    one = browser.new_page(viewport={"width": 1200, "height": 900})
    problems: list[str] = []
    one.on("pageerror", lambda error: problems.append(str(error)))
    one.on("console", lambda said: problems.append(said.text))
    one.on("request", lambda asked: problems.append(asked.url) if fetched(asked.url) else None)
    file = tmp_path / "tower.html"
    file.write_text(page(compiled("tower", 3).picture()), encoding="utf-8")
    one.goto(file.as_uri())
    yield one
    one.close()
    assert problems == []


def fetched(url: str) -> bool:
    return not url.startswith("file:")


def test_a_stage_opens_into_its_code(tab: Any) -> None:
    assert tab.locator("#details").is_hidden()
    tab.click("#stage-1")
    assert tab.locator("#details h2").inner_text().startswith("Stage 1: ")
    assert tab.locator("#stage-1").get_attribute("aria-expanded") == "true"
    assert tab.locator("#panel-0 tbody tr").count() == len(
        compiled("tower", 3).partition.parts[1].pieces
    )
    tab.click("text=Code")
    shown = "\n\n".join(tab.locator("#panel-2 pre").all_text_contents())
    assert shown == code_text(compiled("tower", 3).partition, compiled("tower", 3).programs[1])
    tab.click("text=Graph")
    assert tab.locator("#panel-1 svg g").count() > 5
    tab.click("text=Actions")
    assert "FORWARD m0 · SEND y,m0" in tab.locator("#panel-3").inner_text()
    tab.click("#stage-1")
    assert tab.locator("#details").is_hidden()


def test_a_module_is_found_and_its_code_is_marked(tab: Any) -> None:
    stage = next(
        part.index
        for part in compiled("tower", 3).partition.parts
        if any(piece.name == "5" for piece in part.pieces)
    )
    tab.fill("#search", "5.down")
    assert tab.locator("#count").inner_text() == "1 found in 1 stage"
    tab.press("#search", "Enter")
    assert tab.locator("#details h2").inner_text().startswith(f"Stage {stage}: ")
    assert "hit" in (tab.locator(f"#stage-{stage}").get_attribute("class") or "")
    marked = tab.locator("#panel-2 pre[data-program=_5] mark")
    assert marked.count() and ".down(" in marked.first.inner_text()
    assert tab.locator("#panel-2 mark").first.is_visible()
    tab.fill("#search", "no such module")
    assert tab.locator("#count").inner_text() == "nothing found"


def test_everything_can_be_done_with_the_keyboard(tab: Any) -> None:
    tab.keyboard.press("/")
    tab.keyboard.press("Tab")
    assert focused(tab) == "stage-0"
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("Enter")
    assert (focused(tab), tab.url.split("#")[-1]) == ("tab-0", "stage-1")
    tab.keyboard.press("ArrowRight")
    assert (focused(tab), tab.locator("#panel-1").is_visible()) == ("tab-1", True)
    tab.keyboard.press("Escape")
    assert (focused(tab), tab.locator("#details").is_hidden()) == ("stage-1", True)


def focused(tab: Any) -> str:
    return str(tab.evaluate("document.activeElement.id"))
