"""Runs Slurm's commands: sbatch, squeue, sacct, scontrol, scancel."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from hpcjobs import slurm_commands
from hpcjobs.errors import CommandMissingError, HpcJobsWarning, SchedulerDownError, SchedulerError
from hpcjobs.files import user_name
from hpcjobs.guards import refuse_change
from hpcjobs.job.models import Job, Plan
from hpcjobs.processes.programs import Result, Runner, run, run_following
from hpcjobs.record import STATE
from hpcjobs.record.state import read_state_file
from hpcjobs.scheduler.base import Estimate, JobRecord, Submitted, name_signal
from hpcjobs.scheduler.slurm.estimates import estimate_start
from hpcjobs.scheduler.slurm.parse import (
    ACCOUNTED,
    ACCOUNTED_BEFORE_20_11,
    QUEUED,
    SUBMISSIONS,
    is_refused_by_ended_alone,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
    parse_submitted,
)
from hpcjobs.units import parent_id, task_ids

_ACCOUNT = "sacctmgr show associations user=$USER lists what you may use"
_NODE = "no node has all of this: fewer CPUs, GPUs or less memory per node; `sinfo -N -l` lists what nodes have"
_RESERVATION = "`scontrol show reservation` lists the reservations, with their users, partitions and times"
_LIMITS = "`sacctmgr show qos` and `sacctmgr show associations user=$USER` list the limits"

HINTS: tuple[tuple[str, str], ...] = (
    (": no error", "the tasks with 'No error' were changed, the others were not"),
    # Who asks.
    ("invalid account", f"name an account that the partition and your user have: -A ACCOUNT; {_ACCOUNT}"),
    ("invalid qos", f"name a QOS that the account and the partition allow: -q QOS; {_ACCOUNT}"),
    (
        "qosmax",
        f"a limit of the QOS for one job or user: fewer nodes, GPUs or a shorter --time, or another -q; {_LIMITS}",
    ),
    ("qosmin", f"the QOS has a least size of jobs: a larger job, or another -q; {_LIMITS}"),
    (
        "violates accounting/qos policy",
        f"fewer jobs in the queue, a smaller or a shorter job, or another -q or -A; {_LIMITS}",
    ),
    (
        "breached requested qos usage threshold",
        f"the account has used up its share for this QOS: another -q or -A; {_LIMITS}",
    ),
    (
        "user's group not permitted",
        "the partition is for certain groups: `scontrol show partition` names them (AllowGroups)",
    ),
    (
        "access/permission denied",
        "your user may not do this here, or not from this host: `scontrol show partition` has AllowGroups, AllocNodes",
    ),
    (
        "access denied to requested reservation",
        f"your user or account is not among the reservation's; {_RESERVATION}",
    ),
    ("invalid wckey", "name a workload key that you have: -o wckey=KEY; `sacctmgr show wckey` lists them"),
    ("user not found on host", "your user is not known on the controller: ask the administrators"),
    ("invalid user id", "your user is not known on the controller: ask the administrators"),
    ("invalid group id", "your group is not known on the controller: ask the administrators"),
    ("partition is set in the association", "your account is bound to one partition: name one with -p"),
    # Where and how large.
    ("invalid partition", "`sinfo -s` lists the partitions; the site file should agree"),
    ("no partition specified", "name a partition: -p PARTITION; `sinfo -s` lists them"),
    ("required partition not available", "the partition is down or drained: another -p; `sinfo -s` shows its state"),
    (
        "requested partition configuration not available",
        "the partition's limits or state do not allow it now: another -p, or a smaller job",
    ),
    (
        "nodes not in this partition",
        "the nodes named with -o nodelist belong to another partition: `sinfo -N -p PARTITION` lists its nodes",
    ),
    ("invalid node name", "`sinfo -N` lists the nodes; look at -o nodelist and -o exclude"),
    (
        "required node not available",
        "nodes named with -o nodelist are down, drained or reserved: `sinfo -R` says why",
    ),
    (
        "node count specification invalid",
        "more or fewer nodes than the partition allows: `scontrol show partition` has MinNodes and MaxNodes",
    ),
    ("node configuration is not available", _NODE),
    ("more processors requested than permitted", "fewer tasks or CPUs: `scontrol show partition` has MaxCPUsPerNode"),
    ("cpu count specification invalid", "--ntasks-per-node and --cpus-per-task do not fit together, or into a node"),
    ("task count specification invalid", "--nodes and --ntasks-per-node do not fit together"),
    ("task distribution specification invalid", "look at -o distribution: man sbatch lists the words"),
    ("more tasks than available processors", "fewer tasks per node, or -o overcommit=1"),
    (
        "memory required by task is not available",
        "less memory per node or CPU: `scontrol show partition` has MaxMemPerNode and MaxMemPerCPU",
    ),
    ("job size specification needs to be provided", "set the number of nodes or tasks: -N"),
    ("invalid feature specification", "no node has this feature: `sinfo -o '%f'` lists them; look at -o constraint"),
    ("invalid preferred feature", "no node has this feature: `sinfo -o '%f'` lists them; look at -o prefer"),
    ("--batch option is invalid", "the feature of --batch is not one of -o constraint"),
    (
        "invalid generic resource",
        "no node has this resource or GPU model: `sinfo -o '%G'` lists them; look at --gpus-per-node and -o gres",
    ),
    ("duplicate generic resource", "the same resource is requested twice in -o gres"),
    (
        "invalid gres specification",
        "GPUs with and without a model cannot be mixed: name the model in all of them, or in none",
    ),
    ("gres option unsupported", "this cluster has no select/cons_tres: `gpu_request: gres` in the site file"),
    ("insufficient gres", "fewer GPUs: `sinfo -o '%G'` lists what nodes have"),
    ("invalid trackable resource", "look at -o gres and -o licenses: `sacctmgr show tres` lists what there is"),
    ("invalid license", "`scontrol show licenses` lists the licenses; look at -o licenses"),
    ("multiple knl", "one -o constraint for all nodes"),
    ("invalid knl", "look at -o constraint: no node has this NUMA or MCDRAM mode"),
    ("more threads per core", "-o threads_per_core has more than the nodes have"),
    (
        "requested operation not supported",
        "the cluster's Slurm was set up without what is requested: leave the last option out",
    ),
    (
        "requested operation is presently disabled",
        (
            "the cluster does not allow it: a requeue for good (`hpcjobs rerun JOB` submits it anew), or submitting "
            "for now (`sinfo` and the site's news say more)"
        ),
    ),
    # When.
    (
        "requested time limit is invalid",
        (
            "a shorter --time, or one at all: `sinfo -o '%P %l'` lists the limits, and the site file's max_time "
            "should say so"
        ),
    ),
    ("time limit specification required", "use --time: this cluster has no default"),
    ("invalid time-min", "-o time_min is no longer than --time and the partition's limit"),
    ("requested reservation is invalid", f"no reservation of that name for this job; {_RESERVATION}"),
    ("requested reservation not usable", f"it has not begun, has ended, or has no room for this job; {_RESERVATION}"),
    ("job dependency problem", "a job of --after is unknown or cannot end so: `hpcjobs ps` shows it"),
    (
        "invalid job array",
        "indices up to MaxArraySize - 1 (`scontrol show config | grep MaxArraySize`); a sweep submits more in parts",
    ),
    ("immediate execution impossible", "nothing is free now; leave immediate out, and the job waits"),
    ("invalid burst buffer", "look at -o bb and -o bbf"),
    ("burst buffer", "look at -o bb and -o bbf"),
    ("accounting frequency", "look at -o acctg_freq: man sbatch lists the words"),
    ("invalid nice", "look at -o nice: users may only make it larger"),
    ("invalid job comment", "look at -o comment"),
    # Transport and daemons.
    ("batch jobs are accepted", "the partition takes batch jobs only: hpcjobs submit, not a session"),
    ("only batch", "the partition takes batch jobs only: hpcjobs submit, not a session"),
    ("pathname of a file", "a shorter path, name or environment: run_root of the site file, --name"),
    (
        "i/o error writing script",
        (
            "the controller cannot store the job now (its disk may be full): tell the administrators, and submit "
            "again later"
        ),
    ),
    ("script is empty", "the script has not arrived: submit again"),
    ("invalid container", "look at the container's image and the site's containers section"),
    ("unable to create job record", "the queue of the cluster is full (MaxJobCount): submit again later"),
    ("slurm temporarily unable to accept job", "the cluster's queue is full: submit again later"),
    ("scheduling attempts deferred", "the controller is busy: submit again later"),
    ("error generating job credential", "the cluster's keys or clocks disagree: tell the administrators"),
    ("invalid authentication credential", "this machine's munge and the cluster's disagree: tell the administrators"),
    (
        "protocol authentication error",
        "this machine's munge and the cluster's disagree, or do not run: tell the administrators",
    ),
    ("incompatible versions", "Slurm's commands here are not of the cluster's version: load the right module"),
    ("job submit/allocate specification", "look at the options above, and at the site file's directives"),
    (
        "unspecified error",
        "a plugin of the site refuses (job_submit): its reason is above, or its administrators say why",
    ),
    ("internal error", "tell the administrators, with this message"),
    ("configuration source", "no Slurm configuration here: set SLURM_CONF, or run on a login node"),
)
"""Part of Slurm's message in lower case, and a hint; the first match counts."""


