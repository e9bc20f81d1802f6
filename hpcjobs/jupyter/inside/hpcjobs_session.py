"""Runs in the Jupyter server of a session: reports the last activity and the newest notice for its users.

Loaded by the server's own Python, which need not have hpcjobs: this file does not import it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado import web

_NOTICE = Path(__file__).with_name("notice.json")
_READING = ("GET", "HEAD", "OPTIONS")


class SessionHandler(APIHandler):
    """``GET hpcjobs/session``: the moment of the last activity, and the newest notice (null: none)."""

    _track_activity = False

    @web.authenticated
    async def get(self) -> None:
        notice = json.loads(_NOTICE.read_text(encoding="utf-8")) if _NOTICE.exists() else None
        self.finish(json.dumps({"last_activity": _last_activity(self.settings), "notice": notice}))


def _last_activity(settings: dict[str, Any]) -> float:
    """Time of the last activity in seconds since 1970: a kernel, a terminal, or a request that changed something.

    An open page alone does not count.
    """
    moments = [settings["hpcjobs_changed"]]
    kernels = settings["kernel_manager"]
    for kernel_id in kernels.list_kernel_ids():
        kernel = kernels.get_kernel(kernel_id)
        busy = kernel.execution_state == "busy"
        moments.append(time.time() if busy else kernel.last_activity.timestamp())
    terminals = settings.get("terminal_manager")
    moments += [t.last_activity.timestamp() for t in (terminals.terminals.values() if terminals else ())]
    return float(max(moments))


def _noting_changes(settings: dict[str, Any]) -> Callable[[web.RequestHandler], None]:
    """The server's own logging of requests, which also notes when something was last changed."""
    log: Callable[[web.RequestHandler], None] = settings["log_function"]

    def log_request(handler: web.RequestHandler) -> None:
        if handler.request.method not in _READING and handler.get_status() < 400:
            settings["hpcjobs_changed"] = time.time()
        log(handler)

    return log_request


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(app: Any) -> None:
    app.no_browser_open_file = True  # it would hold the token, for all to read
    settings = app.web_app.settings
    settings["hpcjobs_changed"] = time.time()
    settings["log_function"] = _noting_changes(settings)
    app.web_app.add_handlers(".*$", [(url_path_join(app.base_url, "hpcjobs/session"), SessionHandler)])
