"""The whole life of jobs: users submit, ask, wait, cancel, requeue and prune, while faults happen; then all is quiet.

`run` plays one schedule, which its seed gives: the cluster, the jobs, what users do, and the faults.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import bodies
import checkers
import msgspec
import seams
import slurm as simulated
from slurm import Settings, Slurm
from world import EPOCH_S, Fault, World

from hpcjobs.errors import HpcJobsError, SchedulerDownError
from hpcjobs.files import user_name
from hpcjobs.job.models import JobSpec, Plan
from hpcjobs.job.plan import plan
from hpcjobs.run import archive, control, listing, rerun, select, status, wait
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import current_id
from hpcjobs.run.submit import JobHandle, submit
from hpcjobs.scheduler.base import JobRecord
from hpcjobs.site.models import Site

simulated.USER = user_name()
PLACE = "/place-of-the-run-folder"
WARNED_S = 1500.0
"""After so long a job is told to save: its limit is half an hour."""
BUSY_S = 4 * 3600.0
"""Faults and users' deeds happen within this time."""


class Schedule(NamedTuple):
    """One schedule, and nothing else decides about it."""

    seed: int
    faults: tuple[Fault, ...]
    lives: str = "jobs"
    """Of what: a name in `simulate.LIVES`."""


@dataclass
class Submission:
    """One submission as its user saw it."""

    work: bodies.Work
    plan: Plan
    array: int = 0
    kind: str = "plain"
    token: str | None = None
    sent: int = 0
    outcome: str = "not begun"
    """``accepted``, ``refused``, ``unknown`` (may have been taken), ``killed``, ``interrupted``."""
    entry: Entry | None = None
    cancelled: float | None = None
    cancelling: float | None = None
    """Since when somebody tries to, whatever becomes of it; of several, the last one that is known to have worked."""
    requeued: list[float] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)


@dataclass
class Wait:
    """One `hpcjobs wait`."""

    began: float
    ended: float | None = None
    known: list[status.Known] | None = None
    code: int | None = None
    error: str | None = None
    killed: bool = False
    lasted: float = 0.0
    process: Any = None


class Seen(NamedTuple):
    """A record that a user was shown."""

    when: float
    who: str
    run_dir: str
    record: JobRecord
    is_away: bool
    """Slurm or its accounting did not answer then, which is printed, or only a part of its answer came."""


@functools.cache
def _plan(kind: str, array: str | None) -> Plan:
    compute = {"nodes": 4, "node": {"cpus": 16}}
    site = msgspec.convert({"name": "sim", "partitions": {"compute": compute}, "run_root": f"{PLACE}/runs"}, Site)
    more: dict[str, Any] = {"retries": "node=2,error=1,timeout=3,preempt=3"} if kind == "retries" else {}
    return plan(["true"], site, time="30m", name=kind, **({"array": array} if array else {}), **more)


def plan_for(kind: str, run_dir: Path, *, array: str | None = None) -> Plan:
    made = _plan(kind, array)
    return made._replace(
        run_dir=run_dir,
        script=made.script.replace(str(made.run_dir), str(run_dir)),
        command=tuple(token.replace(str(made.run_dir), str(run_dir)) for token in made.command),
        job=msgspec.structs.replace(made.job, run_root=str(run_dir.parent)),
    )


_NAMES = {"plain": "plain", "array": "plain", "retries": "retries", "retries-array": "retries"}
ANSWERS = (
    "lost_before",
    "lost_after",
    "lost_down",
    "killed_after",
    "empty",
    "garbage",
    "slow20",
    "slow70",
    "late15",
    "late20",
    "late24",
    "forgotten",
    "forgotten",
)
REPEATS = (
    *("lost_before", "lost_after", "lost_after", "killed_after", "slow20", "kill_after", "kill_after", "lost_down"),
)
"""What becomes of a job's own request to start again."""
QUESTIONS = ("lost_before", "lost_after", "killed_after", "empty", "garbage", "cut", "slow20", "slow70")
DEATHS = ("kill", "kill", "kill_after", "INT", "TERM", "HUP")
FILE_ERRORS = ("ENOSPC", "EIO", "EDQUOT", "ESTALE", "EACCES", "kill", "kill", "TERM", "INT")
RECORDS = ("ENOSPC", "EIO", "EDQUOT", "ESTALE", "EACCES", "kill", "TERM", "INT", "HUP")
EVENTS = (
    *("node", "ghost", "ghost", "preempt", "restart", "restart", "dbd", "forget", "jump+", "jump-", "full"),
    *("power", "skew", "skew"),
)


