"""Weights & Biases: RUN_FOLDER/wandb. Offline, unless there is a key for a server that answers; WANDB_MODE decides.

`wandb sync RUN_FOLDER/wandb/offline-run-*` sends an offline run from a machine with a network.
"""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

import wandb

from hpcjobs.trackers import MetricPoint, TrackedRun, is_reachable, make_run_id, read_run_id, write_run_id

SERVER = "https://api.wandb.ai"


class WandbTracker:
    """A run of Weights & Biases; offline on a node without its server."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_MODE", choose_mode())
        run_id = read_run_id(run, "wandb") or make_run_id()
        self._run = wandb.init(
            dir=str(run.folder),
            id=run_id,
            resume="allow",
            name=os.environ.get("WANDB_NAME", run.name),
            project=os.environ.get("WANDB_PROJECT", re.sub(r"[/\\#?%:]", "-", run.name)),  # it refuses these
            config=dict(run.config),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
        )
        write_run_id(run, "wandb", run_id)
        self.place = self._run.url or str(run.folder / "wandb")

    def write(self, points: Sequence[MetricPoint]) -> None:
        for point in points:
            self._run.log({**point.values, "_timestamp": point.time_s}, step=point.step)

    def close(self, *, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


def choose_mode() -> str:
    """The mode if WANDB_MODE is not set."""
    server = os.environ.get("WANDB_BASE_URL", SERVER)
    return "online" if has_key(server) and is_reachable(server) else "offline"


def has_key(server: str) -> bool:
    """Whether the environment or ~/.netrc, where `wandb login` puts it, has a key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators(urlsplit(server).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):  # the file is missing or invalid
        return False
