"""Shells and commands on the nodes of a running job (``srun --overlap``), or of a new allocation (``salloc``)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hpcjobs import slurm_commands
from hpcjobs.errors import RequestError
from hpcjobs.files import file_name, write_beside
from hpcjobs.guards import refuse_change
from hpcjobs.job.directives import sbatch_options
from hpcjobs.job.launch import Raw, command_line, launch
from hpcjobs.job.layers import VARIABLES
from hpcjobs.job.models import Job, Plan
from hpcjobs.job.script import setup_text
from hpcjobs.run import folder
from hpcjobs.run.budget import count_against_budget
from hpcjobs.run.identity import require_reachable
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import current_id, read_state
from hpcjobs.run.rerun import read_manifest
from hpcjobs.run.select import require_own
from hpcjobs.run.status import Connect, statuses
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler.connect import connect
from hpcjobs.site.resources import is_option_where

RC = "interactive.bash"
STARTED = "started"
"""In the same folder, of an allocation: its command has begun."""
_NOT_ALLOCATED = (1, 255)
"""Exit codes of a salloc that was refused, or did not understand an option; a command may end with them too."""
_MPI_TYPE = "SLURM_MPI_TYPE"
"""Set by the ``srun --mpi=none`` that starts a shell; an srun within the shell must not inherit it."""


class Command(NamedTuple):
    """A command for this terminal."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]


def attach(
    entry: Entry,
    arguments: Sequence[str],
    *,
    node: str | None = None,
    rank: int | None = None,
    terminal: bool,
    connect: Connect = connect,
) -> Command:
    """The command that runs ``arguments`` (empty: a shell) within a running job.

    A shell starts on one node, the first one unless ``node`` or ``rank`` names another; other commands on every node.

    Raises:
        RequestError: the job does not run, is no Slurm job of this cluster or not this user's, or has no such node or
            rank.
    """
    refuse_change("run a program in a job")
    require_reachable([entry])
    if not entry.kind.runs_steps:
        raise RequestError(f"job {entry.job_id} runs on this machine itself", hint="run the command here")
    (known,) = statuses([entry], connect=connect)
    record = _running(entry, known.records)
    require_own(entry, known.records)
    run_dir = Path(entry.run_dir)
    job = read_manifest(run_dir).job
    nodes = hosts_of(record.node_list or "")
    if node is not None or rank is not None:
        nodes = [_node_of(job, nodes, node, rank)]
    elif not arguments:
        nodes = nodes[:1]
    state = read_state(entry, record.job_id)
    job_id = state.job_id if state is not None and entry.task is not None else current_id(entry)
    argv = slurm_commands.start_beside(job_id, nodes)
    if terminal and len(nodes) == 1:
        argv.append("--pty")
    elif len(nodes) > 1:
        argv.append("--label")
    shell = _shell(job, folder.task_dir(run_dir, record.job_id), job_id, run_dir)
    folder_there = job.chdir if os.path.isdir(job.chdir) else "/"
    return Command((*argv, *(arguments or shell)), folder_there, slurm_commands.cluster_env(entry.slurm_conf))


def _running(entry: Entry, records: Sequence[JobRecord]) -> JobRecord:
    running = [record for record in records if record.state is State.RUNNING and record.node_list]
    if len(running) == 1:
        return running[0]
    if running:
        hint = f"name one of its tasks: {running[0].job_id}"
        raise RequestError(f"job {entry.job_id} has {len(running)} running tasks", hint=hint)
    states = ", ".join(dict.fromkeys(record.state.value for record in records))
    raise RequestError(f"job {entry.job_id} is {states}: it has no nodes to run a command on")