def draw_faults(seed: int) -> tuple[Fault, ...]:
    """The faults of the schedule ``seed``: none in one of ten."""
    draw = random.Random(seed * 7919 + 1)
    if draw.random() < 0.1:
        return ()
    faults = []
    for _ in range(1 + int(draw.expovariate(0.6))):
        kind = draw.choice(
            (
                *("sbatch", "sbatch", "sbatch", "program", "program", "file", "file", "write", "event", "event"),
                *("event", "resubmit", "requeue", "record", "record", "append"),
            )
        )
        if kind == "sbatch":
            faults.append(Fault(kind, draw.randrange(4), draw.choice(ANSWERS + DEATHS)))
        elif kind in ("resubmit", "requeue"):
            faults.append(Fault(kind, draw.randrange(3), draw.choice(REPEATS)))
        elif kind == "record":
            faults.append(Fault(kind, draw.randrange(10), draw.choice(RECORDS)))
        elif kind == "append":
            faults.append(Fault(kind, draw.randrange(8), draw.choice(("ENOSPC", "EIO", "torn", "torn", "short"))))
        elif kind == "program":
            faults.append(Fault(kind, draw.randrange(60), draw.choice(QUESTIONS + QUESTIONS + DEATHS)))
        elif kind == "file":
            faults.append(Fault(kind, draw.randrange(120), draw.choice(FILE_ERRORS)))
        elif kind == "write":
            faults.append(Fault(kind, draw.randrange(60), draw.choice(("ENOSPC", "EIO", "torn", "short"))))
        else:
            at = draw.choice((draw.uniform(1, BUSY_S), draw.uniform(1, 600), draw.uniform(1200, 3600)))
            faults.append(Fault(kind, int(at), draw.choice(EVENTS)))
    return tuple(faults)


