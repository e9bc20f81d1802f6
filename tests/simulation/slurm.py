"""A Slurm cluster in virtual time, which answers Slurm's commands as text.

`VERSIONS` has what differs between versions; `conformance` compares the answers with those of a real Slurm of the same
version. Jobs run as processes of the world (`Body`); what a job does is given by whoever submits it.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from world import Process, World

from hpcjobs.processes.start import Result
from hpcjobs.units import array_indices

Body = Callable[["Attempt"], int]
"""Runs one attempt of a job as a process of the world: its exit code."""
SIBLING = "other"
"""The other cluster of a federation."""
_FEDERATED_IDS, _REVOKED_ID = 1 << 26, "4294967294"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE")
USER, UID = "me", 1000
UNSAVED_S = 10.0
"""slurmctld saves its list of jobs so often."""


@dataclass(frozen=True)
class Version:
    """What differs between versions of Slurm."""

    lost_node_exits: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    """ExitCode of a start that a lost node ended, as sacct and as scontrol print it."""
    update_lists_all: bool = True
    """Where `scontrol update` is refused for some tasks of an array, it lists the others too: "No error"."""
    brackets_tasks: bool = False
    """scontrol's refusals, and squeue's tasks that never began, have the tasks in brackets, also one alone."""
    accounts_whole_codes: bool = False
    """sacct prints exit codes above 127 as they are, and not without 128."""
    requeue_keeps_the_end: bool = False
    """The accounting keeps the state in which a start ended that is requeued afterwards, or was cancelled before."""
    further_error: str = "\nslurm_suspend error: {0}"
    """What `scontrol hold` and `release` add to a refusal."""
    node_refusal: str = "Invalid node state specified"


_V24 = Version(((1, 0), (0, 1)), update_lists_all=False)
VERSIONS = {
    "22.05": Version(),
    "24.11": _V24,
    "26.05": replace(
        _V24, brackets_tasks=True, accounts_whole_codes=True, requeue_keeps_the_end=True,
        further_error="\nslurm_suspend error:{0}", node_refusal="Invalid node state transition",
    ),
}  # fmt: skip
"""The oldest version that answers so -> how it answers."""


def version_like(number: str) -> str:
    """The version in `VERSIONS` that a Slurm of this number ("24.11.5") answers as."""
    return max((known for known in VERSIONS if known <= number), default="22.05")


@dataclass
class Settings:
    """What differs between clusters."""

    version: str = "22.05"
    nodes: int = 4
    min_job_age_s: float = 300.0
    kill_wait_s: float = 30.0
    requeue_delay_s: float = 120.0
    accounting: str = "prompt"
    """``prompt``, ``late``, ``absent`` (none is configured), ``lossy`` (rows of some jobs never arrive)."""
    accounting_lag_s: float = 0.0
    loss: float = 0.3
    keeps_commands: bool = True
    """SubmitLine, from Slurm 20.11 on."""
    allows_requeue: bool = True
    job_requeue: bool = True
    """JobRequeue: jobs that do not say otherwise may be requeued."""
    preempts: bool = True
    """Partitions preempt each other; else Slurm shows no times of preemption."""
    max_submit_jobs: int | None = None
    max_array_size: int = 1001
    max_time_s: float = float("inf")
    name: str = "sim"
    completing_s: float = 1.0
    sibling_nodes: int = 0
    """In a federation: nodes of the other cluster, on which jobs that are no arrays may start too; 0: no federation."""


@dataclass
class Attempt:
    """One start of a job, on nodes."""

    job: Job
    number: int
    nodes: list[str]
    started: float
    limit: float
    process: Process | None = None
    children: list[Process] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    code: int | None = None
    ended: float | None = None
    end_state: str | None = None
    cause: str | None = None
    """Why Slurm ends it: the state of its end."""
    is_requeued: bool = False
    """It was requeued, and has not ended yet: in Slurm's books it has."""
    was_cancelled: bool = False
    """It was cancelled before it was requeued."""
    is_ghost: bool = False
    """Its node was given up by Slurm, and its processes went on."""

    def processes(self) -> list[Process]:
        return [*self.children, *([] if self.process is None else [self.process])]


@dataclass
class Row:
    """What the accounting has of one start of a job."""

    job_id: str
    name: str
    state: str
    submit: float
    start: float | None
    end: float | None
    nodes: list[str]
    exit: tuple[int, int]
    reason: str
    submit_line: str
    visible: float
    nnodes: int = 1
    cluster: str = ""


@dataclass
class Job:
    """A job, or one task of an array."""

    number: int
    """In Slurm's books: a task gets its own when it becomes a job of its own, and the last one keeps the array's."""
    script: str
    name: str
    submit: float
    submit_line: str
    first_submit: float
    array: int | None = None
    task: int | None = None
    throttle: int = 0
    nodes: int = 1
    time_limit_s: float = 3600.0
    state: str = "PENDING"
    reason: str = "None"
    held: bool = False
    begin: float = 0.0
    requeue: bool = True
    restarts: int = 0
    dependency: list[tuple[str, int]] = field(default_factory=list)
    exclude: str = "(null)"
    start: float | None = None
    end: float | None = None
    exit: tuple[int, int] = (0, 0)
    node_list: list[str] = field(default_factory=list)
    attempt: Attempt | None = None
    attempts: list[Attempt] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    preempt_time: float | None = None
    completing: bool = False
    cancelled_at: float | None = None
    is_split: bool = False
    """Of an array's task: it is a job of its own; the others are one record, by Slurm's books and in its answers."""
    is_rest: bool = False
    """The last of some that waited together, of which the others were cancelled."""
    is_requeued_held: bool = False
    prioritised: tuple[float, bool] = (0.0, False)
    """When it got its priority, lower than any before: as it was submitted or last released, a job of its own later."""
    put_backs: list[float] = field(default_factory=list)
    """When it was requeued."""
    ends: list[tuple[float, str]] = field(default_factory=list)
    """Every end that was final when it came: a second one follows a requeue only."""
    warn_s: float | None = None
    """Seconds before the limit at which the batch script gets SIGUSR1."""

    @property
    def id(self) -> str:
        return str(self.number) if self.array is None else f"{self.array}_{self.task}"

    @property
    def root(self) -> int:
        return self.number if self.array is None else self.array

    @property
    def put_back_at(self) -> float | None:
        """When it was last requeued."""
        return self.put_backs[-1] if self.put_backs else None

    @property
    def shown_state(self) -> str:
        return "COMPLETING" if self.completing else self.state

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED and not self.completing


