"""Advice for jobs submitted with hpcjobs, and for studies."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.jobstats.columns import JobFilter
from hpcjobs.jobstats.sources import gather
from hpcjobs.jobstats.usage import Advice, JobUsage, advise
from hpcjobs.processes.programs import Runner, run
from hpcjobs.record import MANIFEST
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import CLOCK_TOLERANCE_S, own_ids
from hpcjobs.run.select import is_known_configuration, select
from hpcjobs.run.submission import plan_in
from hpcjobs.scaling import study
from hpcjobs.scaling.analysis import Analysis, analyse
from hpcjobs.scaling.earlier_runs import EarlierRun, find_runs
from hpcjobs.scaling.runs import read_runs
from hpcjobs.scaling.size_choice import describe_reached, find_reached, measure_sizes
from hpcjobs.scaling.study import Study
from hpcjobs.scaling.study_sweep import list_runs, read_code
from hpcjobs.scheduler.slurm.estimates import ask_sbatch
from hpcjobs.site.checks import Moment
from hpcjobs.units import human_duration

_AT_ONCE_S: Final = 60
_TARGET: Final = 0.8


class StartEstimates(NamedTuple):
    """When the job would start now, in seconds since 1970."""

    as_requested: Moment
    as_advised: Moment

    def __str__(self) -> str:
        now = time.time()
        waits_s = (moment - now for moment in self)
        before, after = ("at once" if wait_s < _AT_ONCE_S else f"in {human_duration(wait_s)}" for wait_s in waits_s)
        if abs(self.as_requested - self.as_advised) < _AT_ONCE_S:
            return f"submitted now it would start {before} either way, as Slurm's queue stands"
        return f"submitted now it would start {after} instead of {before}, as Slurm's queue stands"


class RightSize(NamedTuple):
    """Advice for the next submission, and its effect on the wait."""

    advice: list[Advice]
    starts: StartEstimates | None
    """None: no advice, or no estimate by Slurm."""


def right_size(names: list[str], *, site: str | None = None) -> dict[str, RightSize]:
    """Job id, or name of a study -> advice for the next submission.

    Raises UnknownJobError: a name is of no job and no study.
    """
    results: dict[str, RightSize] = {}
    for name in names:
        if os.path.isfile(study.path_of(name)):
            measured_study = study.read(study.path_of(name))
            analysis = analyse(read_runs(measured_study), allow_mixed=True)
            starts = _estimate_study_starts(measured_study, analysis)
            results[measured_study.name] = RightSize(advise_nodes(analysis), starts)
            continue
        for entry in select([name], site=site):
            ids = (entry.job_id,) if entry.task is None else tuple(own_ids(entry))
            rows = gather(JobFilter(since=0, job_ids=ids), site=entry.site).jobs.to_dicts()
            mine = [row for row in rows if None in (entry.user, row["user"]) or entry.user == row["user"]]
            # Other jobs may have had, or got, this id.
            own = [row for row in mine if row["run_dir"] == entry.run_dir]
            own = own or [row for row in mine if row["run_dir"] is None and _is_no_earlier(row, entry)]
            if not own:
                warnings.warn(f"job {entry.named_id}: no record of it to advise from", HpcJobsWarning, stacklevel=2)
            results |= _advise_for_rows(own, Path(entry.run_dir))
    return results


def _is_no_earlier(row: Mapping[str, Any], entry: Entry) -> bool:
    """Whether the row's job was submitted with the entry's, or later, as a requeue is."""
    return row["submitted"] is None or row["submitted"] >= entry.submitted - CLOCK_TOLERANCE_S


def _advise_for_rows(rows: list[dict[str, Any]], run_dir: Path) -> dict[str, RightSize]:
    """Advice for each job or task of ``rows``; what all have in common is found once."""
    by_earlier_runs = advise_by_earlier_runs(run_dir) if rows else []
    starts: dict[tuple[str, ...], StartEstimates | None] = {}
    results: dict[str, RightSize] = {}
    for row in rows:
        advice = [*advise(JobUsage.from_row(row)), *by_earlier_runs]
        options = tuple(f"{one.option}={one.value}" for one in advice)
        if options not in starts:
            starts[options] = estimate_starts(run_dir, options)
        results[row["job_id"]] = RightSize(advice, starts[options])
    return results


def advise_by_earlier_runs(run_dir: Path) -> list[Advice]:
    """Another number of nodes, if the user's runs of this program at several numbers show one."""
    if not (run_dir / MANIFEST).exists():
        return []
    job = plan_in(run_dir).job
    by_nodes: dict[int, list[EarlierRun]] = {}
    for earlier in find_runs(job, axis="nodes", code=read_code(run_dir)):
        if earlier.throughput is not None:
            by_nodes.setdefault(earlier.job.nodes, []).append(earlier)
    sizes = measure_sizes(by_nodes)
    at = find_reached(sizes, _TARGET)
    if at is None or len(sizes) < 2 or at.n == job.nodes:
        return []
    return [Advice("--nodes", str(at.n), describe_reached(at, sizes, "nodes"))]


def advise_nodes(analysis: Analysis) -> list[Advice]:
    """The nodes (or ranks) up to which the work is done at the target efficiency."""
    at = find_reached(analysis.groups, analysis.knee.target)
    if at is None:
        return []
    reason = describe_reached(at, analysis.groups, analysis.per)
    advice = [Advice("--ntasks-per-node", str(at.ranks // at.nodes), reason)] if analysis.per == "ranks" else []
    if analysis.per == "nodes" or any(group.nodes > 1 for group in analysis.groups):
        advice.insert(0, Advice("--nodes", str(at.nodes), reason))
    return advice


def _estimate_study_starts(measured_study: Study, analysis: Analysis) -> StartEstimates | None:
    """Compare the largest measured size with the advised size."""
    largest, at = analysis.groups[-1], find_reached(analysis.groups, analysis.knee.target)
    if at is None or at is largest:
        return None
    shape = largest.nodes, largest.ranks
    runs = list_runs(measured_study)
    job_dir = next(run.job_dir for run in runs if run.job_dir and (run.size.nodes, run.size.ranks) == shape)
    return estimate_starts(Path(job_dir), [f"--nodes={at.nodes}", f"--ntasks-per-node={at.ranks // at.nodes}"])


def estimate_starts(run_dir: Path, options: Sequence[str], *, runner: Runner = run) -> StartEstimates | None:
    """Estimate the start of this run folder's job with and without ``options`` of sbatch; None without an estimate.

    Nothing is asked with a configuration of Slurm that only the run folder names.
    """
    if not options or not (run_dir / MANIFEST).exists():
        return None
    job = plan_in(run_dir).job
    if not job.kind.takes_sbatch_options or not is_known_configuration(job.slurm_conf):
        return None
    cwd = job.chdir if Path(job.chdir).is_dir() else None
    script = str(run_dir / "job.sh")
    before, after = (
        ask_sbatch([*more, script], slurm_conf=job.slurm_conf, cwd=cwd, runner=runner).start for more in ((), options)
    )
    return None if before is None or after is None else StartEstimates(before, after)
