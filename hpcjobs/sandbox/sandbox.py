"""Up, status, down: a real Slurm cluster of several hosts on this machine."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from hpcjobs.errors import RequestError
from hpcjobs.sandbox import network, packages, services, slurm_files
from hpcjobs.sandbox.daemons import Daemon, alive, recorded, until
from hpcjobs.sandbox.folder import Folder, locked, write
from hpcjobs.sandbox.layout import settle
from hpcjobs.sandbox.models import Layout, Sandbox, Shape, Status
from hpcjobs.sandbox.teardown import mounts, processes, take_down
from hpcjobs.site.library import load_site
from hpcjobs.site.rehearsal import Rehearsal, sandbox_root

Say = Callable[[str], None]
BASE_SITE = "sandbox"


def _silent(line: str) -> None:
    """Progress that nobody asked for."""


def _root(root: Path | None) -> Path:
    return (root or sandbox_root()).expanduser().resolve()


def up(shape: Shape, *, root: Path | None = None, install: bool = False, say: Say = _silent) -> Sandbox:
    """Build the cluster, or find it up already; ``say`` gets a line for each step.

    What a crash left behind is removed first, and a start that fails removes what it made.

    Raises:
        RequestError: a sandbox of another shape is up, the shape does not fit the site, the machine
            lacks something.
        HpcJobsError: a daemon did not start; the message ends with its log.
    """
    packages.check(install=install)
    with locked(_root(root)) as folder:
        found = status(root=folder.root)
        if found.state == "up" and found.sandbox is not None:
            _same_shape(shape, found.sandbox)
            say(f"already up: {folder.root}")
            return found.sandbox
        network.check_free(folder)
        if found.state == "damaged":
            say(f"an earlier sandbox is not whole ({found.problems[0]}): removing it")
        take_down(folder)
        services.clear(folder)
        layout = settle(shape, load_site(shape.like or BASE_SITE))
        try:
            return _build(folder, layout, shape=shape, say=say)
        except BaseException:
            say("failed: removing what was started")
            take_down(folder)
            raise


def _same_shape(asked: Shape, sandbox: Sandbox) -> None:
    """What was not said now is no difference."""
    has = sandbox.shape
    actual = {"nodes": len(sandbox.hosts), "cpus_per_node": sandbox.hosts[0].shape.cpus}
    actual["gpus_per_node"] = sandbox.hosts[0].shape.gpus
    wanted = {name: getattr(asked, name) for name in actual if getattr(asked, name) is not None}
    if asked.like != has.like or any(actual[name] != value for name, value in wanted.items()):
        shaped = f"like {has.like}" if has.like else f"{actual['cpus_per_node']} CPUs per node"
        raise RequestError(
            f"a sandbox of another shape is up: {actual['nodes']} nodes, {shaped}",
            hint="hpcjobs sandbox down, then up again; its jobs and their records go with it",
        )


def _build(folder: Folder, layout: Layout, *, shape: Shape, say: Say) -> Sandbox:
    password = secrets.token_hex(16)
    _write_files(folder, layout, password=password)
    say(f"hosts {layout.hosts[0].name} to {layout.hosts[-1].name}: namespaces, bridge, names")
    network.build(folder, layout)
    say("munge, MariaDB, slurmdbd")
    with ThreadPoolExecutor(2) as pool:
        munge = pool.submit(services.start_munge, folder)
        database = pool.submit(services.start_database, folder, password)
        munge.result(), database.result()
    services.start_accounting(folder)
    services.fill_accounting(folder, layout)
    say("slurmctld, slurmd")
    controller = services.start_controller(folder)
    nodes = [services.start_node(folder, host) for host in layout.hosts]
    until(lambda: _all_idle(folder, layout), what="idle nodes", watch=[controller, *nodes])
    return _record(folder, layout, shape=shape, controller=controller)


def _write_files(folder: Folder, layout: Layout, *, password: str) -> None:
    for path in (folder.etc, folder.log, folder.daemons, folder.namespaces, folder.devices, folder.controller_state):
        path.mkdir()
    write(folder.slurm_conf, slurm_files.slurm_conf(layout, folder))
    write(folder.etc / "gres.conf", slurm_files.gres_conf(layout, folder))
    write(folder.etc / "slurmdbd.conf", slurm_files.slurmdbd_conf(layout, folder, password=password), mode=0o600)
    for index in range(max(host.shape.gpus for host in layout.hosts)):
        null = os.stat("/dev/null")
        os.mknod(folder.devices / f"gpu{index}", null.st_mode, null.st_rdev)


def _all_idle(folder: Folder, layout: Layout) -> bool:
    states = services.node_states(folder)
    return all(states.get(host.name) == "idle" for host in layout.hosts)


def _record(folder: Folder, layout: Layout, *, shape: Shape, controller: Daemon) -> Sandbox:
    sandbox = Sandbox(
        root=folder.root,
        site=layout.site,
        slurm_conf=folder.slurm_conf,
        shape=shape,
        hosts=layout.hosts,
        partitions=layout.members,
    )
    write(folder.state, msgspec.json.encode(sandbox, enc_hook=str).decode())
    record = Rehearsal(
        site=layout.site,
        slurm_conf=str(folder.slurm_conf),
        controller_pid=controller.pid,
        overlay=layout.overlay,
    )
    write(folder.record, msgspec.json.encode(record).decode())
    return sandbox


def _load(folder: Folder) -> Sandbox | None:
    if not (folder.record.exists() and folder.state.exists()):
        return None

    def path(kind: type, value: str) -> Path:
        return Path(value)

    return msgspec.json.decode(folder.state.read_bytes(), type=Sandbox, dec_hook=path)


def status(*, root: Path | None = None) -> Status:
    """Whether the sandbox is up and whole. Changes nothing."""
    folder = Folder(_root(root))
    sandbox = _load(folder)
    dead = tuple(f"{daemon.name} is not running" for daemon in recorded(folder) if not alive(daemon))
    if sandbox is not None and not dead:
        states = services.node_states(folder)
        return Status(state="up", root=folder.root, sandbox=sandbox, nodes=states)
    problems = (*dead, *_leftovers(folder))
    if sandbox is None and not problems:
        return Status(state="down", root=folder.root)
    return Status(state="damaged", root=folder.root, sandbox=sandbox, problems=problems)


def _leftovers(folder: Folder) -> tuple[str, ...]:
    """What stands of a sandbox that is not up."""
    found = []
    if running := processes(folder):
        found.append(f"{len(running)} processes run")
    if network.bridge_owner() == str(folder.root):
        found.append(f"bridge {network.BRIDGE} is up")
    if mounted := mounts(folder):
        found.append(f"{len(mounted)} mounts")
    return tuple(found)


def environment(*, root: Path | None = None) -> dict[str, str]:
    """The variables that point Slurm's commands, and hpcjobs, at the sandbox.

    Raises:
        RequestError: none is up.
    """
    found = status(root=root)
    if found.sandbox is None:
        raise RequestError(f"no sandbox is up in {found.root}", hint="hpcjobs sandbox up")
    variables = {"SLURM_CONF": str(found.sandbox.slurm_conf)}
    if found.root != _root(None):
        variables["HPCJOBS_SANDBOX_ROOT"] = str(found.root)
    return variables


def down(*, root: Path | None = None, say: Say = _silent) -> None:
    """Remove the sandbox with its jobs and records: no process, namespace, bridge, mount or line stays.

    Harmless when there is none, and after a crash.
    """
    where = _root(root)
    if os.geteuid() != 0:
        raise RequestError("only root can take a sandbox down", hint="sudo hpcjobs sandbox down")
    if not where.exists() and network.bridge_owner() != str(where):
        say(f"nothing is up in {where}")
        return
    with locked(where) as folder:
        take_down(folder)
        services.clear(folder)
        for entry in folder.root.iterdir():
            entry.unlink()
        folder.root.rmdir()
        say(f"down: {where}")
