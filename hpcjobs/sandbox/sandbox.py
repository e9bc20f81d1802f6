"""Starts, shows and removes a real Slurm cluster of several hosts on this machine."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hpcjobs.errors import HpcJobsError, RequestError
from hpcjobs.processes.programs import run
from hpcjobs.processes.tree import start_ticks
from hpcjobs.sandbox import network, services
from hpcjobs.sandbox.folder import (
    Daemon,
    Folder,
    alive,
    check_usable,
    folder_at,
    lock,
    must,
    program,
    recorded_daemons,
    until,
    write,
)
from hpcjobs.sandbox.layout import (
    PROCTRACK,
    SUFFIX,
    ForeignCluster,
    Layout,
    Sandbox,
    Shape,
    Status,
    read_slurm_conf,
    resolve_layout,
)
from hpcjobs.sandbox.network import has_block, remove_block
from hpcjobs.sandbox.services import fill_accounting, node_states
from hpcjobs.site.library import load_site
from hpcjobs.site.machine import Rehearsal

_TERM_S, _KILL_S = 3.0, 10.0
_POLL_S = 0.02


def take_down(folder: Folder) -> None:
    """End every process, then remove namespaces, network, names and mounts. The folder's files stay.

    Raises RequestError: called from inside the sandbox. HpcJobsError: a process did not end.
    """
    if os.getpid() in processes(folder):
        raise RequestError("this command runs on a host of the sandbox", hint="run it outside")
    folder.record.unlink(missing_ok=True)
    _end_processes(folder)
    network.remove_freezer(folder)
    network.remove(folder)
    remove_block(folder)
    _unmount(folder)


def leftovers(folder: Folder) -> tuple[str, ...]:
    """Descriptions of the sandbox's remains on this machine."""
    running, mounted = len(processes(folder)), len(mounts(folder))
    return tuple(
        arguments
        for there, arguments in (
            (running, f"{running} processes"),
            (network.bridge_owner() == str(folder.root), f"bridge {network.BRIDGE}"),
            (mounted, f"{mounted} mounts"),
            (has_block(folder), "lines in /etc/hosts"),
        )
        if there
    )


def _end_processes(folder: Folder) -> None:
    alive = processes(folder)
    for number, patience in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        deadline = time.monotonic() + patience
        signalled: dict[int, int] = {}
        while alive and time.monotonic() < deadline:
            for pid, ticks in alive.items():
                if signalled.get(pid) != ticks:
                    _signal(pid, ticks, number)
                    signalled[pid] = ticks
            time.sleep(_POLL_S)
            alive = processes(folder)
        if not alive:
            for daemon in recorded_daemons(folder):
                with contextlib.suppress(OSError):
                    os.waitpid(daemon.pid, os.WNOHANG)  # one that this process started stays a zombie until then
            return
    raise HpcJobsError(f"these processes of the sandbox do not end: {', '.join(map(str, sorted(alive)))}")


def processes(folder: Folder) -> dict[int, int]:
    """Every live process of the sandbox: pid -> start time in ticks."""
    pids = {daemon.pid for daemon in recorded_daemons(folder) if alive(daemon)}
    pids |= set(_inside(folder))
    pids |= _descendants(pids)
    ticks_of = {pid: start_ticks(pid) for pid in pids}
    return {pid: ticks for pid, ticks in ticks_of.items() if ticks is not None}


def _inside(folder: Folder) -> Iterator[int]:
    """Processes in one of our namespaces. A file that no namespace is mounted on matches none."""
    ours = {_identity(path) for path in folder.namespaces.glob("*")} - {None}
    for pid in _pids():
        if any(_identity(Path(f"/proc/{pid}/ns/{kind}")) in ours for kind in ("net", "uts")):
            yield pid


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _descendants(roots: Iterable[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(pid)
    descendants: set[int] = set()
    waiting = list(roots)
    while waiting:
        new = set(children.get(waiting.pop(), ())) - descendants
        descendants |= new
        waiting += new
    return descendants


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _signal(pid: int, ticks: int, number: signal.Signals) -> None:
    """Signal that very process: the descriptor pins it before its start time is compared."""
    if not hasattr(os, "pidfd_open"):  # a Python built against old headers, as conda's
        if start_ticks(pid) == ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    try:
        if start_ticks(pid) == ticks:
            signal.pidfd_send_signal(descriptor, number)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _unmount(folder: Folder) -> None:
    for point in sorted(mounts(folder), key=lambda path: -len(path.parts)):
        # Lazily if a user's shell is in it: the mount goes now, its memory when they leave.
        if run([program("umount"), str(point)]).code != 0:
            must(["umount", "--lazy", str(point)])


def mounts(folder: Folder) -> list[Path]:
    """Mount points under the folder, one entry for each mount."""
    points = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]))
        if point.is_relative_to(folder.root):
            points.append(point)
    return points


