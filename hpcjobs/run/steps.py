"""Steps in the allocation of a running job: shells, commands and the sampler of its nodes; and new allocations.

The job of a sampler may have been submitted by other means: then its id is all that is needed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import NamedTuple

from msgspec.structs import replace

from hpcjobs import slurm_commands
from hpcjobs.errors import HpcJobsError, RequestError, SchedulerDownError, SchedulerError, UnknownJobError
from hpcjobs.files import file_name, make_own_folder, write_beside
from hpcjobs.guards import refuse_change
from hpcjobs.job.environment import MONITOR_PROGRAM, choose_node_python, locate_run_root
from hpcjobs.job.launch import Raw, command_line, launch
from hpcjobs.job.layers import VARIABLES
from hpcjobs.job.models import Job, Plan
from hpcjobs.job.options import sbatch_options
from hpcjobs.job.script import setup_text
from hpcjobs.packing import pack
from hpcjobs.processes.fork import die_with_parent
from hpcjobs.processes.programs import Runner, run, start
from hpcjobs.run import folder
from hpcjobs.run.budget import count_against_budget
from hpcjobs.run.folder import make_root
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import current_id, output_dir, own_ids, read_job_manifest, read_state, task_dir
from hpcjobs.run.progress import NodeSample, idle_s, newest_samples, open_samplers
from hpcjobs.run.select import require_own
from hpcjobs.run.status import Connect, require_reachable, statuses
from hpcjobs.run.wait import Watch
from hpcjobs.scheduler.base import JobRecord, Report, State, connect
from hpcjobs.scheduler.slurm.parse import parse_scontrol
from hpcjobs.site.models import Site
from hpcjobs.site.resources import is_option_where
from hpcjobs.slurm_commands import cluster_env, read_hosts, show_job, start_beside

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

    Raises RequestError: the job does not run, is no Slurm job of this cluster or not this user's, or has no such node
    or rank.
    """
    refuse_change("run a program in a job")
    require_reachable([entry])
    if not entry.kind.runs_steps:
        raise RequestError(f"job {entry.job_id} runs on this machine itself", hint="run the command here")
    (known,) = statuses([entry], connect=connect)
    record = _running(entry, known.records)
    require_own(entry, known.records)
    run_dir = Path(entry.run_dir)
    job = read_job_manifest(run_dir).job
    nodes = read_hosts(record.node_list)
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
    shell = _shell(job, task_dir(run_dir, record.job_id), job_id, run_dir)
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
        f"export HPCJOBS_SCHEDULER={job.scheduler} HPCJOBS_JOB_ID={job_id or f'${job.kind.id_variable}'}",
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

    Raises RequestError: the site has no Slurm, or the request is for an array or a batch script.
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
    # Those of VARIABLES are options of the job already, where its site may have replaced them.
    env = {name: value for name, value in env.items() if name.removeprefix("SALLOC_") not in VARIABLES}
    command = Command((*argv, *within), job.chdir, env | slurm_commands.cluster_env(job.slurm_conf))
    with count_against_budget(job, "salloc") as give_back:
        folder.create(plan, None)
        _write_rc(job, plan.run_dir, task_dir=plan.run_dir, job_id=None)
        made = _paths(plan.run_dir)
        try:
            code = run(command)
            # The shell did not begin: salloc got no nodes, and nothing of the budget was used.
            if code in _NOT_ALLOCATED and not (plan.run_dir / "shell" / STARTED).exists():
                give_back()
        finally:
            if _paths(plan.run_dir) <= made:
                folder.remove(plan)
    return code


def _paths(run_dir: Path) -> set[Path]:
    """Files of a run folder except the bash files of hpcjobs."""
    return {path for path in run_dir.rglob("*") if path.parts[len(run_dir.parts)] != "shell"}


FRESH_S = 15.0
"""Greatest age of the newest sample of a node that has a sampler; at least three intervals."""
_POLL_S = 1.0
_BEGIN_AGAIN_S = 30.0
"""Between two starts of a sampler: each asks the scheduler whether the job runs."""
_LONGEST_STOP_S = 30.0


