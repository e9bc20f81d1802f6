"""Replaces a site by the sandbox that is up and shaped like it.

``hpcjobs sandbox up --like tu-hpc`` leaves a record; from then on ``--site tu-hpc`` on this machine
means the sandbox, unless SLURM_CONF names another configuration.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from hpcjobs.errors import ConfigError
from hpcjobs.processes.tree import start_ticks
from hpcjobs.site.models import Frozen, Site

RECORD = "sandbox.json"


class Rehearsal(Frozen, frozen=True):
    """The record of ``sandbox up``."""

    site: str
    """Name of the site the sandbox is shaped like (``sandbox`` when none was named)."""
    slurm_conf: str
    controller_pid: int
    controller_start: int | None = None
    """Ticks from boot to its start: after a reboot the pid may belong to another process."""
    overlay: dict[str, Any] = {}
    """Site fields that differ here: node counts, and software this machine has instead of the site's."""


def sandbox_root() -> Path:
    """Folder that holds everything a sandbox has: ``$HPCJOBS_SANDBOX_ROOT`` or /var/lib/hpcjobs-sandbox."""
    return Path(os.environ.get("HPCJOBS_SANDBOX_ROOT") or "/var/lib/hpcjobs-sandbox")


def current() -> Rehearsal | None:
    """The sandbox that is up on this machine, if there is one and SLURM_CONF does not name another."""
    record = sandbox_root() / RECORD
    try:
        text = record.read_bytes()
    except OSError:
        return None
    try:
        rehearsal = msgspec.json.decode(text, type=Rehearsal)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{record}: {error}", hint="hpcjobs sandbox down, then up again") from error
    elsewhere = os.environ.get("SLURM_CONF")
    started = start_ticks(rehearsal.controller_pid)
    if elsewhere not in (None, "", rehearsal.slurm_conf) or started is None:
        return None
    return rehearsal if rehearsal.controller_start in (None, started) else None


def apply_overlay(site: Site) -> Site:
    """``site`` as the sandbox plays it, or unchanged when no sandbox of its shape is up.

    A file that names the sandbox's own slurm.conf, as `sites init` writes it, describes the sandbox, not its model.
    """
    rehearsal = current()
    if rehearsal is None or rehearsal.site != site.name or site.slurm_conf == rehearsal.slurm_conf:
        return site
    fields = msgspec.to_builtins(site) | rehearsal.overlay | {"slurm_conf": rehearsal.slurm_conf, "rehearsal": True}
    return msgspec.convert(fields, Site)