class Refused(Exception):
    """A command ends with an exit code and this message."""


def _refusal(change: Callable[[Job], None], job: Job) -> str:
    try:
        change(job)
    except Refused as refusal:
        return str(refusal)
    return "No error"


class Slurm:
    """The controller, its accounting, and the nodes."""

    def __init__(self, world: World, settings: Settings, body: Callable[[Job], Body]) -> None:
        self.world, self.settings, self._body_of = world, settings, body
        self.version = VERSIONS[settings.version]
        self.jobs: dict[int, Job] = {}
        """What slurmctld remembers, by the number in its books."""
        self.every: list[Job] = []
        """Each job that was ever accepted."""
        self.rows: list[Row] = []
        self.next_id = 1
        self.down: dict[str, bool] = {"ctl": False, "dbd": False}
        self.back_at = 0.0
        """When slurmctld last came back."""
        self.bad_nodes: set[str] = set()
        self.names = [f"n{i}" for i in range(settings.nodes)]
        self.sibling_names = [f"s{i}" for i in range(settings.sibling_nodes)]
        self.is_sibling_away = False
        """The other cluster of the federation does not answer; its jobs go on."""
        if self.sibling_names:
            self.next_id += _FEDERATED_IDS

    # --- commands

    def run(self, argv: Sequence[str], env: dict[str, str] | None = None) -> Result:
        """The answer of a command, given at once."""
        command = argv[0]
        try:
            if self.down["ctl"] and command not in ("sacct", "sacctmgr"):
                raise Refused(f"{command}: error: Unable to contact slurm controller (connect failure)")
            answer = getattr(self, f"_{command}", None)
            if answer is None:
                return Result(127, "", f"{command}: not simulated")
            out = answer(list(argv[1:]), env or {})
            return out if isinstance(out, Result) else Result(0, out, "")
        except Refused as refusal:
            return Result(1, "", f"{refusal}\n")

    def _sbatch(self, argv: list[str], env: dict[str, str]) -> str:
        options, script = self._options(argv)
        array = array_indices(options["array"].partition("%")[0]) if options.get("array") else None
        count = len(array) if array else 1
        if self.settings.max_submit_jobs is not None and self._queued() + count > self.settings.max_submit_jobs:
            raise Refused(
                "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
                "accounting/QOS policy (job submit limit, user's size and/or time limits)"
            )
        if int(options.get("nodes", "1").partition("-")[0]) > self.settings.nodes:
            raise Refused("sbatch: error: Batch job submission failed: Node count specification invalid")
        if _seconds(options.get("time", "01:00:00")) > self.settings.max_time_s:
            text = "Requested time limit is invalid (missing or exceeds some limit)"
            raise Refused(f"sbatch: error: Batch job submission failed: {text}")
        if array and max(array) >= self.settings.max_array_size:
            raise Refused("sbatch: error: Batch job submission failed: Invalid job array specification")
        if "test-only" in options:
            return ""
        root, throttle = self.next_id, int(options.get("array", "").partition("%")[2] or 0)
        dependency = self._dependency(options.get("dependency", ""))
        self.next_id += 1
        for task in array or [None]:
            signal_s = re.search(r"USR1@(\d+)", options.get("signal", ""))
            job = Job(
                number=root if task is None else -(len(self.every) + 1),
                script=script,
                name=options.get("job-name", script.rpartition("/")[2]),
                submit=self.world.now,
                first_submit=self.world.now,
                submit_line=" ".join(["sbatch", *argv]),
                array=root if array else None,
                task=task,
                throttle=throttle,
                nodes=int(options.get("nodes", "1").partition("-")[0]),
                time_limit_s=_seconds(options.get("time", "01:00:00")),
                held="hold" in options,
                reason="JobHeldUser" if "hold" in options else "None",
                begin=self.world.now + 300.0 if options.get("begin", "").startswith("now+") else 0.0,
                requeue="no-requeue" not in options and ("requeue" in options or self.settings.job_requeue),
                dependency=dependency,
                exclude=options.get("exclude", "(null)"),
                env=dict(env),
                warn_s=float(signal_s[1]) if signal_s else None,
                prioritised=(self.world.now, False),
            )
            self.jobs[job.number] = job
            self.every.append(job)
            if task is None:
                self._account(job, "PENDING", end=None)
        self.world.log(f"sbatch: job {root} of {script.rpartition('/')[0].rpartition('/')[2]}")
        self._schedule_soon()
        return f"{root}\n"

    def _options(self, argv: list[str]) -> tuple[dict[str, str], str]:
        script = argv[-1]
        options: dict[str, str] = {}
        try:
            with open(script, encoding="utf-8", errors="replace") as file:
                head = file.read(20_000)
        except OSError as error:
            raise Refused(f"sbatch: error: Unable to open file {script}") from error
        arguments = re.findall(r"^#SBATCH --(\S.*)$", head, re.MULTILINE) + [
            token.removeprefix("--") for token in argv[:-1] if token.startswith("--")
        ]
        for token in arguments:
            name, _, value = token.partition("=")
            options[name] = value.strip("'\"")
        return options, script

    def _dependency(self, text: str) -> list[tuple[str, int]]:
        matching = []
        for part in filter(None, text.split(",")):
            kind, *ids = part.split(":")
            for job_id in ids:
                if int(job_id.partition("_")[0]) not in {job.root for job in self.jobs.values()}:
                    if kind == "afterok":
                        raise Refused("sbatch: error: Batch job submission failed: Job dependency problem")
                    continue
                matching.append((kind, int(job_id.partition("_")[0])))
        return matching

    def _queued(self) -> int:
        return sum(not job.has_ended for job in self.jobs.values())

    def _squeue(self, argv: list[str], env: dict[str, str]) -> str:
        form = next((token.partition("=")[2] for token in argv if token.startswith("--format=")), "%i %o")
        every = "--states=all" in argv
        named = next((token.partition("=")[2] for token in argv if token.startswith("--jobs=")), None)
        if named is not None and not any(self._named(name) for name in named.split(",")):
            raise Refused("slurm_load_jobs error: Invalid job id specified")
        shown = self._grouped(job for job in self.jobs.values() if every or not job.has_ended)
        rows = [
            view
            for job in _merge_waiting(shown, brackets=self.version.brackets_tasks)
            for view in self._view(*job, argv)
        ]
        return "".join(f"{self._format(form, row)}\n" for row in rows)

    def _view(self, job: Job, job_id: str, argv: Sequence[str]) -> list[tuple[Job, str]]:
        """The rows of a job in a federation: the cluster where it was submitted has it as REVOKED while the other
        cluster runs it, and afterwards.
        """
        if not self.sibling_names or job.array is not None:
            return [(job, job_id)]
        here = there = (job, job_id)
        revoked = replace(job, state="REVOKED", reason="None", node_list=[], completing=False, start=self.world.now)
        if self._is_there(job):
            here = (revoked, job_id)
        elif job.state != "PENDING":
            there = (revoked, _REVOKED_ID)
        if "--local" in argv:
            return [there if self._is_host_there() else here]
        return [here, there] if "--sibling" in argv and not self.is_sibling_away else [here]

    def _is_there(self, job: Job) -> bool:
        """It runs on the other cluster of the federation, or has ended there."""
        return bool(job.node_list) and job.node_list[0] in self.sibling_names

    def _is_host_there(self) -> bool:
        return self.world.current is not None and self.world.current.host in self.sibling_names

    def _grouped(self, jobs: Iterable[Job]) -> list[tuple[Job, str]]:
        """Jobs with their ids; tasks of an array that nothing has happened to alone are one line."""
        rows: list[tuple[Job, str]] = []
        groups: dict[tuple[int, str], list[Job]] = {}
        for job in jobs:
            if job.array is not None and not job.is_split:
                groups.setdefault((job.array, job.state), []).append(job)
            else:
                rows.append((job, job.id))
        for (array, _), members in groups.items():
            is_last = len(members) == 1 and sum(job.array == array for job in self.every) > 1 and not members[0].is_rest
            rows.append((members[0], members[0].id if is_last else f"{array}_[{_task_text(members)}]"))
        return rows

    def _format(self, form: str, shown: tuple[Job, str]) -> str:
        job, job_id = shown
        pending = job.state == "PENDING"
        values = {
            "i": job_id, "j": job.name, "T": job.shown_state, "r": _reason(job).replace("_", " "),
            "P": "compute", "N": ",".join(job.node_list) if not pending else "", "D": str(job.nodes),
            "V": _epoch(job.submit), "S": _epoch(job.start) or "N/A", "M": _clock(self._elapsed(job)),
            "l": _short_clock(job.time_limit_s), "o": job.script, "u": USER, "a": "me", "q": "normal",
        }  # fmt: skip
        return re.sub(r"%(\w)", lambda match: values.get(match[1], ""), form)

    def _elapsed(self, job: Job) -> float:
        if job.start is None or job.state == "PENDING":
            return 0.0
        return (job.end if job.end is not None else self.world.now) - job.start

    def _sacct(self, argv: list[str], env: dict[str, str]) -> Result | str:
        if self.settings.accounting == "absent":
            return Result(1, "", "Slurm accounting storage is disabled\n")
        if self.down["dbd"]:
            return Result(1, "", "sacct: error: Problem talking to the database: Connection refused\n")
        given = dict(token.removeprefix("--").partition("=")[::2] for token in argv)
        columns, separator = given["format"].split(","), given.get("delimiter", "|")
        if "SubmitLine" in columns and not self.settings.keeps_commands:
            return Result(1, "", 'sacct: fatal: Invalid field requested: "SubmitLine"\n')
        rows = [row for row in self.rows if row.visible <= self.world.now] + self._array_rows()
        if "jobs" in given:
            ids = set(given["jobs"].split(","))
            rows = [row for row in rows if row.job_id in ids or row.job_id.split("_")[0] in ids]
        if "starttime" in given:
            first = given["starttime"]
            since = self.world.now if first == "now" else time.mktime(time.strptime(first, "%Y-%m-%dT%H:%M:%S"))
            rows = [row for row in rows if row.end is None or row.end >= since]
        if "duplicates" not in given:  # the newest start of each job on each cluster
            newest: dict[tuple[str, str], Row] = {}
            for row in rows:
                key = (row.cluster, row.job_id)
                if row.state != "REVOKED" and (key not in newest or row.submit >= newest[key].submit):
                    newest[key] = row
            # Of tasks without a record of their own it is the array's, which has a newer one.
            rows = [row for row in newest.values() if row.state != "REQUEUED" or "[" not in row.job_id]
        return "".join(separator.join(self._column(row, name) for name in columns) + "\n" for row in rows)

    def _array_rows(self) -> list[Row]:
        """Of arrays, the tasks that have no record of their own."""
        return [
            Row(
                job_id, job.name, job.state, job.submit, None, None, [], (0, 0), job.reason, job.submit_line, 0.0,
                job.nodes,
            )
            for job, job_id in self._grouped(self.jobs.values())
            if job.array is not None and not job.is_split and job.state == "PENDING"
        ]  # fmt: skip

    def _column(self, row: Row, name: str) -> str:
        end = row.end if row.end is not None and row.end <= self.world.now else None
        never = "Unknown" if row.end is None else "None"
        code = row.exit[0] % (256 if self.version.accounts_whole_codes else 128)
        values = {
            "JobID": row.job_id, "JobName": row.name, "State": row.state,
            "Reason": row.reason, "Partition": "compute", "NodeList": ",".join(row.nodes) or "None assigned",
            "NNodes": str(row.nnodes), "Submit": _epoch(row.submit), "Start": _epoch(row.start) or never,
            "End": _epoch(end) or "Unknown", "ExitCode": f"{code}:{row.exit[1]}",
            "SubmitLine": row.submit_line,
            "ElapsedRaw": str(int((end if end is not None else self.world.now) - row.start)) if row.start else "0",
            "User": USER,
        }  # fmt: skip
        return values.get(name, "")

    def _scontrol(self, argv: list[str], env: dict[str, str]) -> str:
        arguments = [token for token in argv if not token.startswith("--")]
        if arguments[:2] == ["show", "config"]:
            return (
                f"ClusterName             = {self.settings.name}\n"
                f"KillWait                = {self.settings.kill_wait_s:.0f} sec\n"
                f"MaxArraySize            = {self.settings.max_array_size}\nMaxJobCount             = 10000\n"
                f"MinJobAge               = {self.settings.min_job_age_s:.0f} sec\nSchedulerParameters     = (null)\n"
            )
        if arguments[:2] == ["show", "hostnames"]:
            return "".join(f"{name}\n" for name in arguments[2].split(","))
        if arguments[:2] == ["show", "job"]:
            matching = self._named(arguments[2]) if len(arguments) > 2 else list(self.jobs.values())
            if not matching and len(arguments) > 2:
                raise Refused("slurm_load_jobs error: Invalid job id specified")
            rows = [view for job in self._grouped(matching) for view in self._view(*job, argv)]
            return "".join(self._format_job(*row) for row in rows)
        if arguments[0] in ("hold", "release", "requeue", "requeuehold"):
            for name in arguments[1].split(","):
                self._change_jobs(arguments[0], name)
            return ""
        if arguments[0] == "update":
            settings = dict(token.partition("=")[::2] for token in arguments[1:])
            if "NodeName" in settings:
                self._change_node(settings["NodeName"], settings["State"])
                return ""
            name = settings.pop("JobId")
            is_complete = self.version.update_lists_all
            self._change_each(name, self._named(name), lambda job: self._update(job, settings), lists_all=is_complete)
            return ""
        raise Refused(f"scontrol: {arguments} is not simulated")

    def _change_jobs(self, verb: str, name: str) -> None:
        """What some tasks of an array refuse, the others do."""
        again = self.version.further_error if verb in ("hold", "release") else ""
        jobs = self._named(name, splits=verb in ("hold", "release"))
        if verb.startswith("requeue"):  # the record of all tasks that wait is asked to
            arrays = {job.array for job in jobs if not job.is_split and job.array is not None}
            jobs += [job for job in self.jobs.values() if job.array in arrays and not job.is_split and job not in jobs]
        self._change_each(name, jobs, getattr(self, f"_do_{verb}"), again)

    def _change_each(
        self, name: str, jobs: list[Job], change: Callable[[Job], None], again: str = "", *, lists_all: bool = True
    ) -> None:
        if not jobs:
            text = "Invalid job id specified"
            raise Refused(f"{text} for job {name}{again.format(text)}")
        refusals: dict[str, list[int]] = {}
        for job in jobs:
            refusals.setdefault(_refusal(change, job), []).append(job.task or 0)
        if set(refusals) == {"No error"}:
            return
        if jobs[0].array is None or (len(jobs) == 1 and "_" not in name):
            text = next(text for text in refusals if text != "No error")
            raise Refused(f"{text} for job {name}{again.format(text)}")
        if not lists_all:
            refusals.pop("No error", None)
        array, form = jobs[0].array, "[{}]" if self.version.brackets_tasks else "{}"
        by_task = sorted(refusals.items(), key=lambda item: min(item[1]))
        lines = (f"{array}_{form.format(','.join(_ranges(tasks)))}: {text}" for text, tasks in by_task)
        raise Refused("\n".join(lines))

    def _update(self, job: Job, settings: Mapping[str, str]) -> None:
        if job.has_ended:
            raise Refused("Job has already finished")
        if "ExcNodeList" in settings:
            if job.state != "PENDING":
                raise Refused("Job is no longer pending execution")
            job.exclude = settings["ExcNodeList"] or "(null)"
        if "TimeLimit" in settings:
            job.time_limit_s = _seconds(settings["TimeLimit"])
            if job.attempt is not None:
                job.attempt.limit = job.attempt.started + job.time_limit_s
                self._await_limit(job, job.attempt)
            self._schedule_soon()

    def _change_node(self, name: str, state: str) -> None:
        if state == "DOWN":
            self.fail_node(name, back_after_s=float("inf"))
        elif name in self.bad_nodes:
            self.bad_nodes.discard(name)
            self._schedule_soon()
        else:
            raise Refused(f"slurm_update error: {self.version.node_refusal}")

    def _named(self, name: str, *, splits: bool = False) -> list[Job]:
        root, _, task = name.partition("_")
        if task:
            tasks = set(array_indices(task.strip("[]").partition("%")[0]))
            named = [job for job in self.jobs.values() if job.array == int(root) and job.task in tasks]
            if named and named[0].has_ended and not named[0].is_split:  # one record, of all tasks that never began
                return [job for job in self.jobs.values() if job.array == int(root) and not job.is_split]
            for job in named if splits else []:
                self._split(job)
            return named
        if not root.isdigit():
            return []
        return [job for job in self.jobs.values() if job.root == int(root)]

    def _format_job(self, job: Job, job_id: str) -> str:
        task = job_id.partition("_")[2].strip("[]")
        array = f" ArrayJobId={job.array} ArrayTaskId={task}" if job.array is not None else ""
        preempt = f" PreemptEligibleTime={_epoch(job.start)} PreemptTime={_epoch(job.preempt_time) or 'None'}"
        preempt = preempt if self.settings.preempts else ""
        end = job.end if job.end is not None else None if job.start is None else job.start + job.time_limit_s
        # A requeue counts at once, also while the job is ending.
        is_requeued = job.attempt is not None and (job.attempt.cause == "REQUEUED" or job.attempt.is_requeued)
        code, number = self.version.lost_node_exits[1] if job.state == "NODE_FAIL" else job.exit
        return (
            f"JobId={max(job.number, 0) or job.root}{array} JobName={job.name} UserId={USER}(1000) GroupId=me(1000) "
            f"JobState={job.shown_state} Reason={_reason(job)} "
            f"Dependency=(null) "
            f"Requeue={int(job.requeue)} Restarts={job.restarts + is_requeued} BatchFlag=1 "
            f"ExitCode={code}:{number} RunTime={_clock(self._elapsed(job))} "
            f"TimeLimit={_clock(job.time_limit_s)} SubmitTime={_epoch(job.submit)} "
            f"StartTime={_epoch(job.start) or 'Unknown'} EndTime={_epoch(end) or 'Unknown'}{preempt} Partition=compute "
            f"NodeList={','.join(job.node_list)} NumNodes={job.nodes} ExcNodeList={job.exclude} "
            f"Command={job.script}\n"
        )

    def _scancel(self, argv: list[str], env: dict[str, str]) -> str:
        number = next((token.partition("=")[2] for token in argv if token.startswith("--signal=")), None)
        for name in (token for token in argv if not token.startswith("--")):
            if number is None:
                self._drop_waiting(name)
            for job in self._named(name, splits=number is None):
                if job.has_ended:
                    continue
                if number is not None:
                    for process in [] if job.attempt is None else job.attempt.children or job.attempt.processes():
                        self.world.signal(process, getattr(signal, f"SIG{number}"))
                    continue
                self.world.log(f"scancel {job.id}")
                job.cancelled_at = self.world.now
                self._terminate(job, "CANCELLED")
        return ""

    def _drop_waiting(self, name: str) -> None:
        """Tasks that are cancelled while they wait together with others leave no record, nor any in the accounting."""
        named = [job for job in self._named(name) if job.array is not None and not job.is_split and not job.has_ended]
        others = [job for job in self.jobs.values() if not job.is_split and job not in named]
        rest = [job for job in others if named and job.array == named[0].array]
        for job in named if rest else []:
            self.world.log(f"scancel {job.id}, which waits together with others")
            job.state, job.cancelled_at, job.end = "CANCELLED", self.world.now, self.world.now
            job.ends.append((self.world.now, "CANCELLED"))
            del self.jobs[job.number]
        for job in rest:
            job.is_rest = True

    def _sdiag(self, argv: list[str], env: dict[str, str]) -> str:
        return f"*******\nsdiag output at Mon Jan 01 00:00:00 2030 ({self.world.now:.0f})\n"

    def _sacctmgr(self, argv: list[str], env: dict[str, str]) -> str:
        return ""

    # --- what users do to jobs

    def _do_hold(self, job: Job) -> None:
        if job.has_ended or (job.completing and job.state != "PENDING"):
            raise Refused("Job has already finished")
        if job.reason != "job_requeued_in_held_state":
            job.reason = "JobHeldUser"
        job.held = True

    def _do_release(self, job: Job) -> None:
        if job.has_ended:
            raise Refused("Job has already finished")
        job.held, job.reason, job.prioritised = False, "None", (self.world.now, job.is_split)
        self._schedule_soon()

    def _do_requeue(self, job: Job, *, held: bool = False) -> None:
        if not self.settings.allows_requeue or not job.requeue:
            raise Refused("Requested operation is presently disabled")
        if job.state == "PENDING" or (job.attempt is not None and job.attempt.cause == "REQUEUED"):
            raise Refused("Job is pending execution")
        job.is_requeued_held = held or (job.held and job.is_requeued_held)
        job.held = job.held or held
        if job.attempt is not None:
            self._terminate(job, "REQUEUED")
        else:
            if not self.version.requeue_keeps_the_end:
                self._account(job, "REQUEUED", end=job.end, lives=False)
            self._put_back(job)

    def _do_requeuehold(self, job: Job) -> None:
        self._do_requeue(job, held=True)

    # --- the life of a job

    def _schedule_soon(self) -> None:
        self.world.after(self.world.random.choice((0.3, 1.0, 3.0)), self._schedule)

    def _schedule(self) -> None:
        if self.down["ctl"]:
            self.world.after(5.0, self._schedule)
            return
        busy = {name for job in self.jobs.values() for name in job.node_list if job.attempt is not None}
        blocked_until = float("inf")
        for job in sorted(self.jobs.values(), key=lambda job: (job.prioritised, job.submit, job.root, job.task or 0)):
            if job.state != "PENDING" or job.held or job.completing:
                continue
            if job.begin > self.world.now:
                job.reason = "BeginTime"
                self.world.at(job.begin, self._schedule)
                continue
            if job.reason == "DependencyNeverSatisfied":  # for good, whatever becomes of the other job
                continue
            met = self._is_dependency_met(job)
            if met is not True:
                job.reason = "Dependency" if met is None else "DependencyNeverSatisfied"
                continue
            if job.throttle and job.throttle <= sum(
                other.array == job.array and other.attempt is not None for other in self.jobs.values()
            ):
                job.reason = "JobArrayTaskLimit"
                continue
            taken = {*busy, *self.bad_nodes, *(() if job.exclude == "(null)" else job.exclude.split(","))}
            free = self._find_free(job, taken)
            is_late = self.world.now + job.time_limit_s > blocked_until
            if len(free) < job.nodes or is_late:
                job.reason = "Resources" if blocked_until == float("inf") else "Priority"
                if blocked_until == float("inf"):
                    blocked_until = self._expected_start(job)
                continue
            busy |= set(free[: job.nodes])
            self._start(job, free[: job.nodes])

    def _find_free(self, job: Job, taken: Collection[str]) -> list[str]:
        """Free nodes of one cluster: of this one, or of the one that has enough."""
        clusters = [self.names]
        if self.sibling_names and job.array is None and not self.is_sibling_away:
            clusters.insert(self.world.random.randrange(2), self.sibling_names)
        free = [[name for name in names if name not in taken] for names in clusters]
        return next((names for names in free if len(names) >= job.nodes), free[0])

    def _expected_start(self, job: Job) -> float:
        """When the job that waits for nodes has them, by the limits of those that run: others may not delay it."""
        names = (*self.names, *self.sibling_names)
        ends = {name: float("inf") if name in self.bad_nodes else self.world.now for name in names}
        for attempt in (other.attempt for other in self.jobs.values() if other.attempt is not None):
            ends |= {name: max(ends[name], attempt.limit) for name in attempt.nodes}
        return sorted(ends.values())[min(job.nodes, len(ends)) - 1]

    def _split(self, job: Job) -> None:
        """A task of an array becomes a job of its own."""
        if job.array is None or job.is_split:
            return
        job.is_split = True
        del self.jobs[job.number]
        job.number = job.array
        if any(one.array == job.array and not one.is_split for one in self.jobs.values()):
            job.number, self.next_id = self.next_id, self.next_id + 1
        self.jobs[job.number] = job

    def _is_dependency_met(self, job: Job) -> bool | None:
        """None: not yet; False: never."""
        for kind, root in job.dependency:
            others = [other for other in self.jobs.values() if other.root == root]
            if any(not other.has_ended for other in others):
                return None
            if kind == "afterok" and any(other.state != "COMPLETED" for other in others):
                return False
            if kind == "afternotok" and others and all(other.state == "COMPLETED" for other in others):
                return False
        return True

    def _start(self, job: Job, nodes: list[str]) -> None:
        now = self.world.now
        job.state, job.reason, job.start, job.end = "RUNNING", "None", now, None
        job.node_list, job.exit, job.preempt_time = nodes, (0, 0), None
        self._split(job)
        attempt = Attempt(job, job.restarts, nodes, now, now + job.time_limit_s)
        attempt.environ = {
            **job.env,
            "SLURM_JOB_ID": str(job.number), "SLURM_JOB_NODELIST": ",".join(nodes),
            "SLURM_RESTART_COUNT": str(job.restarts), "SLURM_CLUSTER_NAME": self._cluster_of(nodes),
        }  # fmt: skip
        if job.array is not None:
            attempt.environ |= {"SLURM_ARRAY_JOB_ID": str(job.array), "SLURM_ARRAY_TASK_ID": str(job.task)}
        job.attempt = attempt
        job.attempts.append(attempt)
        self.world.log(f"job {job.id} starts on {','.join(nodes)} (restarts {job.restarts})")
        if nodes[0] in self.sibling_names:
            self._account(replace(job, node_list=[], start=None), "REVOKED", end=now)
        self._account(job, "RUNNING", end=None)
        body = self._body_of(job)

        def main() -> int:
            attempt.code = body(attempt)
            self.world.after(0.0, lambda: self._exited(job, attempt))
            return attempt.code

        attempt.process = self.world.start(f"job {job.id}.{job.restarts}", main, host=nodes[0])
        attempt.process.environ.update(attempt.environ)
        self._await_limit(job, attempt)

    def _await_limit(self, job: Job, attempt: Attempt) -> None:
        limit = attempt.limit

        def look() -> None:
            if self.down["ctl"]:
                self.world.after(5.0, look)
            elif attempt.limit == limit and job.attempt is attempt and attempt.cause is None:
                self._terminate(job, "TIMEOUT")

        def warn() -> None:
            if attempt.limit == limit and job.attempt is attempt and attempt.process is not None:
                self.world.signal(attempt.process, signal.SIGUSR1)

        self.world.at(limit, look)
        if job.warn_s is not None:
            self.world.at(limit - job.warn_s, warn)

    def _exited(self, job: Job, attempt: Attempt) -> None:
        """The batch script has ended by itself, or after SIGTERM."""
        if job.attempt is not attempt:
            return
        if self.down["ctl"]:  # slurmd tries again; a limit that passes meanwhile is met first
            self.world.after(7.0, lambda: self._exited(job, attempt))
            return
        self._kill(attempt)  # what its script left behind
        code = attempt.code or 0
        state = attempt.cause or ("COMPLETED" if code == 0 else "FAILED")
        self._ended(job, attempt, state, (code, 0) if state in ("COMPLETED", "FAILED") else (0, 15))

    def _terminate(self, job: Job, state: str) -> None:
        """SIGTERM, and SIGKILL after KillWait; a job that waits ends at once."""
        attempt = job.attempt
        if attempt is None:
            if state == "CANCELLED":
                job.state, job.end, job.start = "CANCELLED", self.world.now, self.world.now
                job.ends.append((self.world.now, state))
                self.world.log(f"job {job.id} ends: CANCELLED (it waited)")
                self._account(job, f"CANCELLED by {UID}", end=self.world.now)
                self._forget_later(job)
                self._schedule_soon()
            return
        if attempt.cause is not None:
            # Also a job that is being cancelled is put back by a requeue.
            if state == "REQUEUED" or (state == "CANCELLED" and attempt.cause in ("REQUEUED", "PREEMPTED")):
                attempt.is_requeued = attempt.cause == "REQUEUED"
                attempt.was_cancelled = attempt.cause == "CANCELLED"
                attempt.cause = state
            return
        attempt.cause = state
        if state == "PREEMPTED":
            job.preempt_time = self.world.now
        job.completing = True
        job.state = "RUNNING" if state in ("REQUEUED", "PREEMPTED") else state
        for process in attempt.processes():
            self.world.signal(process, signal.SIGTERM)

        def kill() -> None:
            if job.attempt is attempt:
                self._kill(attempt)
                self._ended(job, attempt, attempt.cause or state, (0, 9))

        self.world.after(self.settings.kill_wait_s, kill)

    def _kill(self, attempt: Attempt) -> None:
        for process in attempt.processes():
            self.world.kill(process)

    def _ended(self, job: Job, attempt: Attempt, state: str, exit_: tuple[int, int]) -> None:
        now = self.world.now
        attempt.ended, attempt.end_state, job.attempt = now, state, None
        job.completing, job.end, job.exit = False, now, exit_
        self.world.log(f"job {job.id} ends: {state} {exit_[0]}:{exit_[1]}")
        shown = f"CANCELLED by {UID}" if state == "CANCELLED" else state
        if attempt.is_requeued and state == "CANCELLED":  # the requeue is in the books, and no further end
            shown, job.restarts = "REQUEUED", job.restarts + 1
        elif attempt.was_cancelled and self.version.requeue_keeps_the_end:
            shown = f"CANCELLED by {UID}"
        self._account(job, shown, end=now)
        puts_back = state == "REQUEUED" or (
            state in ("PREEMPTED", "NODE_FAIL") and job.requeue and self.settings.allows_requeue
        )
        if puts_back:
            self._put_back(job)
        else:
            job.state = state
            job.ends.append((now, state))
            self._forget_later(job)
        self._schedule_soon()

    def _put_back(self, job: Job) -> None:
        job.state, job.reason, job.restarts, job.completing = "PENDING", "BeginTime", job.restarts + 1, False
        job.submit, job.begin = self.world.now, max(job.begin, self.world.now + self.settings.requeue_delay_s)
        job.put_backs.append(self.world.now)
        job.start = job.end = None
        job.node_list = []
        if job.held:
            job.reason = "job_requeued_in_held_state" if job.is_requeued_held else "JobHeldUser"
        self._account(job, "PENDING", end=None)
        self.world.log(f"job {job.id} is in the queue again (restarts {job.restarts})")
        self.world.at(job.begin, self._schedule)

    def _forget_later(self, job: Job) -> None:
        end = job.end

        def forget() -> None:
            if self.jobs.get(job.number) is job and job.has_ended and job.end == end:
                del self.jobs[job.number]

        self.world.after(self.settings.min_job_age_s, forget)

    def _account(self, job: Job, state: str, *, end: float | None, lives: bool = True) -> None:
        kind, lag = self.settings.accounting, self.settings.accounting_lag_s
        if kind == "lossy" and self.world.random.random() < self.settings.loss:
            return
        visible = self.world.now + (lag * self.world.random.random() if kind == "late" else 0.0)
        start = job.start
        is_cancelled = job.cancelled_at is not None and job.cancelled_at >= (job.start or 0.0)
        has_none = state.startswith(("CANCELLED", "PENDING")) or (state == "REQUEUED" and lives and not is_cancelled)
        exit_ = (0, 0) if has_none else job.exit
        job_id = job.id
        if job.array is not None and not job.is_split:
            members = [one for one in self.jobs.values() if one.array == job.array and not one.is_split]
            if len(members) > 1 or sum(one.array == job.array for one in self.every) == 1:
                job_id = f"{job.array}_[{_task_text(members)}]"
            if state == "PENDING":
                return  # see `_array_rows`
        if state.startswith("CANCELLED") and not job.node_list and (job.held or job.reason in _NOT_ELIGIBLE):
            start = None
        cluster = self._cluster_of(job.node_list)
        same = (
            row for row in reversed(self.rows)
            if (row.job_id, row.submit, row.cluster) == (job_id, job.submit, cluster)
        )  # fmt: skip
        last = next(same, None)
        row = Row(
            job_id, job.name, state, job.submit, start, end, list(job.node_list), exit_,
            job.reason, job.submit_line, visible, job.nodes, cluster,
        )  # fmt: skip
        if last is None or last.visible > self.world.now or visible > self.world.now:
            self.rows.append(row)
            if last is not None:
                # The older row is what is seen until this one arrives.
                self.world.at(visible, lambda: self.rows.remove(last) if last in self.rows else None)
        else:
            self.rows[self.rows.index(last)] = row

    def _cluster_of(self, nodes: Sequence[str]) -> str:
        return SIBLING if nodes and nodes[0] in self.sibling_names else self.settings.name

    # --- what happens to the cluster

    def lose_sibling(self, *, away_s: float) -> None:
        """The other cluster of the federation does not answer for a time."""
        self.world.log("the sibling is away")
        self.is_sibling_away = True

        def back() -> None:
            self.is_sibling_away = False

        self.world.after(away_s, back)

    def fail_node(self, name: str, *, back_after_s: float, ghost_s: float = 0.0) -> None:
        """A node is lost. With ``ghost_s`` its processes go on for so long after Slurm gave it up."""
        self.world.log(f"node {name} fails")
        self.bad_nodes.add(name)
        for job in list(self.jobs.values()):
            attempt = job.attempt
            if attempt is None or name not in attempt.nodes:
                continue
            if ghost_s:
                attempt.is_ghost = True
                self.world.after(ghost_s, lambda attempt=attempt: self._kill(attempt))  # type: ignore[misc]
            else:
                self._kill(attempt)
            is_cancelled = attempt.cause == "CANCELLED"
            exit_ = (0, 0) if is_cancelled else self.version.lost_node_exits[0]
            self._ended(job, attempt, "CANCELLED" if is_cancelled else "NODE_FAIL", exit_)

        def back() -> None:
            self.bad_nodes.discard(name)
            self._schedule_soon()

        if back_after_s != float("inf"):
            self.world.after(back_after_s, back)

    def preempt(self) -> None:
        """Preempt the job that runs longest, which a slurmctld that is away does not do."""
        if self.down["ctl"]:
            return
        running = [job for job in self.jobs.values() if job.attempt is not None and job.attempt.cause is None]
        if running:
            self._terminate(min(running, key=lambda job: job.start or 0.0), "PREEMPTED")

    def restart(self, *, away_s: float, keeps_state: bool) -> None:
        """slurmctld is away for a time; without its state it begins anew, and jobs that it does not know are killed."""
        self.world.log(f"slurmctld restarts {'with' if keeps_state else 'without'} its state")
        self.down["ctl"] = True
        if not keeps_state:
            for job in self.jobs.values():
                if job.attempt is not None:
                    self._kill(job.attempt)
                    job.attempt.ended, job.attempt.end_state, job.attempt = self.world.now, "LOST", None
                if not job.has_ended:
                    job.state = "LOST"
            self.jobs, self.next_id = {}, 1

        def back() -> None:
            self.down["ctl"], self.back_at = False, self.world.now
            self._schedule_soon()

        self.world.after(away_s, back)

    def kill_unsaved(self) -> None:
        """slurmctld is killed, and does not know what it accepted in the last seconds: it gives these ids again."""
        self.restart(away_s=10.0, keeps_state=True)
        since = self.world.now - UNSAVED_S
        forgotten = {job.root for job in self.jobs.values() if job.first_submit > since}
        for job in [job for job in self.jobs.values() if job.root in forgotten]:
            del self.jobs[job.number]
            self.world.log(f"job {job.id} is forgotten")
            if job.attempt is not None:
                self._kill(job.attempt)
                job.attempt.ended, job.attempt.end_state, job.attempt = self.world.now, "LOST", None
            if not job.has_ended:
                job.state, job.completing = "LOST", False
        if forgotten:
            self.next_id = max(min(forgotten), *(max(job.number, job.root) + 1 for job in self.jobs.values()), 1)

    def lose_accounting(self, *, away_s: float) -> None:
        self.world.log("slurmdbd is away")
        self.down["dbd"] = True

        def back() -> None:
            self.down["dbd"] = False

        self.world.after(away_s, back)