def _node_of(job: Job, nodes: list[str], node: str | None, rank: int | None) -> str:
    if node is not None and rank is not None:
        raise RequestError("--node and --rank exclude each other")
    if node is not None:
        if node not in nodes:
            raise RequestError(f"--node {node}: the job runs on {', '.join(nodes)}")
        return node
    assert rank is not None
    if job.batch_script is not None or rank not in range(len(nodes) * job.ntasks_per_node):
        last = len(nodes) * job.ntasks_per_node - 1
        ranks = "of a batch script are unknown" if job.batch_script else f"are 0 to {last}"
        raise RequestError(f"--rank {rank}: the job's ranks {ranks}", hint="--node names a node")
    return nodes[rank // job.ntasks_per_node]


def _shell(job: Job, task_dir: Path, job_id: str, run_dir: Path) -> tuple[str, ...]:
    """bash with the software and the environment of the job's tasks; of a batch script, a login shell."""
    if job.batch_script is not None:
        return ("env", "-u", _MPI_TYPE, "bash", "-il")
    return _interactive_bash(_write_rc(job, run_dir, task_dir=task_dir, job_id=job_id))


def _interactive_bash(rc: Path) -> tuple[str, ...]:
    return ("bash", "--rcfile", str(rc), "-i")


def _write_rc(job: Job, run_dir: Path, *, task_dir: Path, job_id: str | None) -> Path:
    """Write the start file of a shell on a node; without ``job_id`` the shell's own allocation counts."""
    ranks = launch(replace(job, argv=(Raw('"$@"'),)))
    mpi = os.environ.get(_MPI_TYPE)
    lines = [
        f"unset {_MPI_TYPE}" if mpi is None else f"export {_MPI_TYPE}={shlex.quote(mpi)}",
        "[ ! -r ~/.bashrc ] || . ~/.bashrc",
        f"export HPCJOBS_SCHEDULER=slurm HPCJOBS_JOB_ID={job_id or '$SLURM_JOB_ID'}",
        f"export HPCJOBS_RUN_DIR={shlex.quote(str(task_dir))} _hj_shell={shlex.quote(str(run_dir / 'shell'))}",
        setup_text(job, run_dir, launched_by=job.launcher),
        *ranks.before,
        "ranks() { # PROGRAM [ARGUMENTS]...: start it as the tasks of a job, with their rank environment",
        f"    {command_line(ranks.command)}",
        "}",
        *([f": >{shlex.quote(str(run_dir / 'shell' / STARTED))}"] if job_id is None else []),
        f"PS1='({file_name(job.name)}) \\h:\\w\\$ '",
    ]
    path = run_dir / "shell" / RC
    write_beside(path, "\n".join(lines) + "\n")
    return path


def allocate(plan: Plan, arguments: Sequence[str], *, terminal: bool, run: Callable[[Command], int]) -> int:
    """Allocate the nodes of ``plan`` and run ``arguments`` (empty: a shell) on the first one; the exit code.

    The run folder is removed at the end unless the command has written a file there.

    Args:
        run: runs the command of the allocation on this terminal, and returns its exit code.

    Raises:
        RequestError: the site has no Slurm, or the request is for an array or a batch script.
    """
    job = plan.job
    if not job.kind.has_nodes:
        raise RequestError(f"site {job.site} ({job.site_file}) is this machine: there is nothing to allocate")
    if job.resources.array or job.batch_script is not None:
        raise RequestError("an allocation is neither a job array nor a batch script", hint="hpcjobs submit")
    refuse_change("alloc")
    rc = plan.run_dir / "shell" / RC
    options = [
        ("job-name", job.name),
        *(option for option in sbatch_options(job) if not is_option_where(option[0], "only_sbatch")),
    ]
    flags = (f"--{name}" if value is None else f"--{name}={value}" for name, value in options)
    argv = slurm_commands.allocate(flags, terminal=terminal)
    within = ("bash", "-c", '. "$0" && exec "$@"', str(rc), *arguments) if arguments else _interactive_bash(rc)
    env = {name: value for name, value in os.environ.items() if name.startswith("SALLOC_")}
    env = {name: value for name, value in env.items() if name.removeprefix("SALLOC_") not in VARIABLES}
    command = Command((*argv, *within), job.chdir, env | slurm_commands.cluster_env(job.slurm_conf))
    with count_against_budget(job, "salloc") as give_back:
        folder.create(plan, None)
        _write_rc(job, plan.run_dir, task_dir=plan.run_dir, job_id=None)
        made = _paths(plan.run_dir)
        try:
            code = run(command)
            if code in _NOT_ALLOCATED and not (plan.run_dir / "shell" / STARTED).exists():
                give_back()
        finally:
            if _paths(plan.run_dir) <= made:
                folder.remove(plan)
    return code


def _paths(run_dir: Path) -> set[Path]:
    """Files of a run folder except the bash files of hpcjobs."""
    return {path for path in run_dir.rglob("*") if path.parts[len(run_dir.parts)] != "shell"}
