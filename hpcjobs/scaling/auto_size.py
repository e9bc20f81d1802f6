"""``hpcjobs submit -N auto``: finds the size of a run from earlier runs of the program and short trials in a budget.

A trial is a job like the run itself, with the size under test, a short time limit and without retries. Trials of
earlier commands count as earlier runs, so an interrupted or repeated command continues from their measurements.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from msgspec.structs import replace

from hpcjobs.errors import RequestError, SchedulerError
from hpcjobs.job.models import Job, JobSpec, Layer
from hpcjobs.job.plan import plan_of, resolve_request, run_dir_of
from hpcjobs.run import folder
from hpcjobs.run.folder import code_state
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import counts_as_measurement, explain_missing_rate, requested_figure
from hpcjobs.run.submit import hand_over
from hpcjobs.run.wait import wait
from hpcjobs.runtime.checkpoints import FOLDER as CHECKPOINTS
from hpcjobs.scaling.earlier_runs import TRIAL, EarlierRun, find_runs
from hpcjobs.scaling.fits import Interval
from hpcjobs.scaling.size_choice import (
    PER,
    MeasuredSize,
    MissingRuns,
    SizeAnswer,
    SizeChoice,
    SizeRow,
    Value,
    choose_by_efficiency,
    choose_by_end,
    choose_fastest,
    describe,
    describe_reached,
    measure_sizes,
)
from hpcjobs.scaling.study_sweep import current_code
from hpcjobs.scheduler.base import JobRecord, Report, connect
from hpcjobs.scheduler.local.client import machine_cpus
from hpcjobs.scheduler.slurm.estimates import estimate_start
from hpcjobs.site.library import default_site, load_site
from hpcjobs.units import format_count, human_duration, slurm_time, walltime_s

AXES: Final = ("launcher", "cpus_per_task", "ntasks_per_node", "nodes")
"""Options that may be ``auto``, in the order of the search."""
_LONGEST_S: Final = 600
"""Time limit of a trial at most."""
_FIRST_ROUNDS: Final = 16
"""A trial may cost the budget at the smallest size divided by this, so that trials of doubled sizes fit too."""
_LARGEST: Final = 4096
_CLOCK: Final = re.compile(r"\d{1,2}:\d{2}(:\d{2})?", re.ASCII)


class TrialBudget(NamedTuple):
    """The most that trials may cost: a share of the run's node time at the size found, or node-seconds."""

    share: float | None = 0.05
    node_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> TrialBudget:
        """``5%`` of the run, or node-hours.

        Raises RequestError: neither.
        """
        number = text.removesuffix("%")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0 < value < (100 if number != text else 1e9):
            raise RequestError(f"--budget {text}: no budget", hint="write 5% of the run, or node-hours such as 0.5")
        return cls(value / 100, None) if number != text else cls(None, value * 3600)

    def allowed_s(self, job: Job, nodes: int) -> float:
        """Node-seconds, where the run will have at least ``nodes``."""
        if self.node_s is not None:
            return self.node_s
        if job.time_limit_s is None:
            raise RequestError(
                f"how long the run takes is not known, and so not what {self} is",
                hint="name a time limit (-t 4h), or --budget in node-hours",
            )
        return (self.share or 0) * job.time_limit_s * nodes

    def __str__(self) -> str:
        return f"{self.share * 100:g}% of the run" if self.share else f"{(self.node_s or 0) / 3600:g} node-hours"


class Goal(NamedTuple):
    """The options to choose, the budget, and the efficiency or end time to reach."""

    axes: tuple[str, ...]
    budget: TrialBudget = TrialBudget()
    min_efficiency: float = 0.8
    finish_by: float | None = None
    """Seconds since 1970."""


class Bench(Protocol):
    """Measures sizes with jobs of a scheduler, real or simulated."""

    def job(self, options: Mapping[str, Value]) -> Job:
        """The run with these options; raises RequestError if it does not fit the site."""

    def launchers(self) -> Sequence[str]: ...

    def runs(self, like: Job, axis: str) -> list[EarlierRun]: ...

    def wait(self, entries: Iterable[Entry]) -> None: ...

    def measure(self, options: Mapping[str, Value], *, count: int, limit_s: int) -> None:
        """Run trials to their end."""

    def wait_s(self, job: Job) -> float | None:
        """How long the job would wait in the queue; None: no estimate."""

    def now(self) -> float: ...


