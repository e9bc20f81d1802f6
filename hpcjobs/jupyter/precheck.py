"""Checks whether a session can run and be reached, as far as that is known before its job is queued."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import TimeoutExpired

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Job
from hpcjobs.node.session.agent import LEAST, PACKAGES
from hpcjobs.node.session.files import Settings, relay_socket
from hpcjobs.processes.modules import LEAVE_FOLDER
from hpcjobs.processes.start import run

_PROGRAM = f"""{LEAVE_FOLDER}
import importlib.util as util, sys
if sys.version_info < (3, 9): print("old"); sys.exit()
from importlib.metadata import version, PackageNotFoundError
problems = []
for word in sys.argv[1:]:
    name, _, least = word.partition(":")
    if util.find_spec(name) is None:
        problems.append("no " + name)
        continue
    try:
        found = version(name)
    except PackageNotFoundError:
        continue
    major = found.partition(".")[0]
    if least and major.isdigit() and int(major) < int(least):
        problems.append(name + " " + found + ", not " + least + " or newer")
print(" and ".join(problems))
"""
_PATIENCE_S = 20.0
_LONGEST_SOCKET = 107
"""Bytes of a socket's path that Linux takes."""
_LONGEST_ID = "4294967295"


def check(job: Job, kind: str) -> None:
    """Refuse a session that its Python cannot run.

    Only a Python named by its path can be checked here. One that does not start here may start on a node with its
    modules; the node then reports missing packages, seconds after the start.

    Raises:
        RequestError: the Python is too old, or lacks packages.
    """
    python = Path(job.python)
    if job.container is not None or not python.is_absolute() or not os.access(python, os.X_OK):
        return
    try:
        packages = (f"{name}:{LEAST.get(name, '')}" for name in PACKAGES[kind])
        result = run([str(python), "-c", _PROGRAM, *packages], timeout_s=_PATIENCE_S)
    except (OSError, TimeoutExpired):
        return
    lacking = result.out.strip()
    if result.code != 0 or not lacking:
        return
    if lacking == "old":
        raise RequestError(f"{python} is older than Python 3.9", hint="jupyter.python of the site file names another")
    requirements = " ".join(f"'{name}>={LEAST[name]}'" if name in LEAST else name for name in PACKAGES[kind])
    raise RequestError(
        f"{python}, which site {job.site} ({job.site_file}) would run the session with, has {lacking}",
        hint=f"{python} -m pip install {requirements}, or name another in the site file (jupyter.python)",
    )


def check_relay(settings: Settings) -> None:
    """Refuse a session if its relay could not listen on the login host.

    Raises:
        RequestError: the path of its socket would be too long.
    """
    if settings.srun is None or settings.ssh_to_nodes:
        return
    path = relay_socket(settings.relay_folder, _LONGEST_ID)
    if len(os.fsencode(path)) <= _LONGEST_SOCKET:
        return
    raise RequestError(
        f"the session is reached through a socket in {settings.relay_folder}, and the path of a socket has at most "
        f"{_LONGEST_SOCKET} bytes, here {len(os.fsencode(path))}",
        hint="set XDG_STATE_HOME to a folder of yours with a shorter name; where users may ssh to the nodes of their "
        "jobs, write jupyter.ssh_to_nodes: true in the site file",
    )