Say = Callable[[str], None]
BASE_SITE = "sandbox"


def _silent(line: str) -> None:
    """Ignore the progress."""


def up(shape: Shape, *, root: Path | None = None, install: bool = False, say: Say = _silent) -> Sandbox:
    """Build the cluster, or find it up already; ``say`` gets a line for each step.

    Daemons that died are started again. Remains of a crash are removed first. A start that fails
    removes its files and processes.

    Raises RequestError: a sandbox of another shape is up, the shape does not fit the site, the machine lacks something.
    HpcJobsError: a daemon did not start; the message ends with its log.
    """
    services.check(install=install, say=say)
    folder = folder_at(root)
    check_usable(folder)
    with lock(folder):
        current = status(root=root)
        if current.sandbox is not None and repairable(folder):
            _check_same_shape(shape, current.sandbox)
            if current.state == "up":
                say(f"already up: {folder.root}")
            else:
                say(f"starting again: {', '.join(current.problems)}")
                repair(folder, current.sandbox)
            return current.sandbox
        if current.problems:
            say(f"removing an earlier sandbox: {', '.join(current.problems)}")
        return _build_anew(folder, shape, say=say)


def _build_anew(folder: Folder, shape: Shape, *, say: Say) -> Sandbox:
    try:
        network.check_free(folder, ports=services.PORTS)
        take_down(folder)
        folder.clear()
        foreign = _foreign_cluster(shape)
        site, settings = foreign or (load_site(shape.like or BASE_SITE), {})
        layout = resolve_layout(
            msgspec.structs.replace(shape, settings={**settings, **shape.settings}),
            site,
            mpi_types=services.mpi_types(folder),
            has_modules=services.available(),
        )
        for name in site.modules:
            if name not in layout.modules:
                say(f"module load {name} is left out of jobs: {services.reason_for_none()}")
        if site.mpi is not None and layout.mpi != site.mpi:
            say(f"srun --mpi={layout.mpi}: this machine's Slurm has no {site.mpi}, which site {site.name} names")
        if layout.proctrack == "cgroup" and not network.freezer_available():
            raise RequestError(
                "--proctrack cgroup: a cgroup freezer of version 1 can't be mounted on this machine (/proc/cgroups)",
                hint="--proctrack linuxproc needs none",
            )
        return build(folder, layout, shape=shape, say=say)
    except BaseException:
        if folder.etc.exists():
            say("failed; removing what was started")
        take_down(folder)
        folder.remove()
        raise


def _foreign_cluster(shape: Shape) -> ForeignCluster | None:
    """The cluster of the slurm.conf that ``--like`` names; None: it names a site."""
    return read_slurm_conf(Path(shape.like)) if shape.like is not None and shape.like.endswith(SUFFIX) else None


def _check_same_shape(requested: Shape, sandbox: Sandbox) -> None:
    """Options that are not given now make no difference."""
    node = sandbox.hosts[0].shape
    actual = {
        "nodes": len(sandbox.hosts),
        "cpus_per_node": node.cpus,
        "gpus_per_node": node.gpus,
        "proctrack": sandbox.shape.proctrack or PROCTRACK[0],
    }
    actual_settings = (sandbox.shape.settings, sandbox.shape.partition_settings, sandbox.shape.files)
    if (requested.settings, requested.partition_settings, requested.files) not in (({}, {}, {}), actual_settings):
        raise RequestError(
            "a sandbox with other settings of slurm.conf is up", hint="hpcjobs sandbox down, then up again"
        )
    given = {name: getattr(requested, name) for name in actual if getattr(requested, name) is not None}
    if requested.like != sandbox.shape.like or any(actual[name] != value for name, value in given.items()):
        like = f"--like {sandbox.shape.like} " if sandbox.shape.like else ""
        each = "" if like else f" --cpus-per-node {node.cpus} --gpus-per-node {node.gpus}"
        raise RequestError(
            f"a sandbox of another shape is up: {like}--nodes {len(sandbox.hosts)}{each}"
            + (f" --proctrack {sandbox.shape.proctrack}" if sandbox.shape.proctrack else ""),
            hint="hpcjobs sandbox down, then up again; its jobs and their records go with it",
        )


