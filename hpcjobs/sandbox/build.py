"""Builds a sandbox from its layout, step by step, and takes a damaged one into service again."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from hpcjobs.sandbox import cgroups, modules, network, services, slurm_files
from hpcjobs.sandbox.accounting import fill_accounting, node_states
from hpcjobs.sandbox.daemons import Daemon, recorded_daemons, until
from hpcjobs.sandbox.folder import Folder, write
from hpcjobs.sandbox.models import Layout, Sandbox, Shape
from hpcjobs.site.rehearsal import Rehearsal

Say = Callable[[str], None]


def build(folder: Folder, layout: Layout, *, shape: Shape, say: Say) -> Sandbox:
    """A whole sandbox in an empty folder; its record is written last.

    Raises:
        HpcJobsError: a step failed; what was made stands.
    """
    password = secrets.token_hex(16)
    _write_files(folder, layout, password=password)
    if layout.proctrack == "cgroup":
        cgroups.mount(folder)
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
    write(folder.slurm_conf, slurm_files.slurm_conf(layout, folder))
    modules.write_modulefiles(folder, layout.modules)
    write(folder.task_prolog, slurm_files.TASK_PROLOG, mode=0o755)
    if (text := slurm_files.cgroup_conf(layout, folder, version=services.slurm_version())) is not None:
        write(folder.etc / "cgroup.conf", text)
    write(folder.etc / "gres.conf", slurm_files.gres_conf(layout, folder))
    write(folder.etc / "slurmdbd.conf", slurm_files.slurmdbd_conf(layout, folder, password=password), mode=0o600)
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
    """Start what died; jobs and their records stay.

    Raises:
        HpcJobsError: a daemon did not come back.
    """
    services.restart_dead(folder)
    daemons = recorded_daemons(folder)
    _await_nodes(folder, len(sandbox.hosts), watch=daemons)
    before = msgspec.json.decode(folder.record.read_bytes(), type=Rehearsal)
    controller = next(daemon for daemon in daemons if daemon.name == "slurmctld")
    now = msgspec.structs.replace(before, controller_pid=controller.pid, controller_start=controller.start_ticks)
    write(folder.record, msgspec.json.encode(now).decode())