def hint_for(answer: str) -> str | None:
    """Hint for the refusal in ``answer``; None: not a refusal of Slurm itself."""
    lowered = answer.lower()
    return next((hint for arguments, hint in HINTS if arguments in lowered), None)


_PAUSES_S = (1.0, 2.0, 4.0)
_PATIENCE_S = 45.0
"""Nothing is tried again after this time: without a controller, a command itself tries for MessageTimeout twice. It is
longer than the MessageTimeout of most sites, so that one answer that a busy controller owes is survived."""
_DAEMONS = {"sacct": ("the accounting (slurmdbd)", "sacctmgr show cluster")}
_CLOCKS_DIFFER_S = 3600.0
"""By how much the clocks of a file server and of the controller may differ."""
_SHOWN_ONE_BY_ONE = 16
"""Most jobs to query by id without sacct; one answer about all jobs is cheaper for more."""


class SlurmScheduler:
    """A cluster. Every method starts one Slurm command (again, after a pause, while none answers)."""

    def __init__(
        self,
        slurm_conf: str | None = None,
        *,
        runner: Runner = run,
        pause: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slurm_conf = slurm_conf
        self._runner = runner
        self._pause = pause
        self._clock = clock

    def submit(self, plan: Plan) -> Submitted:
        """Run the plan's sbatch from the job's working folder.

        sbatch may have submitted the job although its answer was lost (a timeout, a wrapper that swallows the id). So
        before another try, and before giving up, Slurm is searched for a job with this script; a second job is
        cancelled. A busy controller may accept a request after it has answered later ones, so the queue is read again
        for some seconds while it has fewer jobs than requests were sent. A job of a still later one leaves as it
        starts: ``submitted.json`` names another.

        Raises SchedulerDownError: no answer. SchedulerError: Slurm refused; its message is quoted.
        """
        refuse_change("submit")
        maybe_taken, begun = 0, self._clock()
        env = slurm_commands.submission_env(self._slurm_conf, str(plan.run_dir))
        for tries, pause in enumerate((*_PAUSES_S, None), start=1):
            result = self._run(plan.command, cwd=plan.job.chdir, env=env)
            printed = parse_submitted(result.out)
            if result.code == 0 and printed is not None:
                messages = tuple(line for line in map(str.strip, result.err.splitlines()) if line)
                taken = Submitted(job_id=printed[0], cluster=printed[1], messages=messages)
                return (self._only_one(plan, sent=maybe_taken + 1) if maybe_taken else None) or taken
            maybe_taken += _maybe_taken(result)
            again = self._worth_another_try(result, pause, begun)
            if again:
                self._pause(pause or 0)
            if maybe_taken and (submitted := self._only_one(plan, sent=maybe_taken)):
                return submitted
            if not again:
                raise self._error(plan.command, result, tries=tries, maybe_taken=maybe_taken > 0)
        raise AssertionError("unreachable: the last pause is None")

    def _only_one(self, plan: Plan, *, sent: int) -> Submitted | None:
        """The first job with the plan's script, if one of the ``sent`` requests was taken; later jobs are cancelled."""
        taken: list[Submitted] = []
        try:
            for pause in (*_PAUSES_S, None):
                taken = self._find_in_queue(plan)
                if len(taken) >= sent or pause is None:
                    break
                self._pause(pause)
            taken = taken or written_jobs(plan) or self._find_accounted(plan)
        except SchedulerError as error:
            raise SchedulerDownError(error.message, hint=error.hint, maybe_taken=True) from error
        if not taken:
            return None
        self.cancel(job.job_id for job in taken[1:sent])
        return taken[0]

    def find_submitted(self, plan: Plan) -> list[Submitted]:
        """The jobs that were given the script in the plan's run folder, ended or not, oldest first.

        Sources in order: slurmctld, the id that the job wrote when it started, the accounting.
        """
        return self._find_in_queue(plan) or written_jobs(plan) or self._find_accounted(plan)

    def _find_in_queue(self, plan: Plan) -> list[Submitted]:
        """Jobs that wait, run, or have ended within MinJobAge."""
        records = self._read_queue("all")
        return _oldest_first(record.job_id for record in records if record.command == plan.command[-1])

    def _find_accounted(self, plan: Plan) -> list[Submitted]:
        """Jobs that were submitted with the script, by the sbatch command that Slurm 20.11 and newer keep."""
        script = plan.command[-1]
        stored = slurm_commands.fold_stored(script)
        since = os.stat(script).st_mtime - _CLOCKS_DIFFER_S
        question = slurm_commands.list_accounted(*SUBMISSIONS, users=[user_name()], since=since, siblings=True)
        try:
            out = self._ask(question).out
        except SchedulerDownError:
            raise
        except SchedulerError:  # no accounting, or an old one without commands
            return []
        lines = ((row.raw("JobID"), slurm_commands.fold_stored(row.raw("SubmitLine"))) for row in SUBMISSIONS.rows(out))
        return _oldest_first(job_id for job_id, line in lines if line.endswith(stored))

    def queue(self) -> list[JobRecord]:
        """My pending and running jobs, with reason and estimated start: one squeue."""
        return self._read_queue()

    def _read_queue(self, *states: str) -> list[JobRecord]:
        """My jobs in these states; without a state, those that have not ended."""
        command = slurm_commands.list_queue(*QUEUED, mine=True, states=states, siblings=True)
        return parse_squeue(self._ask(command).out, lists_ended=bool(states))

    def account(self, job_ids: Iterable[str]) -> list[JobRecord]:
        """Records of ended jobs from sacct, or from scontrol if sacct is missing or does not answer.

        slurmctld forgets a job some minutes after its end (MinJobAge), so scontrol may know less.

        Raises SchedulerDownError: the accounting does not answer, and slurmctld does not know one of the jobs any more.
        """
        ids = sorted(set(job_ids))
        if not ids:
            return []
        try:
            return [record for portion in split_ids(ids) for record in self._read_accounted(jobs=portion)]
        except SchedulerError as error:
            shown = self.show_jobs(ids)
            forgotten = set(map(parent_id, ids)) - {parent_id(record.job_id) for record in shown}
            if isinstance(error, SchedulerDownError) and forgotten:
                raise
            return shown

    def has_accounting(self) -> bool:
        """Whether sacct answers, or only does not for now: slurmdbd may be away."""
        try:
            self._ask(slurm_commands.check_accounting())
        except SchedulerError as error:
            return not _is_disabled(error)
        return True

    def history(
        self, user: str, *, job_ids: Collection[str] | None = None, since: float | None = None
    ) -> list[JobRecord]:
        """The jobs of ``user`` with these ids, or that ended after ``since`` (seconds since 1970): sacct and squeue.

        The accounting may lack a job for minutes after its end, and there may be none: slurmctld still remembers it.
        """
        if job_ids is not None and not job_ids:
            return []
        accounted: list[JobRecord] = []
        try:
            since = (since or 0) if job_ids is None else None
            accounted = self._read_accounted(users=[user], jobs=job_ids or (), since=since)
        except SchedulerError as error:
            if not _is_disabled(error):
                warnings.warn(
                    f"{error.message}; asking slurmctld, which remembers minutes", HpcJobsWarning, stacklevel=2
                )
        ids = None if job_ids is None else set(map(parent_id, job_ids))
        there = {record.job_id for record in accounted}
        further = [record for record in self._read_queue("all") if ids is None or parent_id(record.job_id) in ids]
        return accounted + [record for record in further if record.job_id not in there]

    def _read_accounted(
        self, *, users: Iterable[str] = (), jobs: Iterable[str] = (), since: float | None = None
    ) -> list[JobRecord]:
        """One sacct, or two of a Slurm that does not know a column."""
        try:
            table = ACCOUNTED
            out = self._ask(
                slurm_commands.list_accounted(*table, users=users, jobs=jobs, since=since, siblings=True)
            ).out
        except SchedulerError as error:
            if "SubmitLine" not in error.message:
                raise
            table = ACCOUNTED_BEFORE_20_11
            out = self._ask(
                slurm_commands.list_accounted(*table, users=users, jobs=jobs, since=since, siblings=True)
            ).out
        return parse_sacct(out, table)

    def forget(self, job_ids: Iterable[str]) -> None:
        """Nothing: the records are Slurm's."""

    def show_jobs(self, job_ids: Collection[str]) -> list[JobRecord]:
        """The jobs as slurmctld remembers them; one that it has forgotten gives none."""
        parents = set(map(parent_id, job_ids))
        if len(parents) > _SHOWN_ONE_BY_ONE:
            records = parse_scontrol(self._ask(slurm_commands.show_job(siblings=True)).out)
        else:
            records = [record for job_id in sorted(parents, key=int) for record in self._show_job(job_id)]
        return [record for record in records if parent_id(record.job_id) in parents]

    def full_id(self, number: str, user: str) -> str | None:
        """As Slurm prints the id of the task or component: slurmctld takes the number, and sacct too."""
        shown = [record for record in self._show_job(number) if record.user == user]
        ids = {record.job_id for record in shown or self.history(user, job_ids=[number])}
        return ids.pop() if len(ids) == 1 else None

    def _show_job(self, job_id: str) -> list[JobRecord]:
        try:
            return parse_scontrol(self._ask(slurm_commands.show_job(job_id, siblings=True)).out)
        except SchedulerError as error:
            if "invalid job id" in error.message.lower():
                return []
            raise

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Cancel jobs; jobs that have ended are ignored."""
        refuse_change("cancel")
        for portion in split_ids(sorted(set(job_ids))):
            self._ask(slurm_commands.cancel(portion))

    def hold(self, job_ids: Iterable[str]) -> None:
        self._control("hold", job_ids)

    def release(self, job_ids: Iterable[str]) -> None:
        self._control("release", job_ids)

    def requeue(self, job_ids: Iterable[str]) -> None:
        self._control("requeue", job_ids)

    def _control(self, verb: str, job_ids: Iterable[str]) -> None:
        refuse_change(verb)
        for portion in split_ids(job_ids):
            self._ask(slurm_commands.control(verb, portion), without_ended=verb != "requeue")

    def update(self, job_id: str, settings: Sequence[str]) -> None:
        """Change ``Name=value`` settings of a job, by scontrol's names."""
        refuse_change("update")
        self._ask(slurm_commands.update(job_id, *settings), without_ended=True)

    def signal(self, job_ids: Iterable[str], name: str, *, batch_script: bool) -> None:
        """Send a signal to the steps of jobs; with ``batch_script`` to all their processes."""
        refuse_change("signal")
        for portion in split_ids(sorted(set(job_ids))):
            self._ask(slurm_commands.signal(portion, name, batch_script=batch_script))

    def step(self, job_id: str, hosts: Sequence[str], *options: str) -> list[str]:
        return slurm_commands.start_beside(job_id, hosts, *options)

    def estimate(self, job: Job) -> Estimate:
        return estimate_start(job, runner=self._runner)

    def query(self, argv: Sequence[str], *, cwd: str | None = None) -> str:
        """Output of a Slurm command that only reads.

        Raises SchedulerDownError: no answer. SchedulerError: Slurm refused; its message is quoted.
        """
        return self._ask(argv, cwd=cwd).out

    def follow(self, argv: Sequence[str], each: Callable[[str], None]) -> int:
        """Hand on each line of a Slurm command that prints much, as it comes, with its messages; the exit code."""
        return run_following(argv, each, env=slurm_commands.question_env(self._slurm_conf))

    def _run(self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Result:
        """Slurm's commands look for a minute for a configuration that is not there; that wait is avoided here."""
        conf = self._configuration()
        if conf is not None and not os.path.exists(conf):
            raise SchedulerDownError(
                f"no Slurm to ask: its configuration {conf} is not there",
                hint="a sandbox's is there while it is up; the site's slurm_conf or SLURM_CONF names another cluster's",
            )
        return self._runner(argv, cwd=cwd, env=slurm_commands.question_env(self._slurm_conf) if env is None else env)

    def _configuration(self) -> str | None:
        return self._slurm_conf or os.environ.get("SLURM_CONF")

    def _ask(self, argv: Sequence[str], *, cwd: str | None = None, without_ended: bool = False) -> Result:
        """Run a command that only reads, or may safely run twice.

        ``without_ended``: a change of jobs, which need not be possible for tasks of an array that have ended.
        """
        begun = self._clock()
        for tries, pause in enumerate((*_PAUSES_S, None), start=1):
            result = self._run(argv, cwd=cwd)
            if result.code == 0 or (without_ended and is_refused_by_ended_alone(result.err)):
                return result
            if not self._worth_another_try(result, pause, begun):
                raise self._error(argv, result, tries=tries)
            self._pause(pause or 0)
        raise AssertionError("unreachable: the last pause is None")

    def _worth_another_try(self, result: Result, pause: float | None, begun: float) -> bool:
        is_late = self._clock() - begun >= _PATIENCE_S
        return pause is not None and not is_late and slurm_commands.is_unanswered(result.err)

    def _error(self, argv: Sequence[str], result: Result, *, tries: int, maybe_taken: bool = False) -> SchedulerError:
        message = "\n".join(line for line in (result.err or result.out).strip().splitlines() if line) or "(nothing)"
        conf = self._configuration() or "its default place"
        if slurm_commands.is_unanswered(result.err):
            daemon, ping = _DAEMONS.get(argv[0], ("the controller", "scontrol ping"))
            count = "1 try" if tries == 1 else f"{tries} tries"
            taken = "; it may have taken the job all the same: look with `hpcjobs ps`" if maybe_taken else ""
            return SchedulerDownError(
                f"no answer from Slurm ({argv[0]}, {count}): {message.splitlines()[-1]}{taken}",
                hint=f"is {daemon} up? `{ping}` asks it; configuration read from {conf}",
                maybe_taken=maybe_taken,
            )
        if maybe_taken:
            return SchedulerDownError(
                f"{argv[0]} ended with exit code {result.code} and no job id, "
                f"and the queue has no job with this script: {message}",
                hint="it may have taken the job all the same: look with `hpcjobs ps`",
                maybe_taken=True,
            )
        if result.code < 0:  # else a job would count as forgotten
            name = name_signal(-result.code)
            return SchedulerDownError(f"no answer from Slurm: {argv[0]} was ended by {name}", hint="try again")
        return SchedulerError(f"{argv[0]} refused (exit code {result.code}): {message}", hint=hint_for(message))


def _is_disabled(error: SchedulerError) -> bool:
    """Whether the cluster keeps no accounting, and so will not answer later: "Slurm accounting storage is disabled"."""
    return isinstance(error, CommandMissingError) or "accounting storage is disabled" in error.message.lower()


def _maybe_taken(result: Result) -> bool:
    """Whether an sbatch without a usable answer may have submitted: no refusal, killed, or its answer was lost."""
    if slurm_commands.is_usage_error(result.err):
        return False
    is_refusal = (
        0 < result.code < 128 and bool((result.err + result.out).strip()) and parse_submitted(result.out) is None
    )
    return not is_refusal or slurm_commands.is_answer_lost(result.err)


def _oldest_first(ids: Iterable[str]) -> list[Submitted]:
    """Each job once; tasks of an array are one job."""
    return [Submitted(job_id) for job_id in sorted(set(map(parent_id, ids)), key=int)]


_MOST_CHARS = 100_000


def split_ids(job_ids: Iterable[str]) -> Iterator[list[str]]:
    """Split ``job_ids`` into portions that, joined by commas, fit into one argument."""
    portion: list[str] = []
    length = 0
    for job_id in job_ids:
        for part in [job_id] if len(job_id) < _MOST_CHARS else task_ids(job_id):
            if length + len(part) >= _MOST_CHARS:
                yield portion
                portion, length = [], 0
            portion.append(part)
            length += len(part) + 1
    if portion:
        yield portion


def written_jobs(plan: Plan) -> list[Submitted]:
    """The job of the plan's run folder, once its script, or one task of the array, has started.

    Of a task that an older hpcjobs started, the file has the task's own id in Slurm's books, and not the array's.
    """
    pattern = f"*/{STATE}" if plan.job.resources.array else STATE
    for path in plan.run_dir.glob(pattern):
        try:
            written = read_state_file(path)
        except (OSError, ValueError):
            continue  # no state file of a job: the scheduler is asked instead
        if (job_id := written.array_job_id if plan.job.resources.array else written.job_id) is not None:
            return [Submitted(job_id=job_id, cluster=written.cluster or None)]
    return []


def connect(slurm_conf: str | None, *, runner: Runner) -> SlurmScheduler:
    """Slurm with this configuration file."""
    return SlurmScheduler(slurm_conf, runner=runner)