def _recorded_sandbox(folder: Folder) -> Sandbox | None:
    """The record of a completed ``up``; ``None``: no record, or another version's."""
    try:
        return msgspec.json.decode(folder.state.read_bytes(), type=Sandbox) if folder.record.exists() else None
    except (OSError, msgspec.MsgspecError):
        return None


def status(*, root: Path | None = None) -> Status:
    """The sandbox's state. Read only."""
    folder = folder_at(root)
    sandbox = _recorded_sandbox(folder)
    dead = tuple(f"{daemon.name} is dead" for daemon in recorded_daemons(folder) if not alive(daemon))
    if sandbox is not None and not dead and recorded_daemons(folder):
        return Status(state="up", root=str(folder.root), sandbox=sandbox, nodes=node_states(folder))
    problems = dead if sandbox is not None and dead else (*dead, *leftovers(folder))
    if sandbox is None and not problems:
        return Status(state="down", root=str(folder.root))
    return Status(state="damaged", root=str(folder.root), sandbox=sandbox, problems=problems)


def add_users(users: Sequence[str], *, root: Path | None = None) -> None:
    """Let these users of the machine submit to the sandbox that is up.

    Raises RequestError: none is up, or the machine does not know one of them.
    """
    folder = folder_at(root)
    sandbox = _recorded_sandbox(folder)
    if sandbox is None:
        raise RequestError(f"no sandbox is up in {folder.root}", hint="hpcjobs sandbox up")
    if os.geteuid() != 0:
        raise RequestError("only root can let users submit to a sandbox", hint="sudo hpcjobs sandbox add-user NAME")
    for user in users:
        _check_user(user)
    foreign = _foreign_cluster(sandbox.shape)
    site = foreign.site if foreign is not None else load_site(sandbox.shape.like or BASE_SITE)
    services.add_users(folder, resolve_layout(sandbox.shape, site), users)


def _check_user(user: str) -> None:
    try:
        pwd.getpwnam(user)
    except KeyError as error:
        raise RequestError(f"this machine has no user {user!r}") from error


def environment(*, root: Path | None = None) -> dict[str, str]:
    """The variables that point Slurm's commands, and hpcjobs, at the sandbox.

    Raises RequestError: none is up.
    """
    folder = folder_at(root)
    sandbox = _recorded_sandbox(folder)
    if sandbox is None:
        raise RequestError(f"no sandbox is up in {folder.root}", hint="hpcjobs sandbox up")
    variables = {"SLURM_CONF": sandbox.slurm_conf}
    if root is not None or "HPCJOBS_SANDBOX_ROOT" in os.environ:
        variables["HPCJOBS_SANDBOX_ROOT"] = sandbox.root
    return variables


def down(*, root: Path | None = None, say: Say = _silent) -> None:
    """Remove the sandbox with its jobs and records: no process, namespace, bridge, mount or line stays.

    Works after a crash too, and without a sandbox.

    Raises RequestError: not root, or called from inside the sandbox. HpcJobsError: a process did not end.
    """
    folder = folder_at(root)
    if os.geteuid() != 0:
        raise RequestError("only root can take a sandbox down", hint="sudo hpcjobs sandbox down")
    if not folder.root.exists() and not leftovers(folder):
        say(f"nothing is up in {folder.root}")
        return
    with lock(folder):
        take_down(folder)
        folder.remove()
        say(f"down: {folder.root}")