_GO_ON = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""Options of srun: when a node of an elastic job fails, the samplers of the others go on."""


def write_program(run_dir: Path) -> Path:
    """Put the sampler into a run folder."""
    path = run_dir / MONITOR_PROGRAM
    write_beside(path, pack("hpcjobs.node.monitor"))
    return path


def fresh_for_s(interval_s: float) -> float:
    """How long a sample counts as new where the next one comes after ``interval_s``."""
    return max(FRESH_S, 3 * interval_s)


def samples_dir(entry: Entry) -> Path:
    """Folder with the samples of the job or array task."""
    return output_dir(Path(entry.run_dir), own_ids(entry)[0])


def require_running(entry: Entry, *, connect: Connect = connect) -> JobRecord:
    """The record of a job that has processes now; others are refused.

    Raises RequestError: the job does not run, is an array, or belongs to another host, cluster or user.
    """
    require_reachable([entry])
    if entry.array is not None and entry.task is None:
        raise RequestError(f"job {entry.job_id} is an array", hint=f"name one of its tasks: {own_ids(entry)[0]}")
    (known,) = statuses([entry], connect=connect)
    running = next((record for record in known.records if record.state is State.RUNNING), None)
    if running is None:
        states = ", ".join(record.state.value for record in known.records)
        raise RequestError(f"job {own_ids(entry)[0]} is {states}: it has no processes to sample")
    return running


class JobSampling:
    """The samples of a job until it ends; this process starts a sampler whenever no other one runs.

    So they go on where another `hpcjobs monitor` is ended, and in the next attempt of a job that is requeued. Whether
    samples come is decided by this machine's clock alone: the clocks of the nodes may differ.
    """

    def __init__(self, entry: Entry, *, interval_s: float, report: Report, connect: Connect = connect) -> None:
        self._entry, self._interval_s, self._report, self._connect = entry, interval_s, report, connect
        self._sampler: Popen[bytes] | None = None
        self._old: frozenset[_Mark] = frozenset()
        self._newest: frozenset[_Mark] = frozenset()
        self._came = 0.0
        self.nodes = 0
        """How many nodes the job has now; 1 on this machine."""

    def __enter__(self) -> JobSampling:
        """Begin. Raises RequestError: as `require_running`."""
        self._prepare()
        now, samplers = time.time(), open_samplers(samples_dir(self._entry))
        # By the nodes' clocks: a sampler that is started in vain notices the other one on its node, and ends.
        if any(now - each.newest.taken < fresh_for_s(each.interval_s) for each in samplers):
            self._report(f"job {self._entry.job_id} is sampled already: watching")
        else:
            self._sampler = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            stop(self._sampler)

    def follow(self, *, pause: Callable[[float], None] = time.sleep) -> Iterator[list[NodeSample]]:
        """The newest sample of each node of the attempt that runs, every second, until the job has ended.

        Raises HpcJobsError: the sampler ended before its first sample, and the job runs.
        """
        watch, next_try = Watch([self._entry], progress=self._count_nodes, connect=self._connect), 0.0
        while True:
            while watch.look():
                newest = _without(self._old, newest_samples(samples_dir(self._entry)))
                if (marks := _marks(newest)) != self._newest:
                    self._newest, self._came = marks, time.monotonic()
                yield newest
                if not self._is_sampled() and time.monotonic() >= next_try:
                    next_try = time.monotonic() + _BEGIN_AGAIN_S
                    self._begin_again(newest)
                pause(_POLL_S)
            known = watch.final(pause=pause)
            if known is None or watch.is_over(known):
                return
            watch.again(known)  # it was requeued

    def _is_sampled(self) -> bool:
        """Whether a sampler runs: of this process, or another one that writes samples."""
        code = 0 if self._sampler is None else self._sampler.poll()
        if code != 0:
            return code is None
        intervals = [sampler.interval_s for sampler in open_samplers(samples_dir(self._entry))]
        return bool(intervals) and time.monotonic() - self._came < fresh_for_s(max(intervals))

    def _prepare(self) -> None:
        """Count the nodes that the job has now, and leave out the samples that are there already."""
        self._count_nodes([require_running(self._entry, connect=self._connect)])
        self._old, self._newest = _marks(newest_samples(samples_dir(self._entry))), frozenset()
        self._came = time.monotonic()

    def _count_nodes(self, records: Iterable[JobRecord]) -> None:
        """Ask the scheduler: an elastic job loses nodes, and the job's own record is of its start."""
        for record in records:
            if record.state is State.RUNNING and record.source != "job":
                self.nodes = len(read_hosts(record.node_list)) or 1

    def _begin_again(self, newest: Sequence[NodeSample]) -> None:
        """Start the sampler again, unless the job has ended or waits for its next attempt."""
        own, self._sampler = self._sampler, None
        reason = None if own is None else read_error(own)
        try:
            self._prepare()
            if reason is None or newest:
                self._sampler = self._start()
        except (RequestError, SchedulerError):  # looked at again later
            return
        if self._sampler is None:
            raise HpcJobsError(f"the sampler of job {self._entry.job_id} ended: {reason}")
        self._report(f"nobody sampled job {self._entry.job_id} any more: its sampling begins again")

    def _start(self) -> Popen[bytes]:
        """The sampler on each node of a running job; on Slurm it ends with the job, everywhere by SIGTERM."""
        refuse_change("sample a job")
        entry = self._entry
        require_own(entry, statuses([entry], connect=self._connect)[0].records)
        program = write_program(Path(entry.run_dir))
        arguments = [
            read_job_manifest(Path(entry.run_dir)).job.node_python,
            "-I",
            str(program),
            str(samples_dir(entry)),
        ]
        if not entry.kind.runs_steps:
            argv = [*arguments, current_id(entry), str(self._interval_s)]
            return _start_sampler(argv, env={})
        command = attach(entry, arguments, terminal=False, connect=self._connect)
        job_id = next(text for text in command.argv if text.startswith("--jobid=")).partition("=")[2]
        argv = [command.argv[0], *_GO_ON, *command.argv[1:], job_id, str(self._interval_s)]
        return _start_sampler(argv, env=command.env, cwd=command.cwd)


