"""Starts sessions, waits for them, finds them again and ends them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from hpcjobs.containers.images import known
from hpcjobs.containers.look import program_there
from hpcjobs.errors import HpcJobsError, HpcJobsWarning, RequestError, SchedulerError, UnknownJobError, reason_of
from hpcjobs.files import is_own_folder, path_word, runtime_dir, state_dir, user_name, write_beside
from hpcjobs.job.models import Job, JobSpec, Plan
from hpcjobs.job.plan import plan
from hpcjobs.node.session import files
from hpcjobs.node.session.agent import LEAST, PACKAGES
from hpcjobs.node.session.files import (
    PRIVATE,
    Connection,
    Kernel,
    Settings,
    Tunnel,
    is_destination,
    local_port,
    page,
    relay_socket,
    tunnel,
)
from hpcjobs.packing import pack
from hpcjobs.processes.programs import LEAKING, LEAKING_NAMES, NOT_LEAKING
from hpcjobs.processes.start import LEAVE_FOLDER, run
from hpcjobs.run import logs
from hpcjobs.run.control import cancel
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import own_record
from hpcjobs.run.select import entries_of, require_own, select_one
from hpcjobs.run.status import is_reachable, statuses
from hpcjobs.run.submit import submit
from hpcjobs.run.wait import wait
from hpcjobs.scheduler.base import JobQueue, JobRecord, Outage, QueueReadOnce, State, connect
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Site
from hpcjobs.units import walltime_s

Kind = Literal["lab", "notebook", "code"]
WARN_S = 300
"""Seconds before the time limit, at most a quarter of it, at which the page shows a notice and saves."""
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

    Raises ConfigError: a file is wrong. RequestError: the session does not fit the site.
    """
    where = site if isinstance(site, Site) else load_site(site or default_site())
    if where.jupyter.python is not None:
        where = replace(where, python=where.jupyter.python)
    spec = replace(
        request,
        program=("hpcjobs.node.session",),
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

    Raises RequestError: no such file, others may read it, or its content is not a token.
    """
    try:
        from_pipe = str(path) == "-"
        mode = 0o600 if from_pipe else path.stat().st_mode
        token = (sys.stdin.read() if from_pipe else path.read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"token file {path}: {reason_of(error)}") from error
    if mode & 0o077:
        raise RequestError(f"token file {path} can be read by others", hint=f"chmod 600 {path_word(path)}")
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


_INSIDE = Path(__file__).parent / "inside"


def fill(run_dir: Path, settings: Settings) -> None:
    """Put everything that the session's node reads into its run folder."""
    write_beside(run_dir / files.SETTINGS, msgspec.json.encode(settings._asdict()))
    write_beside(run_dir / files.BUNDLE, pack("hpcjobs.node.session"))
    for source in _inside():
        place = run_dir / files.FOLDER / source.relative_to(_INSIDE)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_beside(place, source.read_bytes())


def _inside() -> Iterator[Path]:
    return (path for path in sorted(_INSIDE.rglob("*")) if path.suffix in (".py", ".js", ".json"))


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
        installed = version(name)
    except PackageNotFoundError:
        continue
    major = installed.partition(".")[0]
    if least and major.isdigit() and int(major) < int(least):
        problems.append(name + " " + installed + ", not " + least + " or newer")
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

    Raises RequestError: the Python is too old, or lacks packages.
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
        hint=f"{shlex.quote(str(python))} -m pip install {requirements},"
        " or name another in the site file (jupyter.python)",
    )


def check_way(settings: Settings) -> None:
    """Refuse a session that no laptop could reach.

    Raises RequestError: the name of the login host is none for ssh, or its socket's path is too long.
    """
    if settings.login is not None and not is_destination(settings.login):
        raise RequestError(
            f"login host {settings.login!r}: a laptop's ssh cannot be called with it",
            hint="`login: user@host` of the site file has letters, digits and .-_",
        )
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


_LOOK_S = 0.3
_ASK_S = 10.0
_FIRST_ASK_S = 1.0
_STOP_ASK_S = 2.0
_LAST_LINES = 15

Progress = Callable[[JobRecord], None]


class Session(NamedTuple):
    """A session that was submitted; ``connection`` is None unless its server answers."""

    entry: Entry
    record: JobRecord
    settings: Settings
    connection: Connection | None

    @property
    def tunnel(self) -> Tunnel | None:
        """The way from a laptop; None: no server answers, or it is on this machine.

        Raises RequestError: a name of a host is none.
        """
        try:
            return None if self.connection is None else tunnel(self.settings, self.connection, Path(self.entry.run_dir))
        except ValueError as error:
            hint = "the login host is `login: user@host` of the site file, the node's name is in connection.json"
            raise RequestError(f"session {self.entry.job_id} ({self.entry.run_dir}): {error}", hint=hint) from error

    @property
    def command(self) -> tuple[str, ...] | None:
        """The command to type on the laptop; None without a `tunnel`."""
        way = self.tunnel
        return None if way is None or self.connection is None else way.command(local_port(self.connection))

    @property
    def url(self) -> str | None:
        """The address to open then, with the token; None: no server answers."""
        return None if self.connection is None else page(self.connection, local_port(self.connection))


