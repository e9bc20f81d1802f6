"""The cluster that this machine belongs to, whether Slurm is installed here, and the sandbox that plays a site.

``hpcjobs sandbox up --like tu-hpc`` leaves a record; from then on ``--site tu-hpc`` on this machine
means the sandbox, unless SLURM_CONF names another configuration.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from hpcjobs.errors import CommandMissingError, ConfigError, SchedulerError
from hpcjobs.files import cache_dir, make_folder, write_beside
from hpcjobs.processes.programs import run
from hpcjobs.processes.tree import start_ticks
from hpcjobs.site.models import Frozen, Site
from hpcjobs.slurm_commands import cluster_env, show_config

_CONFIGURATIONS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")


def slurm_is_here() -> bool:
    """sbatch is installed and has a cluster: its packages alone make no login node."""
    return shutil.which("sbatch") is not None and _has_configuration(os.environ.get("SLURM_CONF"))


@functools.cache
def _has_configuration(conf: str | None) -> bool:
    """Whether a file exists or is named, or Slurm answers: a controller may give the configuration (configless)."""
    if conf:
        return True
    if any(map(os.path.exists, _CONFIGURATIONS)):
        return True
    try:
        answer = run(show_config())
    except CommandMissingError:
        return False
    return answer.code == 0 or "configuration source" not in answer.err


_CACHE_S = 86_400.0
EVERY_CLUSTER = "all"
"""Slurm's name for all clusters."""
_CLUSTER_NAME = re.compile(r"""^\s*ClusterName\s*=\s*["']?([^\s"'#]+)""", re.IGNORECASE | re.MULTILINE)


def named_clusters() -> frozenset[str]:
    """The clusters of SLURM_CLUSTERS, which Slurm's commands reach in place of their own; perhaps `EVERY_CLUSTER`."""
    return frozenset(filter(None, map(str.strip, os.environ.get("SLURM_CLUSTERS", "").split(","))))


@functools.cache
def cluster_name(slurm_conf: str | None) -> str | None:
    """ClusterName of the cluster that ``slurm_conf`` belongs to (None: where Slurm's commands look for one).

    Read from the file; without a readable file, Slurm is queried once a day and host, since a configuration
    can come from the controller (configless), include others, or lie where this Slurm was built to look.
    """
    if slurm_conf is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if match := _CLUSTER_NAME.search(Path(slurm_conf).read_text(encoding="utf-8")):
                return match[1].lower()
    return _cached_name(cache_dir() / "clusters" / _cache_key(slurm_conf), slurm_conf)


def _cache_key(slurm_conf: str | None) -> str:
    """This boot of this host, the Slurm that is first on PATH, and its configuration: another has another name."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    parts = (boot, os.uname().nodename, shutil.which("scontrol") or "", slurm_conf or "", *sorted(named_clusters()))
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _cached_name(path: Path, slurm_conf: str | None) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if time.time() - path.stat().st_mtime < _CACHE_S and (cached := path.read_text(encoding="utf-8").strip()):
            return cached
    name = _ask_name(slurm_conf)
    if name is not None:
        with contextlib.suppress(OSError):  # the cache saves a question; without it the next command asks again
            make_folder(path.parent)
            write_beside(path, name)
    return name


def _ask_name(slurm_conf: str | None) -> str | None:
    if slurm_conf is not None and not os.path.exists(slurm_conf):
        return None  # scontrol would look for it for a minute
    try:
        answer = run(show_config(), env=cluster_env(slurm_conf))
    except SchedulerError:
        return None
    match = _CLUSTER_NAME.search(answer.out) if answer.code == 0 else None
    return match[1].lower() if match else None


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


def current_sandbox() -> Rehearsal | None:
    """The sandbox that is up on this machine, if there is one and SLURM_CONF does not name another."""
    record = sandbox_root() / RECORD
    try:
        if os.stat(record).st_uid not in (0, os.getuid()):
            return None  # another user's, whose slurm.conf names plugins
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
    rehearsal = current_sandbox()
    if rehearsal is None or rehearsal.site != site.name or site.slurm_conf == rehearsal.slurm_conf:
        return site
    fields = msgspec.to_builtins(site) | rehearsal.overlay | {"slurm_conf": rehearsal.slurm_conf, "rehearsal": True}
    return msgspec.convert(fields, Site)