def _start_sampler(argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None = None) -> Popen[bytes]:
    """Start a sampler, or the srun that starts it on the nodes: it gets SIGTERM when this process is killed, too."""
    end_with_this = partial(die_with_parent, os.getpid(), signal.SIGTERM)
    return start(argv, cwd=cwd, env={**env, "HPCJOBS_MONITOR": "1"}, stderr=PIPE, prepare=end_with_this)


def stop(sampler: Popen[bytes]) -> None:
    """End a sampler, and close its pipe."""
    with sampler:
        sampler.terminate()
        try:
            sampler.wait(_LONGEST_STOP_S)
        except TimeoutExpired:  # a srun without an answer of Slurm
            sampler.kill()


def read_error(sampler: Popen[bytes]) -> str | None:
    """Why a sampler that has ended failed: its last line; None: it did not fail."""
    with sampler:
        assert sampler.stderr is not None
        lines = sampler.stderr.read().decode(errors="replace").strip().splitlines()
    if not sampler.returncode:
        return None
    return lines[-1] if lines else f"exit code {sampler.returncode}"


_Mark = tuple[str, float]
"""Host and time of a sample."""


def _marks(nodes: Iterable[NodeSample]) -> frozenset[_Mark]:
    return frozenset((node.host, node.taken) for node in nodes)


def _without(old: Collection[_Mark], nodes: Iterable[NodeSample]) -> list[NodeSample]:
    """The samples of ``nodes`` that have come since ``old``."""
    return [node for node in nodes if (node.host, node.taken) not in old]


class ForeignJob(NamedTuple):
    """A running job of Slurm's that was submitted by other means."""

    job_id: str
    """Slurm's raw id: a plain number for an array task too, not 12_3."""
    nodes: tuple[str, ...]
    folder: Path
    """Folder of the samples."""
    node_python: str
    slurm_conf: str | None


