"""The documentation site: built strictly, every page begins with what its reader can do, and search finds the page."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import REPOSITORY

CHROMIUM = Path("/usr/bin/chromium")
CAPABLE = re.compile(r"After (?:reading this page|this tutorial) you can ")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` builds it: a broken link, a missing anchor and a page outside the navigation end it."""
    folder = tmp_path_factory.mktemp("site")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(argv, cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site behind a server, as search needs it."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_every_page_begins_with_what_its_reader_can_do(site: Path) -> None:
    pages = [*(REPOSITORY / "docs").rglob("*.md")]
    assert [page.name for page in pages if not CAPABLE.search("\n".join(page.read_text().split("\n")[:8]))] == []
    for name in ("command_line", "exit_codes", "gallery"):
        assert "you can" in re.sub(r"<[^>]+>", "", (site / f"{name}.html").read_text())


def test_the_command_line_page_has_every_command(site: Path) -> None:
    text = (site / "command_line.html").read_text()
    for command in ("hpcjobs submit", "hpcjobs sweep run", "hpcjobs report scaling", "hpcjobs jupyter open"):
        assert f"Usage: {command} " in text
    assert "--ntasks-per-node" in text


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    """Scripts, styles and pictures are part of the site, so that it works without a network."""
    for page in site.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|img)[^>]* src="?(https?:[^" >]+)|<link[^>]* rel="?stylesheet"? href="?(https?:[^" >]+)',
            page.read_text(),
        )
        assert fetched == [], page


QUESTIONS: dict[str, str] = yaml.safe_load((Path(__file__).parent / "questions.yaml").read_text(encoding="utf-8"))


@pytest.mark.timeout(300)
def test_search_has_the_page_among_its_first_three(address: str, tmp_path: Path) -> None:
    sync_api = _chromium()
    missed = {}
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for question, expected in QUESTIONS.items():
            page.goto(f"{address}/index.html?q={urllib.parse.quote(question)}")
            page.locator(".md-search-result__meta", has_text=re.compile("matching")).wait_for(state="attached")
            results = page.locator(".md-search-result__item")
            links = [results.nth(number).locator("a").first for number in range(min(3, results.count()))]
            targets = [link.get_attribute("href") or "" for link in links]
            names = [
                re.sub(r"\?.*|#.*", "", link).removeprefix(f"{address}/").removesuffix(".html") for link in targets
            ]
            if expected not in names:
                missed[question] = (expected, names)
        browser.close()
    assert not missed, "\n".join(f"{question}: {pages}" for question, pages in missed.items())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [360, 1280], ids=["phone", "desktop"])
def test_no_page_is_wider_than_its_window(address: str, width: int, site: Path) -> None:
    """Tables and commands scroll within the page."""
    sync_api = _chromium()
    wide = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 800})
        for file in sorted(site.rglob("*.html")):
            page.goto(f"{address}/{file.relative_to(site)}", wait_until="domcontentloaded")
            needed = page.evaluate("document.documentElement.scrollWidth")
            if needed > width:
                wide.append((file.name, needed))
        if pictures := os.environ.get("HPCJOBS_PICTURES"):
            page.goto(f"{address}/index.html")
            page.screenshot(path=f"{pictures}/site-{width}.png")
        browser.close()
    assert wide == []


def _chromium() -> Any:
    if not CHROMIUM.exists():
        pytest.skip("needs Chromium")
    return pytest.importorskip("playwright.sync_api")