def build(folder: Folder, layout: Layout, *, shape: Shape, say: Say) -> Sandbox:
    """A whole sandbox in an empty folder; its record is written last.

    Raises HpcJobsError: a step failed; earlier steps are not undone.
    """
    password = secrets.token_hex(16)
    _write_files(folder, layout, password=password)
    if layout.proctrack == "cgroup":
        network.mount_freezer(folder)
    say(f"hosts {layout.hosts[0].name} to {layout.hosts[-1].name}: namespaces, bridge, names")
    network.build(folder, layout)
    if layout.has_accounting:
        say("munge, MariaDB, slurmdbd")
        with ThreadPoolExecutor(2) as pool:
            munge = pool.submit(services.start_munge, folder)
            database = pool.submit(services.start_database, folder, password)
            munge.result()
            database.result()
        services.start_accounting(folder)
        say("accounts, QOS and their limits")
        fill_accounting(folder, layout)
    else:
        say("munge; no accounting")
        services.start_munge(folder)
    say("slurmctld, slurmd")
    controller = services.start_controller(folder)
    nodes = [services.start_node(folder, host) for host in layout.hosts]
    _await_nodes(folder, len(layout.hosts), watch=[controller, *nodes])
    return _record(folder, layout, shape=shape, controller=controller)


def _write_files(folder: Folder, layout: Layout, *, password: str) -> None:
    paths = (folder.etc, folder.log, folder.daemons, folder.namespaces, folder.devices, folder.controller)
    for path in paths:
        path.mkdir()
    for name, content in layout.files.items():
        write(folder.etc / name, content)
    write(folder.slurm_conf, services.slurm_conf(layout, folder))
    services.write_modulefiles(folder, layout.modules)
    write(folder.task_prolog, services.TASK_PROLOG, mode=0o755)
    if (text := services.cgroup_conf(layout, folder, version=services.slurm_version())) is not None:
        write(folder.etc / "cgroup.conf", text)
    write(folder.etc / "gres.conf", services.gres_conf(layout, folder))
    write(folder.etc / "slurmdbd.conf", services.slurmdbd_conf(layout, folder, password=password), mode=0o600)
    null = os.stat("/dev/null")
    for index in range(max(host.shape.gpus for host in layout.hosts)):
        os.mknod(folder.devices / f"gpu{index}", null.st_mode, null.st_rdev)


def _await_nodes(folder: Folder, count: int, *, watch: list[Daemon]) -> None:
    """Until every node has registered and takes jobs."""

    def in_service() -> bool:
        states = node_states(folder)
        usable = [state for state in states.values() if state in ("idle", "mixed", "allocated", "completing")]
        return len(usable) == count

    until(in_service, what=f"{count} nodes in service", watch=watch)


def _record(folder: Folder, layout: Layout, *, shape: Shape, controller: Daemon) -> Sandbox:
    sandbox = Sandbox(
        root=str(folder.root),
        site=layout.site,
        slurm_conf=str(folder.slurm_conf),
        shape=shape,
        hosts=layout.hosts,
        partitions=layout.members,
    )
    record = Rehearsal(
        site=layout.site,
        slurm_conf=sandbox.slurm_conf,
        controller_pid=controller.pid,
        controller_start=controller.start_ticks,
        overlay=layout.overlay,
    )
    write(folder.state, msgspec.json.encode(sandbox).decode())
    write(folder.record, msgspec.json.encode(record).decode())
    return sandbox


def repairable(folder: Folder) -> bool:
    """Whether only daemons died: the record, and every host with its namespaces, are still there."""
    files = list(folder.namespaces.glob("*"))
    return folder.record.exists() and bool(files) and all(os.path.ismount(file) for file in files)


def repair(folder: Folder, sandbox: Sandbox) -> None:
    """Start dead daemons again; jobs and their records stay.

    Raises HpcJobsError: a daemon did not come back.
    """
    services.restart_dead(folder)
    daemons = recorded_daemons(folder)
    _await_nodes(folder, len(sandbox.hosts), watch=daemons)
    before = msgspec.json.decode(folder.record.read_bytes(), type=Rehearsal)
    controller = next(daemon for daemon in daemons if daemon.name == "slurmctld")
    now = msgspec.structs.replace(before, controller_pid=controller.pid, controller_start=controller.start_ticks)
    write(folder.record, msgspec.json.encode(now).decode())