_NOT_ELIGIBLE = ("BeginTime", "Dependency", "JobHeldUser", "DependencyNeverSatisfied")


def _merge_waiting(rows: list[tuple[Job, str]], *, brackets: bool) -> list[tuple[Job, str]]:
    """As squeue prints them: where tasks wait together, all that wait of their array are one line.

    ``brackets``: also where each of them waits for itself, and for its first start.
    """
    merged = []
    for job, job_id in rows:
        waiting = [(one, text) for one, text in rows if one.array == job.array and one.state == "PENDING"]
        together = [one for one, text in waiting if "[" in text]
        together = together or [one for one, _ in waiting if brackets and not one.restarts]
        if job.array is None or job.state != "PENDING" or not together or len(waiting) == 1:
            has_begun = job.restarts or (job.is_split and job.state != "PENDING")
            is_bare = brackets and job.array is not None and not has_begun
            merged.append((job, f"{job.array}_[{job.task}]" if is_bare and "[" not in job_id else job_id))
        elif job is together[0]:
            tasks = [task for one, text in waiting for task in _tasks_of(one, text)]
            others = (one for one, _ in waiting if one is not job)
            reasons = ["JobHeldUser" if one.held else _reason(one) for one in (job, *others)]
            reason = ",".join(reasons if brackets else dict.fromkeys(reasons))
            merged.append((replace(job, reason=reason), f"{job.array}_[{','.join(_ranges(tasks))}]"))
    return merged