class Life:
    """The world of one schedule, and what was seen in it."""

    sibling_nodes = 0

    def __init__(self, schedule: Schedule, home: Path) -> None:
        self.schedule, self.home = schedule, home
        self.world = world = World(schedule.seed, faults=[f for f in schedule.faults if f.kind != "event"])
        draw = world.random
        kinds = ("prompt", "prompt", "late", "absent", "lossy")
        self.settings = Settings(
            version=list(simulated.VERSIONS)[schedule.seed % len(simulated.VERSIONS)],
            nodes=draw.choice((1, 2, 4)), accounting=draw.choice(kinds),
            accounting_lag_s=draw.choice((5.0, 60.0, 400.0)),
            min_job_age_s=draw.choice((10.0, 300.0)), keeps_commands=draw.random() < 0.8,
            allows_requeue=draw.random() < 0.85, job_requeue=draw.random() < 0.8, sibling_nodes=self.sibling_nodes,
        )  # fmt: skip
        world.log(f"{self.settings}")
        self.works: dict[str, bodies.Work] = {}
        self.arguments: dict[str, list[str]] = {}
        self.submissions: list[Submission] = []
        self.seen: list[Seen] = []
        self.errors: list[str] = []
        self.pruned: set[str] = set()
        self.removed: set[str] = set()
        """Of these, those that `prune` has finished with."""
        self.started_again: list[tuple[str, float]] = []
        """The run folders of jobs for which a requeue succeeded, and when it began."""
        self.slurm = Slurm(world, self.settings, self.body())
        self.listed: list[tuple[str, JobRecord]] = []
        """What the last `hpcjobs ps` listed."""
        self.has_forgotten = False
        self.files: seams.Files

    def body(self) -> Any:
        """What jobs do, by their scripts."""
        return bodies.body_of(self.world, self.works, self.arguments)

    def seams(self) -> AbstractContextManager[None]:
        """Further places where the package reaches outside."""
        return nullcontext()

    # --- what users do

    def user(self, name: str, deed: Callable[[], None], *, host: str = "login1", delay_s: float = 0.0) -> Any:
        """A command of hpcjobs; an error that it would print is its end."""

        def main() -> None:
            try:
                deed()
            except HpcJobsError as error:
                self.world.log(f"{name}: {type(error).__name__}: {error.message}")
            except (KeyboardInterrupt, TimeoutError) as error:
                self.world.log(f"{name}: {type(error).__name__}")
            except OSError as error:
                if error.filename is None:
                    self.errors.append(f"{name} ends with {error!r}, which names no file")
                self.world.log(f"{name}: {error!r}")
            except Exception as error:
                self.errors.append(f"{name} ends with {type(error).__name__}: {error}")
                self.world.log(f"{name}: {type(error).__name__}: {error}")
                raise

        return self.world.start(name, main, host=host, delay_s=delay_s)

    def submit(self, one: Submission) -> None:
        one.sent += 1
        one.outcome = "killed"  # unless it gets further
        own_plan = one.plan  # a repeated command gives the submission its own while this one is under way
        try:
            handle = submit(own_plan)
        except SchedulerDownError as error:
            one.outcome = "unknown" if error.maybe_taken else "refused"
            raise
        except KeyboardInterrupt:
            one.outcome = "interrupted"
            checkers.check_interrupted(self, own_plan)
            raise
        except (HpcJobsError, OSError):
            one.outcome = "refused"
            raise
        one.outcome, one.entry = "accepted", handle.entry

    def resubmit(self, one: Submission) -> None:
        """The laptop sends the same command again: a new plan, the same token."""
        if one.outcome == "accepted":
            return
        run_dir = Path(f"{one.plan.run_dir}-again{one.sent}")
        again = plan_for(one.kind, run_dir, array=one.plan.job.resources.array)
        self._know(run_dir, one.work, one.kind)
        one.plan = again
        self.submit(one)

    def _know(self, run_dir: Path, work: bodies.Work, kind: str) -> None:
        fresh = {"run_dir": str(run_dir), "completed": [], "runs": [], "failed_once": set()}
        copy = bodies.Work(**{**vars(work), **fresh})
        self.works[str(run_dir)] = copy
        self.arguments[str(run_dir)] = [
            *("--run-dir", str(run_dir), "--tasks", "1", "--scheduler", "slurm", "--warning", "300"),
            *("--budgets", "timeout=3,preempt=3,node=2,error=1", "--", "bash", f"{run_dir}/job.sh"),
        ]

    def look(self) -> None:
        """`hpcjobs ps -a`."""
        shown = listing.listing(since=EPOCH_S - 1)
        self.listed = [(row.run_dir, row.record) for row in shown.rows if row.run_dir is not None]
        self.note("ps", list(self.listed), is_away=bool(shown.errors))

    def note(self, who: str, rows: list[tuple[str | None, JobRecord]], *, is_away: bool = False) -> None:
        current = self.world.current
        is_misled = current is not None and current.name in self.world.misled
        away = is_away or self.slurm.down["dbd"] or self.slurm.down["ctl"] or is_misled
        checkers.check_shown(self, who, rows)
        self.seen += [
            Seen(self.world.now, who, run_dir, record, away) for run_dir, record in rows if run_dir is not None
        ]

    def entry_of(self, one: Submission) -> Entry:
        """As a user names the job: by its folder."""
        return select.select([str(one.plan.run_dir)])[0]

    def wait(self, one: Submission) -> None:
        this = Wait(self.world.now, killed=True, process=self.world.current)
        one.waits.append(this)
        try:
            entry = self.entry_of(one)
            this.known = wait.wait([entry])
        except BaseException as error:
            if isinstance(error, Exception):
                this.killed, this.error = False, f"{type(error).__name__}: {error}"
                this.lasted = self.world.now - this.began
            raise
        this.killed, this.ended, this.code = False, self.world.now, wait.exit_code(this.known)
        self.note("wait", [(entry.run_dir, record) for known in this.known for record in known.records])

    def cancel(self, one: Submission) -> None:
        entry = self.entry_of(one)
        began = self.world.now
        if one.cancelled is None:
            one.cancelling = began
        outcome = control.cancel([entry])
        if outcome.cancelled:
            one.cancelling, one.cancelled = began, self.world.now
            self.world.log(f"user: cancelled {outcome.cancelled}")

    def control(self, verb: control.Verb, one: Submission) -> None:
        entry, began = self.entry_of(one), self.world.now
        if verb == "requeue":
            one.requeued.append(began)  # of an array, some tasks may be, and others refused
        try:
            control.control(verb, [entry])
        finally:
            if verb == "requeue" and self.world.current is not None:
                one.requeued[-1] = self.world.now  # when Slurm has taken it, at the latest
        checkers.check_control(self, verb, entry.run_dir, began)
        if verb == "requeue":
            self.started_again.append((entry.run_dir, began))

    def requeue_by_hand(self, one: Submission) -> None:
        """`scontrol requeue`, of which hpcjobs hears nothing."""
        entry = self.entry_of(one)
        one.requeued.append(self.world.now)
        if self.slurm.run(["scontrol", "requeue", current_id(entry)]).code == 0:
            self.started_again.append((entry.run_dir, self.world.now))

    def rerun(self, one: Submission) -> None:
        again = rerun.plan_rerun(self.entry_of(one), JobSpec(), made_by="a test").plan
        self._know(again.run_dir, one.work, one.kind)
        copy = Submission(self.works[str(again.run_dir)], again, one.array, one.kind)
        self.submissions.append(copy)
        self.submit(copy)

    def archive(self, one: Submission) -> None:
        entry = self.entry_of(one)
        target = self.home / f"{one.plan.run_dir.name}.tar"
        checkers.check_archive(self, entry.run_dir, archive.archive(entry, target).path)

    def prune(self, age_s: float) -> None:
        choice = archive.select_old(age_s=age_s)
        self.remove(choice.old)

    def remove(self, old: list[archive.Old]) -> None:
        for one in old:
            checkers.check_removal(self, one.entry.run_dir)
        self.pruned |= {one.entry.run_dir for one in old}  # it may be killed half-way
        self.removed |= {removed.entry.run_dir for removed in archive.remove(old)}

    # --- the schedule

    def prepare(self) -> None:
        draw = self.world.random
        runs = self.home / "runs"
        for number in range(draw.choice((1, 1, 2, 3))):
            kind = draw.choice(("plain", "retries", "retries", "array", "retries-array"))
            run_dir = runs / f"{kind}-{number}"
            fails = draw.random() < 0.3
            work = bodies.Work(
                str(run_dir),
                retries=kind.startswith("retries"),
                steps=draw.choice((1, 10, 40, 86, 100)),
                step_s=draw.choice((0.5, 20.0, 20.0, 60.0)),
                code=draw.choice((1, 3, 137)) if fails else 0,
                fails_at=draw.randrange(1, 12) if fails and kind.startswith("retries") else None,
                fails_always=draw.random() < 0.3,
                saves=draw.random() < 0.85,
                on_term=draw.choice(("save", "save", "die", "ignore")),
                save_s=draw.choice((1.0, 8.0, 60.0)),
            )
            array = "0-2" if kind.endswith("array") else None
            name = _NAMES[kind]
            self._know(run_dir, work, name)
            one = Submission(work, plan_for(name, run_dir, array=array), 3 if array else 0, name)
            self.submissions.append(one)
            self._plan_deeds(one, number)
        for _ in range(draw.randrange(4)):
            self.user("ps", self.look, host=draw.choice(("login1", "login2")), delay_s=draw.uniform(0, BUSY_S))
        if draw.random() < 0.3:
            self.user("prune", lambda: self.prune(0.0), delay_s=draw.uniform(600, BUSY_S))
        self.plan_events()

    def plan_events(self) -> None:
        """What happens to the cluster, at its times."""
        for fault in self.schedule.faults:
            if fault.kind == "event":
                self.world.after(fault.at, functools.partial(self._happen, fault))

    def _plan_deeds(self, one: Submission, number: int) -> None:
        draw, at = self.world.random, self.world.random.uniform(0, 600)
        token = f"token{number}" if draw.random() < 0.4 else None
        one.token = token
        process = self.user(f"submit {number}", lambda: self.submit(one), delay_s=at)
        if token is not None:
            process.environ["HPCJOBS_SUBMISSION"] = token
            for again in range(2):
                later = at + draw.uniform(1, 900) * (again + 1)
                host = draw.choice(("login1", "login1", "login2"))
                repeat = self.user(f"submit {number} again", lambda: self.resubmit(one), host=host, delay_s=later)
                repeat.environ["HPCJOBS_SUBMISSION"] = token
        for _ in range(draw.randrange(3)):
            delay_s = at + draw.choice((2.0, 30.0, 600.0)) * draw.random()
            self.user(f"wait {number}", lambda: self.wait(one), delay_s=delay_s)
        if draw.random() < 0.3:
            # Also while a job saves ahead of its limit.
            after = draw.choice((0.0, 0.0, 0.0, WARNED_S)) or draw.choice((5, 300, 3000)) * draw.random()
            self.user(f"cancel {number}", lambda: self.cancel(one), delay_s=at + after + 60 * draw.random())
        if draw.random() < 0.3:
            verb: control.Verb = draw.choice(("hold", "requeue", "requeue"))
            # While it runs, or until Slurm has forgotten it.
            after = at + draw.choice((draw.uniform(1, 4000), one.work.steps * one.work.step_s * draw.uniform(0, 1.5)))
            self.user(f"{verb} {number}", lambda: self.control(verb, one), delay_s=after)
            for look in (lambda: self.wait(one), self.look)[: draw.randrange(3)]:
                self.user(f"look {number}", look, delay_s=after + draw.uniform(1, 200))
            if verb == "hold":
                self.user(f"release {number}", lambda: self.control("release", one), delay_s=after + 100)

        if draw.random() < 0.25:
            self.user(f"story {number}", lambda: self._story(one), delay_s=at + 3.0)
        if draw.random() < 0.1:
            self.user(f"rerun {number}", lambda: self.rerun(one), delay_s=at + draw.choice((30.0, 3000.0)))
        if draw.random() < 0.1:
            self.user(f"archive {number}", lambda: self.archive(one), delay_s=at + draw.uniform(10, BUSY_S / 2))

    def _story(self, one: Submission) -> None:
        """Somebody waits for the end of a job, has it done again, and looks, waits or tidies up at once."""
        draw = self.world.random
        self.wait(one)
        self.world.sleep(draw.choice((1.0, 100.0, 400.0, 2000.0)))
        if int(self.world.now) % 2:  # no draw: the seeds keep their courses
            self.requeue_by_hand(one)
        else:
            self.control("requeue", one)
        self.world.sleep(draw.choice((1.0, 60.0, 130.0, 200.0, 800.0)))
        draw.choice((self.look, lambda: self.wait(one), lambda: self.prune(0.0)))()

    def _happen(self, fault: Fault) -> None:
        slurm, draw = self.slurm, self.world.random
        self.world.injected.append(fault)
        if fault.detail in ("node", "ghost"):
            busy = [name for job in slurm.jobs.values() if job.attempt is not None for name in job.attempt.nodes]
            name = draw.choice(busy or slurm.names)
            slurm.fail_node(
                name,
                back_after_s=600.0,
                ghost_s=0.0 if fault.detail == "node" else draw.choice((50.0, 200.0, 2000.0)) * draw.random(),
            )
        elif fault.detail == "preempt":
            slurm.preempt()
        elif fault.detail in ("restart", "forget"):
            self.has_forgotten = self.has_forgotten or fault.detail == "forget"
            slurm.restart(away_s=draw.choice((10.0, 100.0, 700.0)), keeps_state=fault.detail == "restart")
        elif fault.detail == "full":
            self.world.full_until = self.world.now + draw.choice((60.0, 1800.0, 9000.0))
            self.world.log(f"the disk is full until {self.world.full_until - EPOCH_S:.0f}")
        elif fault.detail == "power":
            self.files.cut_power(draw.choice(("login1", "login1", "login2")))
        elif fault.detail == "skew":
            self.world.skews[draw.choice(("login1", "login2", *slurm.names))] = draw.uniform(-120, 120)
            self.world.log(f"clocks of hosts: {self.world.skews}")
        elif fault.detail == "dbd":
            slurm.lose_accounting(away_s=draw.choice((30.0, 3000.0)))
        else:
            self.world.skew += {"jump+": 200.0, "jump-": -200.0}[fault.detail]
            self.world.log(f"clocks jump by {fault.detail}")

    def quieten(self) -> None:
        """No fault happens any more; held jobs are released; then somebody looks at everything, twice."""
        world = self.world
        self.end_faults()
        for job in list(self.slurm.jobs.values()):
            if job.held:
                self.slurm._do_release(job)
        world.run(2 * 86400.0)
        for delay_s in (1.0, 700.0):  # a submission that was cut short is given up after 10 minutes
            self.user("last ps", self.look, delay_s=delay_s)
        world.run(1000.0)

    def end_faults(self) -> None:
        """No fault happens any more."""
        self.world.faults.clear()
        self.world.skews.clear()
        self.world.skew = self.world.full_until = 0.0

    def check(self) -> None:
        """Add what did not hold to ``errors``."""
        checkers.check_end(self)


