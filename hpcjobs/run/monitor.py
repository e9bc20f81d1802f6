"""The sampler of `hpcjobs.node.monitor`, attached to a running job: one overlapping step with a task per node.

The job may have been submitted by other means: then its id is all that is needed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

from hpcjobs.errors import HpcJobsError, RequestError, SchedulerDownError, SchedulerError, UnknownJobError
from hpcjobs.files import make_own_folder, write_beside
from hpcjobs.guards import refuse_change
from hpcjobs.job.environment import choose_node_python
from hpcjobs.job.script import MONITOR_PROGRAM, locate_run_root
from hpcjobs.processes.programs import Runner, run, start
from hpcjobs.pyz import pack
from hpcjobs.run import folder
from hpcjobs.run.folder import make_root
from hpcjobs.run.identity import require_reachable
from hpcjobs.run.index import Entry
from hpcjobs.run.interactive import attach
from hpcjobs.run.job_files import current_id, own_ids
from hpcjobs.run.progress import NodeSample, idle_s, newest_samples, open_samplers
from hpcjobs.run.rerun import read_manifest
from hpcjobs.run.select import require_own
from hpcjobs.run.status import Connect, statuses
from hpcjobs.run.wait import Watch
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.scheduler.base import JobRecord, Report, State
from hpcjobs.scheduler.connect import connect
from hpcjobs.scheduler.slurm.parse import parse_scontrol
from hpcjobs.site.models import Site
from hpcjobs.slurm_commands import cluster_env, show_job, start_beside

FRESH_S = 15.0
"""Greatest age of the newest sample of a node that has a sampler; at least three intervals."""
_POLL_S = 1.0
_BEGIN_AGAIN_S = 30.0
"""Between two starts of a sampler: each asks the scheduler whether the job runs."""


_GO_ON = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")
"""Options of srun: when a node of an elastic job fails, the samplers of the others go on."""


def write_program(run_dir: Path) -> Path:
    """Put the sampler into a run folder."""
    path = run_dir / MONITOR_PROGRAM
    write_beside(path, pack("hpcjobs.node.monitor"))
    return path


def is_sampled(entry: Entry, *, now: float | None = None) -> bool:
    """Whether somebody takes samples of the job already: a trainer with --monitor, or a job submitted with it.

    As far as the nodes' clocks tell; a sampler that is started in vain notices the other one on its node, and ends.
    """
    moment = time.time() if now is None else now
    samplers = open_samplers(samples_dir(entry))
    return any(moment - each.newest.taken < fresh_for_s(each.interval_s) for each in samplers)


def fresh_for_s(interval_s: float) -> float:
    """How long a sample counts as new where the next one comes after ``interval_s``."""
    return max(FRESH_S, 3 * interval_s)


def samples_dir(entry: Entry) -> Path:
    """Folder with the samples of the job or array task."""
    return folder.output_dir(Path(entry.run_dir), own_ids(entry)[0])


def require_running(entry: Entry, *, connect: Connect = connect) -> JobRecord:
    """The record of a job that has processes now; others are refused.

    Raises:
        RequestError: the job does not run, is an array, or belongs to another host, cluster or user.
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
        """Begin.

        Raises:
            RequestError: as `require_running`.
        """
        self._prepare()
        if is_sampled(self._entry):
            self._report(f"job {self._entry.job_id} is sampled already: watching")
        else:
            self._sampler = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            stop(self._sampler)

    def follow(self, *, pause: Callable[[float], None] = time.sleep) -> Iterator[list[NodeSample]]:
        """The newest sample of each node of the attempt that runs, every second, until the job has ended.

        Raises:
            HpcJobsError: the sampler ended before its first sample, and the job runs.
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
                self.nodes = len(hosts_of(record.node_list or "")) or 1

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
        arguments = [read_manifest(Path(entry.run_dir)).job.node_python, "-I", str(program), str(samples_dir(entry))]
        if not entry.kind.runs_steps:
            argv = [*arguments, current_id(entry), str(self._interval_s)]
            return start(argv, env={"HPCJOBS_MONITOR": "1"}, stderr=PIPE)
        command = attach(entry, arguments, terminal=False, connect=self._connect)
        job_id = next(text for text in command.argv if text.startswith("--jobid=")).partition("=")[2]
        argv = [command.argv[0], *_GO_ON, *command.argv[1:], job_id, str(self._interval_s)]
        return start(argv, cwd=command.cwd, env={**command.env, "HPCJOBS_MONITOR": "1"}, stderr=PIPE)


def stop(sampler: Popen[bytes]) -> None:
    """End a sampler, and close its pipe."""
    with sampler:
        sampler.terminate()


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

    Raises:
        UnknownJobError: Slurm does not know it. RequestError: it does not run, or is an array.
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
    if len(records) > 1:
        raise RequestError(f"job {name} is an array", hint=f"name one of its tasks: {records[0].job_id}")
    if not records or records[0].state is not State.RUNNING or not records[0].node_list:
        states = ", ".join(record.state.value for record in records) or "unknown"
        raise RequestError(f"job {name} is {states}: it has no processes to sample")
    number = re.search(r"JobId=(\d+)", shown)
    assert number is not None  # of each record of scontrol's
    folder = locate_run_root(site, Path.cwd()) / f"monitor-{name}"
    nodes = tuple(hosts_of(records[0].node_list))
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
    return ForeignSampler(start(argv, env={**env, "HPCJOBS_MONITOR": "1"}, stderr=PIPE), old)


def follow_sampler(
    job: ForeignJob, sampler: ForeignSampler, *, pause: Callable[[float], None] = time.sleep
) -> Iterator[list[NodeSample]]:
    """The newest sample of each node, every second, until the sampler ends, as it does with the job; then the last."""
    while sampler.process.poll() is None:
        yield _without(sampler.old, newest_samples(job.folder))
        pause(_POLL_S)
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
            reason = "its GPUs cannot be read, or a trainer takes its samples"
            doubt = f"how long {', '.join(unknown)} is idle is not known ({reason})"
        elif is_late:
            doubt = f"no new sample from {expected - len(fresh)} of the job's {expected} nodes"
        if doubt and doubt != self._reported:
            self._report(f"--cancel-idle has no effect: {doubt}")
        self._reported = doubt or self._reported