def _tasks_of(job: Job, job_id: str) -> list[int]:
    text = job_id.partition("_")[2].strip("[]").partition("%")[0]
    return list(array_indices(text))


def _reason(job: Job) -> str:
    named = {"TIMEOUT": "TimeLimit", "NODE_FAIL": "NodeDown", "FAILED": "NonZeroExitCode"}.get(job.state)
    is_waiting = job.state == "PENDING" or (job.state == "CANCELLED" and not job.node_list)
    if is_waiting or (named is None and job.held and (job.attempt is not None or job.state == "COMPLETED")):
        return job.reason
    return named or "None"


def _epoch(moment: float | None) -> str:
    return "" if moment is None else f"{moment:.0f}"


def _clock(seconds: float) -> str:
    total = int(seconds)
    days, rest = divmod(total, 86400)
    text = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def _short_clock(seconds: float) -> str:
    """As squeue prints a limit: without hours where there are none."""
    text = _clock(seconds)
    text = text[3:] if text.startswith("00:") else text
    return text.removeprefix("0")


def _task_text(members: list[Job]) -> str:
    throttle = f"%{members[0].throttle}" if members[0].throttle else ""
    return ",".join(_ranges([job.task or 0 for job in members])) + throttle


def _seconds(text: str) -> float:
    sign = text[:1] if text[:1] in "+-" else ""
    text = text.removeprefix(sign)
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if days:
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:
        parts = [0, parts[0], 0]
    elif len(parts) == 2:
        parts = [0, *parts]
    return int(days or 0) * 86400 + parts[0] * 3600 + parts[1] * 60 + parts[2]


def _ranges(tasks: list[int]) -> list[str]:
    ranges: list[str] = []
    first = last = None
    for task in sorted(tasks):
        if last is not None and task == last + 1:
            last = task
            continue
        if first is not None:
            ranges.append(str(first) if first == last else f"{first}-{last}")
        first = last = task
    if first is not None:
        ranges.append(str(first) if first == last else f"{first}-{last}")
    return ranges