class FederationLife(Life):
    """A job may start on the other cluster of a federation, which does not answer at times."""

    sibling_nodes = 2

    def plan_events(self) -> None:
        super().plan_events()
        draw = self.world.random
        if draw.random() < 0.3:
            away_s = draw.choice((30.0, 700.0, 5000.0))
            self.world.after(draw.uniform(1, BUSY_S), lambda: self.slurm.lose_sibling(away_s=away_s))


def run(schedule: Schedule, place: Path, *, of: type[Life] = Life) -> Life:
    """Play a schedule of this kind of lives; what the checkers found is in ``errors``."""
    for kind, array in (("plain", None), ("plain", "0-2"), ("retries", None), ("retries", "0-2")):
        _plan(kind, array)
    home = place / "home"
    seams.clear(place)
    home.mkdir(parents=True)
    (home / "runs").mkdir()
    life = of(schedule, home)
    start_script = bodies.start_script(life.world, lambda: _job_of_current(life))
    with (
        seams.inside(life.world, life.slurm, home, start_script=start_script) as life.files,
        patch.object(os, "getcwd", lambda: str(home)),
        life.seams(),
    ):
        try:
            life.prepare()
            life.world.run(BUSY_S)
            life.quieten()
            life.check()
        except AssertionError as error:
            life.errors.append(f"{error}")
    life.errors += life.world.problems
    return life


def _job_of_current(life: Life) -> tuple[bodies.Work, Any]:
    current = life.world.current
    attempt = next(a for j in life.slurm.every for a in j.attempts if a.process is current)
    return life.works[str(Path(attempt.job.script).parent)], attempt


def ended_in_truth(states: Collection[str]) -> bool:
    return all(state in simulated.ENDED or state == "LOST" for state in states)


__all__ = ["Fault", "JobHandle", "JobSpec", "Life", "Schedule", "draw_faults", "run"]
