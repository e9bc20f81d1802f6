"""Turns a request for a session into its job and the files that its node reads."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec.structs import replace

from hpcjobs.containers.images import known
from hpcjobs.containers.look import program_there
from hpcjobs.errors import RequestError, reason_of
from hpcjobs.files import runtime_dir, state_dir, user_name
from hpcjobs.job.models import Job, JobSpec, Plan
from hpcjobs.job.plan import plan
from hpcjobs.node.session.files import PRIVATE, Kernel, Settings
from hpcjobs.processes.programs import LEAKING, LEAKING_NAMES, NOT_LEAKING
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Site
from hpcjobs.units import walltime_s

Kind = Literal["lab", "notebook", "code"]
WARN_S = 300
"""Seconds before the time limit, at most a quarter of it, at which the page shows a notice and saves."""
_PROGRAM = ("hpcjobs.node.session",)
_ALLOCATION = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")
"""Variables that an srun typed into a cell needs to find its allocation."""
_OF_THE_SCRIPT = (
    *("RUN_DIR", "JOB_ID", "SCHEDULER", "NNODES", "NTASKS", "NTASKS_PER_NODE", "LAUNCHED_BY", "ENDS", "IFNAME"),
)
"""HPCJOBS_ variables of the session's script: with them, a trainer in a cell would use the session's run folder."""


class SessionRequest(NamedTuple):
    """A session to be submitted."""

    plan: Plan
    settings: Settings


def session_request(
    request: JobSpec,
    site: str | Site | None = None,
    *,
    kind: Kind = "lab",
    folder: str | Path = ".",
    idle: str | None = None,
    token: str | None = None,
    made_by: str | None = None,
) -> SessionRequest:
    """A session on ``site`` with the resources, variables and container of ``request``.

    Args:
        folder: where the server's files begin.
        idle: end after this time without activity (``30m``; ``never``); default: the site's.
        token: instead of one that is made on the node; never in a command line.

    Raises:
        ConfigError: a file is wrong. RequestError: the session does not fit the site.
    """
    where = site if isinstance(site, Site) else load_site(site or default_site())
    if where.jupyter.python is not None:
        where = replace(where, python=where.jupyter.python)
    spec = replace(
        request,
        program=_PROGRAM,
        name="jupyter",
        template="jupyter",
        resources=replace(request.resources, ntasks_per_node=1),
    )
    made = plan(spec, where, made_by=made_by, chdir=folder)
    if made.job.container is not None and made.job.container.runtime == "pyxis":
        raise RequestError(
            f"container {made.job.container.name}: a session does not start in an image of pyxis (site {where.path})",
            hint="jupyter.python of the site file names a Python of the nodes",
        )
    limit_s = made.job.time_limit_s
    warn_s = WARN_S if limit_s is None else min(WARN_S, limit_s // 4)
    if where.kind.takes_sbatch_options and not made.job.resources.signal:
        made = plan(spec, where, made_by=made_by, chdir=folder, signal=f"B:USR1@{max(warn_s, 1)}")
    settings = _settings(where, made.job, kind=kind, idle=idle, token=token)
    return SessionRequest(made, settings._replace(limit_s=limit_s, warn_s=warn_s))


def _settings(site: Site, job: Job, *, kind: Kind, idle: str | None, token: str | None) -> Settings:
    user = user_name()
    quiet = site.jupyter.idle if idle is None else None if idle == "never" else idle
    slurm = site.kind.runs_steps
    return Settings(
        kind=kind,
        folder=job.chdir,
        ssh_to_nodes=site.jupyter.ssh_to_nodes,
        login=_login(site, user),
        user=user,
        relay=[sys.executable],
        srun=(shutil.which("srun") or "srun") if slurm else None,
        slurm_conf=site.slurm_conf,
        idle_s=None if quiet is None else _idle_s(quiet),
        limit_s=None,
        warn_s=WARN_S,
        token=token,
        kernels=_kernels(site, job),
        in_image=job.container is not None,
        hidden={
            "prefixes": list(LEAKING),
            "names": [*sorted(LEAKING_NAMES), *(f"HPCJOBS_{name}" for name in _OF_THE_SCRIPT)],
            "exceptions": [*sorted(NOT_LEAKING), *_ALLOCATION],
        },
        # No other user can create it, on any host of the cluster. Below /tmp others may write: a tunnel could lead to
        # another user's socket.
        relay_folder=str(runtime_dir() or state_dir() / "relay"),
    )


def _kernels(site: Site, job: Job) -> list[Kernel]:
    """The site's Pythons and, unless the server is itself in an image, its images."""
    kernels = [Kernel(name, _python(python)) for name, python in site.jupyter.kernels.items()]
    if site.containers.runtime not in ("apptainer", "singularity") or job.container is not None:
        return kernels
    enter = [program_there(site), "exec", "--bind", f"{job.chdir},{PRIVATE}"]
    enter += ["--nv"] if job.resources.gpus_per_node else []
    return kernels + [
        Kernel(f"{name} (image)", [*enter, path, site.containers.python]) for name, path in known(site).items()
    ]


def _python(text: str) -> list[str]:
    """The words that start a kernel's Python on the node."""
    kind, _, name = text.partition(":")
    return ["conda", "run", "--no-capture-output", "--name", name, "python"] if kind == "conda" else [text]


def private_token(path: Path) -> str:
    """The token in ``path``; ``-`` is standard input.

    Raises:
        RequestError: no such file, others may read it, or its content is not a token.
    """
    try:
        from_pipe = str(path) == "-"
        mode = 0o600 if from_pipe else path.stat().st_mode
        token = (sys.stdin.read() if from_pipe else path.read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"token file {path}: {reason_of(error)}") from error
    if mode & 0o077:
        raise RequestError(f"token file {path} can be read by others", hint=f"chmod 600 {shlex.quote(str(path))}")
    if not re.fullmatch(r"[A-Za-z0-9._~-]{16,}", token):
        raise RequestError(f"token file {path}: a token is one line of 16 letters, digits or ._~- at least")
    return token


def _idle_s(text: str) -> int:
    try:
        return walltime_s(text)
    except ValueError as error:
        raise RequestError(f"idle {text!r}: not a time", hint="write 30m, 2h or never") from error


def _login(site: Site, user: str) -> str | None:
    """The ssh destination of a laptop: the site's login host, or this host; None for a local site used without ssh."""
    login = site.login_host
    if login is not None:
        named = login.user is not None or "@" in login.host
        return (login if named else replace(login, user=user)).destination
    if not site.kind.has_nodes and "SSH_CONNECTION" not in os.environ:
        return None
    # getfqdn returns localhost if /etc/hosts has the host name as an alias of 127.0.0.1.
    names = (name for name in (socket.getfqdn(), socket.gethostname()) if name.partition(".")[0] != "localhost")
    if (name := next(names, None)) is None:
        raise RequestError(
            f"this machine calls itself localhost, and site {site.name} ({site.path}) has no login host for a laptop",
            hint="name it in the site file: login: user@host",
        )
    return f"{user}@{name}"