class QueueBench(NamedTuple):
    """Measures by jobs of the site's scheduler."""

    request: JobSpec
    layers: Sequence[Layer]
    site: str | None
    made_by: str
    report: Report
    records: dict[str, JobRecord]
    """The ends of the trials that were awaited, by run folder."""

    def job(self, options: Mapping[str, Value], **more: object) -> Job:
        values: dict[str, Any] = {**options, **more}
        job = resolve_request(self.request, self.site, spec=self.layers, **values)
        cpus = job.ntasks_per_node * (job.resources.cpus_per_task or 1)
        if not job.kind.has_nodes and cpus > machine_cpus():
            raise RequestError(f"this machine has {format_count(machine_cpus(), 'CPU')}: auto tries no {cpus}")
        return job

    def launchers(self) -> Sequence[str]:
        return load_site(self.site or default_site()).launchers or ()

    def runs(self, like: Job, axis: str) -> list[EarlierRun]:
        return find_runs(like, axis=axis, code=current_code(Path(like.chdir)), records=self.records)

    def wait(self, entries: Iterable[Entry]) -> None:
        try:
            known = wait(entries, report=self.report)
        except KeyboardInterrupt:
            self.report("stopped waiting; the trials continue, and the same command goes on with what they measure")
            raise
        self.records.update((one.entry.run_dir, record) for one in known for record in one.records)

    def measure(self, options: Mapping[str, Value], *, count: int, limit_s: int) -> None:
        bare = self._replace(request=replace(self.request, notify=(), signal_before=None, snapshot=None))
        named = bare.job(options)
        job = bare.job(options, time=slurm_time(limit_s), retries="off", name=f"{named.name}{TRIAL}")
        scheduler, entries = connect(job.scheduler, job.slurm_conf), []
        self.report(f"{format_count(count, 'trial')} of {describe(options)}, {human_duration(limit_s)} at most each")
        for _ in range(count):
            plan = plan_of(job, run_dir_of(job), made_by=self.made_by)
            folder.create(plan, code_state(Path(job.chdir)))
            entries.append(hand_over(plan, scheduler, refused=folder.remove).entry)
            if not job.kind.has_nodes:  # on one machine they would slow each other down
                self.wait(entries)
        self.report(f"job {', '.join(entry.job_id for entry in entries)}")
        self.wait(entries)

    def wait_s(self, job: Job) -> float | None:
        if not job.kind.takes_sbatch_options:
            return 0.0
        start = estimate_start(job).start
        return None if start is None else max(0.0, start - self.now())

    def now(self) -> float:
        return time.time()


def find_size(goal: Goal, bench: Bench, *, report: Report, tries: bool = True) -> SizeAnswer:
    """The size of the next run. Without ``tries`` no trial is submitted, and the answer names the next one.

    Raises RequestError: the program has no figure, the budget pays no trial, or no size ends in time.
    """
    return _Search(goal, bench, report, tries=tries).answer()


class _Axis(NamedTuple):
    """An option to choose; numbers stand for its values: counts, or positions in ``launchers`` from 1."""

    name: str
    smallest: int
    largest: int
    launchers: Sequence[str] = ()

    def value(self, n: int) -> Value:
        return self.launchers[n - 1] if self.launchers else n

    def number(self, job: Job) -> int:
        if self.launchers:
            return self.launchers.index(job.launcher) + 1 if job.launcher in self.launchers else 0
        cpus = job.resources.cpus_per_task
        return {"nodes": job.nodes, "ntasks_per_node": job.ntasks_per_node}.get(self.name, cpus or 1)


