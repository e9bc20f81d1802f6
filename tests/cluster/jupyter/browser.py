"""A user of a session in a headless Chromium. Told and telling by JSON.

JupyterLab: opens a notebook, runs its cell, looks.
{"url", "notebook", "failure": PATH, "screenshot": PATH or null, "append": text typed behind the cell, or null}
-> {"output": what the cell printed, "notice": what the page was told after the text was typed, or null}

code-server: gives a wrong password, then the right one, and types a line into its terminal.
{"url", "password", "command": a line that makes a file, "makes": its name, "failure": PATH, "screenshot": PATH}
-> {"refused": what the wrong password was answered}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from playwright.sync_api import Page, sync_playwright

_WAIT_MS = 60_000


def main() -> None:
    request = json.load(sys.stdin)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(_WAIT_MS)
        try:
            result = (code_server if "password" in request else jupyterlab)(page, request)
        except Exception:
            page.screenshot(path=request["failure"])
            raise
        finally:
            browser.close()
    json.dump(result, sys.stdout)


def jupyterlab(page: Page, request: dict[str, Any]) -> dict[str, Any]:
    page.goto(request["url"])
    page.locator(".jp-DirListing-item", has_text=request["notebook"]).dblclick()
    cell = page.locator(".jp-Notebook .jp-CodeCell").first
    page.locator("#jp-main-statusbar", has_text="| Idle").wait_for()
    cell.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    output = cell.locator(".jp-OutputArea-output")
    cell.locator(".jp-InputPrompt", has_text=f"[{request.get('run', 1)}]").wait_for()
    if request.get("screenshot"):
        page.screenshot(path=request["screenshot"])
    notice = None
    if request.get("append"):
        cell.locator(".cm-content").click()
        page.keyboard.press("Control+End")
        page.keyboard.type(request["append"])
        print("typed", file=sys.stderr, flush=True)
        toast = page.locator(".Toastify__toast", has_text="saved")
        toast.wait_for()
        notice = toast.inner_text()
    return {"output": output.inner_text(), "notice": notice}


def code_server(page: Page, request: dict[str, Any]) -> dict[str, Any]:
    page.goto(request["url"])
    page.locator("input[name=password]").fill("wrong")
    page.keyboard.press("Enter")
    refused = page.locator(".error").inner_text()
    page.locator("input[name=password]").fill(request["password"])
    page.keyboard.press("Enter")
    page.locator(".monaco-workbench").wait_for()
    page.get_by_role("button", name="Yes, I trust the authors").click()
    page.keyboard.press("Control+Shift+Backquote")
    page.locator(".terminal-wrapper.active .xterm-helper-textarea").focus()
    page.keyboard.type(request["command"] + "\n")
    page.locator(".explorer-folders-view").get_by_text(request["makes"]).wait_for()
    page.screenshot(path=request["screenshot"])
    return {"refused": refused}


main()