def start(request: SessionRequest) -> Entry:
    """Submit the session.

    Raises RequestError: its Python has no Jupyter, as far as that can be known here, or no laptop could reach it.
    SchedulerError: refused.
    """
    check(request.plan.job, request.settings.kind)
    check_way(request.settings)

    def prepare(plan: Plan) -> None:
        fill(plan.run_dir, request.settings)

    return submit(request.plan, prepare=prepare).entry


def look(entry: Entry) -> Session:
    """The current state of the session of ``entry``."""
    record = statuses([entry])[0].records[0]
    return _session(entry, record)


def _session(entry: Entry, record: JobRecord) -> Session:
    run_dir = Path(entry.run_dir)
    connection = None if record.state.ended else files.read_connection(run_dir)
    return Session(entry, record, files.read_settings(run_dir), connection)


def await_answer(entry: Entry, *, progress: Progress) -> Session:
    """Wait until the session's server answers; ``progress`` gets the scheduler's records until then.

    The queue is asked after a second, then every ten; the session's own files are looked at in between.

    Raises HpcJobsError: the job ended first, with the last lines of its log.
    """
    due, outage = time.monotonic() + _FIRST_ASK_S, Outage()
    while True:
        own = own_record(entry, entry.job_id)
        if own is not None and own.state.ended:
            raise _end_error(entry, own)
        if files.read_connection(Path(entry.run_dir)) is not None:
            return _session(entry, own or look(entry).record)
        if time.monotonic() >= due:
            due = time.monotonic() + _ASK_S
            known = outage.ask(lambda: statuses([entry]))
            record = known[0].records[0] if known else None
            if record is not None and record.state.ended:
                raise _end_error(entry, record)
            if record is not None:
                progress(record)
        time.sleep(_LOOK_S)


def await_end(entry: Entry) -> State:
    """Wait until the session's job has ended; its last state."""
    return wait([entry])[0].records[0].state


def _end_error(entry: Entry, record: JobRecord) -> HpcJobsError:
    last = list(logs.lines(entry))[-_LAST_LINES:]
    return HpcJobsError(
        f"the session's job {entry.job_id} has ended ({record.state.value})\n"
        + "".join(f"  {line}" for line in last).rstrip(),
        hint=f"the whole log: hpcjobs logs {entry.job_id}",
    )


def sessions(*, site: str | None = None) -> list[Session]:
    """My sessions that have not ended, oldest first. One whose folder another user took is left out, with a warning."""
    connect_once = cache(lambda kind, conf: QueueReadOnce(connect(kind, conf)))
    sessions = []
    for entry in entries_of(site):
        if not is_own_folder(entry.run_dir) and os.path.lexists(entry.run_dir):
            # Files in there say nothing, not even whether it is a session: the queue knows the job.
            if is_reachable(entry) and _is_in_queue(entry, connect_once(entry.scheduler, entry.slurm_conf)):
                text = f"job {entry.job_id} is left out: its run folder {entry.run_dir} belongs to another user by now"
                warnings.warn(f"{text} (`hpcjobs cancel {entry.job_id}` ends the job)", HpcJobsWarning, stacklevel=2)
        elif _is_session(entry):
            sessions.append(entry)
    known = statuses(sessions, connect=connect_once)
    return [_session(job.entry, job.records[0]) for job in known if not _over(job.records[0].state)]


def _is_in_queue(entry: Entry, scheduler: JobQueue) -> bool:
    """Whether the job waits or runs; also False where the scheduler does not answer."""
    with suppress(SchedulerError):
        return any((r.job_id, r.name) == (entry.job_id, entry.name) for r in scheduler.queue())
    return False


def find(job: str | None, *, site: str | None = None) -> Entry:
    """The session that ``job`` names as of `select`; None: the newest one.

    Raises UnknownJobError: no such session. RequestError: its folder is not this user's: it names an ssh to type.
    """
    if job is not None:
        entry = select_one(job, site=site)
    elif known := [entry for entry in entries_of(site) if _is_session(entry)]:
        entry = known[-1]
    else:
        raise UnknownJobError("no session was submitted from here", hint="hpcjobs jupyter starts one")
    if not _is_session(entry):
        raise UnknownJobError(f"job {entry.job_id} is no session", hint="hpcjobs jupyter list shows those there are")
    require_own(entry)
    return entry


def stop(entries: list[Entry]) -> list[Entry]:
    """End sessions, and wait until no queue lists them any more; return the sessions that had not ended before."""
    running = [job.entry for job in statuses(entries) if not _over(job.records[0].state)]
    cancel(running)
    delay = _LOOK_S
    while not all(_over(job.records[0].state) for job in statuses(running)):
        time.sleep(delay)
        delay = min(2 * delay, _STOP_ASK_S)
    for entry in entries:
        files.forget_token(Path(entry.run_dir))  # one that never started could not do it
    return running


def _over(state: State) -> bool:
    return state.ended or state is State.UNKNOWN


def _is_session(entry: Entry) -> bool:
    return os.path.isfile(os.path.join(entry.run_dir, files.SETTINGS))