class _Search:
    """One search over all axes; the sizes of an axis are measured with the answers of the axes before."""

    def __init__(self, goal: Goal, bench: Bench, report: Report, *, tries: bool) -> None:
        self.goal, self.bench, self.report, self.tries = goal, bench, report, tries
        self.reasons: list[str] = []
        self.rows: list[SizeRow] = []
        self.used: dict[str, EarlierRun] = {}
        self.unit = ""
        self.next_trial: str | None = None
        self.allowed_s: float | None = None

    def answer(self) -> SizeAnswer:
        axes = [name for name in AXES if name in self.goal.axes]
        chosen: dict[str, Value] = {}
        for position, name in enumerate(axes):
            others: dict[str, Value] = {**chosen, **dict.fromkeys(axes[position + 1 :], 1)}
            if "nodes" in axes[position + 1 :]:
                others["nodes"] = self._first_that_fits("nodes", others)
            chosen[name] = self._choose(self._bounds(name, others), others)
            if self.next_trial is not None:
                break
        trials = [run for run in self.used.values() if run.is_trial]
        state = _find_state(trials, self.bench.job(chosen)) if self.next_trial is None else None
        return SizeAnswer(
            options={axis: str(value) for axis, value in chosen.items()},
            reasons=self.reasons,
            unit=self.unit,
            sizes=self.rows,
            trials=[run.job_id for run in trials],
            earlier_runs=[run.job_id for run in self.used.values() if not run.is_trial],
            cost_node_s=sum(run.node_s for run in trials),
            budget_node_s=self.allowed_s,
            resumes_from=None if state is None else str(state),
            next_trial=self.next_trial,
        )

    def _fits(self, options: Mapping[str, Value]) -> bool:
        try:
            self.bench.job(options)
        except RequestError:
            return False
        return True

    def _first_that_fits(self, name: str, others: Mapping[str, Value]) -> int:
        first = next((n for n in range(1, 65) if self._fits({**others, name: n})), None)
        if first is None:
            self.bench.job({**others, name: 1})  # raises the reason why no size fits the site
        return first or 1

    def _bounds(self, name: str, others: Mapping[str, Value]) -> _Axis:
        """The smallest and the largest value that the site allows."""
        if name == "launcher":
            launchers = [one for one in self.bench.launchers() if self._fits({**others, name: one})]
            return _Axis(name, 1, len(launchers), launchers)
        smallest = low = self._first_that_fits(name, others)
        high = 2 * low
        while high <= _LARGEST and self._fits({**others, name: high}):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits({**others, name: middle}) else (low, middle)
        return _Axis(name, smallest, low)

    def _choose(self, axis: _Axis, others: Mapping[str, Value]) -> Value:
        """Measure until the decision is possible, or the budget is used up."""
        like = self.bench.job({**others, axis.name: axis.value(axis.smallest)})
        if like.batch_script is not None or like.resources.array:
            raise RequestError(
                "auto measures a program whose tasks hpcjobs starts, and this is an array or a batch script",
                hint="name the size, or give the program in place of the script",
            )
        tried: tuple[int, int] | None = None
        while True:
            runs = self.bench.runs(like, axis.name)
            if self.tries and (going_on := [run for run in runs if run.is_trial and not run.ended]):
                self.report(f"waiting for trials of an earlier command: {', '.join(run.job_id for run in going_on)}")
                self.bench.wait(run.entry for run in going_on)
                continue
            by_n = self._by_number(axis, runs)
            if tried is not None and len(by_n.get(tried[0], ())) <= tried[1]:  # a trial without a figure
                failed = [run for run in runs if run.is_trial and axis.number(run.job) == tried[0]]
                if tried[0] == axis.smallest or (axis.launchers and not by_n):
                    raise _no_figure(failed)
                ids = ", ".join(run.job_id for run in failed[-1:])
                name = describe({axis.name: axis.value(tried[0])})
                what = "gave no figure" if all(map(_ran_through, failed)) else "failed"
                self.reasons.append(f"trials of {name} {what}{ids and f' (job {ids})'}")
                if axis.launchers:
                    left = [one for one in axis.launchers if one != axis.value(tried[0])]
                    axis, tried = axis._replace(largest=len(left), launchers=left), None
                    continue
                axis = axis._replace(largest=tried[0] - 1)
            step = self._decide(axis, by_n, others)
            if isinstance(step, MissingRuns):
                options = {**others, axis.name: axis.value(step.n)}
                least = self.bench.job({**others, axis.name: axis.value(step.at_least)})
                refusal = self._over_budget(like, runs, self.bench.job(options), least, step.runs)
                if refusal is not None and (not by_n or step.best is None):
                    raise RequestError(refusal, hint="a larger --budget, a longer -t, or a size of your own")
                if refusal is None and self.tries:
                    tried = step.n, len(by_n.get(step.n, ()))
                    # Trials that hang use up what is left of the budget, and no more.
                    left_s = int(self._left_s(runs) / (step.runs * self.bench.job(options).nodes))
                    try:
                        self.bench.measure(options, count=step.runs, limit_s=min(self._limit_s(like), max(1, left_s)))
                    except SchedulerError as error:
                        if not by_n:
                            raise
                        self.report(f"{describe(options)}: {error.message}")
                    continue
                if refusal is None:
                    each = human_duration(self._limit_s(like))
                    self.next_trial = f"{format_count(step.runs, 'trial')} of {describe(options)}, {each} at most each"
                known = self._describe(axis, by_n, step.best)
                step = SizeChoice(step.best or axis.smallest, "; ".join(filter(None, (known, refusal))))
            if self.goal.finish_by is not None and not self.tries and not axis.launchers:
                step = step._replace(
                    reason="; ".join(filter(None, (step.reason, "the wait in the queue is not counted by a dry run")))
                )
            if step.n is None:
                raise RequestError(step.reason, hint="a later --finish-by, or --min-efficiency instead of it")
            self.reasons += [step.reason] if step.reason else []
            self._record(axis, by_n, (run for run in runs if run.is_trial))
            return axis.value(step.n)

    def _describe(self, axis: _Axis, by_n: Mapping[int, list[EarlierRun]], best: int | None) -> str | None:
        """Describe the efficiency of ``best``, chosen although runs are missing; None if another rule decides."""
        sizes = measure_sizes(by_n)
        taken = next((size for size in sizes if size.n == best), None)
        is_by_efficiency = not axis.launchers and self.goal.finish_by is None and len(sizes) > 1
        return describe_reached(taken, sizes, PER[axis.name]) if taken is not None and is_by_efficiency else None

    def _decide(
        self, axis: _Axis, by_n: Mapping[int, list[EarlierRun]], others: Mapping[str, Value]
    ) -> MissingRuns | SizeChoice:
        sizes = measure_sizes({n: runs for n, runs in by_n.items() if n <= axis.largest})
        if axis.launchers:
            return choose_fastest(sizes, axis.launchers)
        bounds = {"smallest": axis.smallest, "largest": axis.largest}
        if self.goal.finish_by is None:
            return choose_by_efficiency(sizes, **bounds, target=self.goal.min_efficiency, per=PER[axis.name])
        ends: dict[int, float] = {}

        def end(size: MeasuredSize) -> float:
            if size.n not in ends:
                ends[size.n] = self._end(self.bench.job({**others, axis.name: size.n}), size)
            return ends[size.n]

        return choose_by_end(sizes, **bounds, finish_by=self.goal.finish_by, end=end, per=PER[axis.name])

    def _end(self, job: Job, size: MeasuredSize) -> float:
        if size.duration_s is None:
            raise RequestError(
                "how long a complete run takes is not known: its trials end before it does",
                hint="a program that writes total_steps to its metrics tells; --min-efficiency needs no duration",
            )
        wait_s = self.bench.wait_s(job) if self.tries else 0.0
        if wait_s is None:
            self.report(f"the scheduler has no estimate for {job.nodes} nodes: no waiting time is counted")
        return self.bench.now() + (wait_s or 0.0) + size.duration_s

    def _by_number(self, axis: _Axis, runs: Sequence[EarlierRun]) -> dict[int, list[EarlierRun]]:
        """Runs with a figure, in the unit of the newest one."""
        with_figure = [run for run in runs if run.throughput is not None]
        self.unit = with_figure[-1].unit or "" if with_figure else self.unit
        by_n: dict[int, list[EarlierRun]] = {}
        for run in with_figure:
            if (run.unit or "") == self.unit and (n := axis.number(run.job)) >= axis.smallest:
                by_n.setdefault(n, []).append(run)
        return by_n

    def _over_budget(self, like: Job, runs: Sequence[EarlierRun], job: Job, least: Job, count: int) -> str | None:
        """Reason why the budget does not cover the trials, or None."""
        trials = [run for run in runs if run.is_trial]
        self.allowed_s = self.goal.budget.allowed_s(like, least.nodes)
        spent = self.allowed_s - self._left_s(runs)
        # A trial takes as long as the longest one before: to its end, or until it is killed after its limit.
        each_s = 1.1 * max(run.elapsed_s for run in trials) if trials else self._limit_s(like)
        cost = count * job.nodes * each_s
        if spent + cost <= self.allowed_s:
            return None
        return (
            f"the budget, {self.goal.budget}, is {human_duration(self.allowed_s)} of one node:"
            f" {format_count(count, 'trial')} of {format_count(job.nodes, 'node')} would be {human_duration(cost)}"
            + (f" beside {human_duration(spent)} that trials took" if spent else "")
        )

    def _left_s(self, runs: Sequence[EarlierRun]) -> float:
        """Node-seconds of the budget that trials have not used."""
        trials = {run.job_id: run.node_s for run in (*self.used.values(), *runs) if run.is_trial}
        return (self.allowed_s or 0.0) - sum(trials.values())

    def _limit_s(self, like: Job) -> int:
        part_s = self.goal.budget.allowed_s(like, like.nodes) / like.nodes / _FIRST_ROUNDS
        return max(60, int(min(part_s, like.time_limit_s or _LONGEST_S, _LONGEST_S)) // 60 * 60)

    def _record(self, axis: _Axis, by_n: Mapping[int, list[EarlierRun]], trials: Iterable[EarlierRun]) -> None:
        """Record the measured sizes, and every trial: a trial without a figure had its cost too."""
        self.used |= {run.job_id: run for run in (*trials, *itertools.chain(*by_n.values()))}
        for size in measure_sizes(by_n):
            efficiency = Interval(0.0) if axis.launchers else size.efficiency
            row = SizeRow(axis.name, str(axis.value(size.n)), size.runs, *size.throughput, *efficiency)
            self.rows.append(row)


def _ran_through(run: EarlierRun) -> bool:
    """Whether it ended by itself without an error, or by its time limit."""
    return run.state is not None and counts_as_measurement(run.state)


def _no_figure(runs: Sequence[EarlierRun]) -> RequestError:
    """The trials at the smallest size gave no figure: they failed, or the program has none."""
    names = ", ".join(run.job_id for run in runs)
    if all(map(_ran_through, runs)):
        reasons = (explain_missing_rate(run.folder, requested_figure(run.job)) for run in runs)
        problems = list(dict.fromkeys(filter(None, reasons)))
        if problems:
            return RequestError(
                f"job {names} ended, and its figure cannot be used: {'; '.join(problems)}",
                hint=f"hpcjobs logs {runs[-1].job_id} shows what the program prints; mend --metric or figures:",
            )
        return RequestError(
            f"the program has no figure of merit: job {names} ended, and its run folder does not say how fast it was",
            hint=r"add --metric 'tokens/s (\S+)' for a rate that it prints, or throughput to its summary.json",
        )
    return RequestError(f"the trials failed: job {names}", hint=f"hpcjobs why {runs[-1].job_id if runs else ''}")


def _find_state(trials: Sequence[EarlierRun], job: Job) -> Path | None:
    """The folder of the newest trial of exactly this run that has checkpoints."""
    alike = [run for run in trials if (run.job.nodes, run.job.ntasks_per_node, run.job.argv) ==
             (job.nodes, job.ntasks_per_node, job.argv)]  # fmt: skip
    folders = [run.folder for run in alike if (run.folder / CHECKPOINTS).is_dir()]
    return max(folders, key=lambda path: (path / CHECKPOINTS).stat().st_mtime, default=None)


def parse_finish(text: str, *, now: float | None = None) -> float:
    """Seconds since 1970 of ``18:00`` or ``18:00:30`` (the next one), ``2026-11-30T08:00``, or ``8h`` from now.

    A date is local unless it names a time zone (``Z``, ``+05:00``).

    Raises RequestError: none of these, or a time in the past.
    """
    now, hint = time.time() if now is None else now, "write 18:00, 2026-11-30T08:00 or 8h"
    try:
        if _CLOCK.fullmatch(text):
            clock = datetime.strptime(text, "%H:%M:%S" if text.count(":") > 1 else "%H:%M").time()
            today = datetime.fromtimestamp(now).date()
            moments = (datetime.combine(day, clock).timestamp() for day in (today, today + timedelta(days=1)))
            return next(moment for moment in moments if moment > now)
        if "T" not in text:
            return now + walltime_s(text)
        moment = datetime.fromisoformat(re.sub(r"Z\Z", "+00:00", text)).timestamp()
    except (ValueError, OverflowError) as error:
        raise RequestError(f"--finish-by {text}: no time", hint=hint) from error
    if moment <= now:
        raise RequestError(f"--finish-by {text} is in the past", hint=hint)
    return moment
