"""A user with JupyterLab in a headless Chromium: opens a notebook, runs its cell, looks. Told and telling by JSON.

{"url", "notebook", "failure": PATH, "screenshot": PATH or null, "append": text typed behind the cell, or null}
-> {"output": what the cell printed, "notice": what the page was told after the text was typed, or null}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from playwright.sync_api import Page, sync_playwright

_WAIT_MS = 60_000


def main() -> None:
    asked = json.load(sys.stdin)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(_WAIT_MS)
        try:
            found = visit(page, asked)
        except Exception:
            page.screenshot(path=asked["failure"])
            raise
        finally:
            browser.close()
    json.dump(found, sys.stdout)


def visit(page: Page, asked: dict[str, Any]) -> dict[str, Any]:
    page.goto(asked["url"])
    page.locator(".jp-DirListing-item", has_text=asked["notebook"]).dblclick()
    cell = page.locator(".jp-Notebook .jp-CodeCell").first
    page.locator("#jp-main-statusbar", has_text="| Idle").wait_for()
    cell.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    output = cell.locator(".jp-OutputArea-output")
    cell.locator(".jp-InputPrompt", has_text="[1]").wait_for()
    if asked.get("screenshot"):
        page.screenshot(path=asked["screenshot"])
    notice = None
    if asked.get("append"):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+End")
        page.keyboard.type(asked["append"])
        print("typed", file=sys.stderr, flush=True)
        toast = page.locator(".Toastify__toast", has_text="saved")
        toast.wait_for()
        notice = toast.inner_text()
    return {"output": output.inner_text(), "notice": notice}


main()