def find_foreign(name: str, site: Site, *, runner: Runner = run) -> ForeignJob:
    """The running job with the id ``name``, by one question to Slurm.

    Raises UnknownJobError: Slurm does not know it. RequestError: it does not run, is an array or is heterogeneous.
    SchedulerError: Slurm does not answer.
    """
    slurm = connect(site.scheduler, site.slurm_conf, runner=runner)
    try:
        shown = slurm.query(show_job(name, siblings=True))
    except SchedulerDownError:
        raise
    except SchedulerError as error:
        raise UnknownJobError(
            f"no job {name} was submitted with hpcjobs, and Slurm does not know it: {error.message}"
        ) from error
    records = parse_scontrol(shown)
    if records and "+" in records[0].job_id:  # srun reaches its components by --het-group alone
        raise RequestError(f"job {name} is heterogeneous: its components cannot be sampled")
    if len(records) > 1:
        raise RequestError(f"job {name} is an array", hint=f"name one of its tasks: {records[0].job_id}")
    if not records or records[0].state is not State.RUNNING or not records[0].node_list:
        states = ", ".join(record.state.value for record in records) or "unknown"
        raise RequestError(f"job {name} is {states}: it has no processes to sample")
    number = re.search(r"JobId=(\d+)", shown)
    assert number is not None  # of each record of scontrol's
    folder = locate_run_root(site, Path.cwd()) / f"monitor-{name}"
    nodes = tuple(read_hosts(records[0].node_list))
    return ForeignJob(number[1], nodes, folder, choose_node_python(site), site.slurm_conf)


class ForeignSampler(NamedTuple):
    """The sampler of such a job, and the samples that were there before it."""

    process: Popen[bytes]
    old: frozenset[_Mark]


def start_foreign_sampler(job: ForeignJob, *, interval_s: float) -> ForeignSampler:
    """Start the sampler on each node of ``job``, into its folder; it ends with the job, or by SIGTERM."""
    refuse_change("sample a job")
    make_root(job.folder.parent)
    make_own_folder(job.folder)
    program = write_program(job.folder)
    arguments = (job.node_python, "-I", str(program), str(job.folder), job.job_id, str(interval_s))
    env = cluster_env(job.slurm_conf)
    old = _marks(newest_samples(job.folder))
    argv = start_beside(job.job_id, job.nodes, *_GO_ON, *arguments)
    return ForeignSampler(_start_sampler(argv, env=env), old)


def follow_sampler(job: ForeignJob, sampler: ForeignSampler) -> Iterator[list[NodeSample]]:
    """The newest sample of each node, every second, until the sampler ends, as it does with the job; then the last."""
    while sampler.process.poll() is None:
        yield _without(sampler.old, newest_samples(job.folder))
        time.sleep(_POLL_S)
    yield _without(sampler.old, newest_samples(job.folder))


class IdleLimit:
    """Looks at the newest samples of a job's nodes; a node without a new one may be busy.

    A sample is new for some time after it came, by this machine's clock: the clocks of the nodes may differ from it.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        interval_s: float,
        count_nodes: Callable[[], int],
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._fresh_s, self._count_nodes = limit_s, fresh_for_s(interval_s), count_nodes
        self._report, self._clock = report, clock
        self._came: dict[str, tuple[float, float]] = {}
        """By the host: when its newest sample was taken by the node's clock, and when it came by this machine's."""
        self._complete = clock()
        self._reported = ""

    def exceeded_s(self, nodes: Sequence[NodeSample]) -> float | None:
        """For how long all nodes have been idle, if that is too long; None: it is not, or it is not known."""
        now, expected = self._clock(), self._count_nodes()
        for node in nodes:
            if self._came.get(node.host, (None,))[0] != node.taken:
                self._came[node.host] = (node.taken, now)
        fresh = [node for node in nodes if now - self._came[node.host][1] < self._fresh_s]
        if len(fresh) >= expected:
            self._complete = now
        self._report_doubts(fresh, expected, is_late=now - self._complete >= self._fresh_s)
        idle_for_s = idle_s(fresh, expected=expected)
        return idle_for_s if idle_for_s is not None and idle_for_s >= self._limit_s else None

    def _report_doubts(self, fresh: Sequence[NodeSample], expected: int, *, is_late: bool) -> None:
        """Say once why the job is not cancelled, whatever it does."""
        doubt = ""
        if unknown := [node.host for node in fresh if node.sample.idle_s is None]:
            doubt = f"how long {', '.join(unknown)} is idle is not known (its GPUs cannot be read)"
        elif is_late:
            doubt = f"no new sample from {expected - len(fresh)} of the job's {expected} nodes"
        if doubt and doubt != self._reported:
            self._report(f"--cancel-idle has no effect: {doubt}")
        self._reported = doubt or self._reported
