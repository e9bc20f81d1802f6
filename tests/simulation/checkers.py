"""What must hold in each schedule. The truth is the simulated cluster's; what users saw is compared with it."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from slurm import ENDED, Job

from hpcjobs.record import STATE
from hpcjobs.record.control import REQUEUE_CODE, ControlDir
from hpcjobs.record.state import read_state_file
from hpcjobs.run import index
from hpcjobs.run.job_files import CLOCK_TOLERANCE_S, FINAL_AFTER_S, read_attempts, read_usable
from hpcjobs.units import task_ids

if TYPE_CHECKING:
    from bodies import Run
    from life import Life, Submission, Wait
    from slurm import Slurm
    from world import World

    from hpcjobs.job.models import Plan
    from hpcjobs.scheduler.base import JobRecord

BUDGET = {"timeout": 3, "preempt": 3, "node": 2, "error": 1}
SLOW_S = 60.0
"""Most commands of a busy cluster have answered by then."""


def jobs_of(life: Life, run_dir: str) -> list[Job]:
    """Each job that was given the folder's script, one for each task of an array, without late copies that left."""
    return [job for job in _accepted(life, run_dir) if not _left_at_start(life, job)]


def _accepted(life: Life, run_dir: str) -> list[Job]:
    return [job for job in life.slurm.every if job.script == f"{run_dir}/job.sh"]


def _left_at_start(life: Life, job: Job) -> bool:
    """slurmctld took a request up after that which was recorded in its place: the job saw that, and ran nothing."""
    if job.state != "COMPLETED" or len(job.attempts) != 1 or "--dependency=afterany" in job.submit_line:
        return False
    if not any(fault.detail.startswith("late") for fault in life.world.injected):
        return False
    first = next(each for each in life.slurm.every if each.script == job.script)
    work = life.works.get(str(Path(job.script).parent))  # None: a part of a sweep, whose cells have an owner
    return work is not None and job.root != first.root and all(run.attempt.job is not job for run in work.runs)


def folders_of(life: Life, one: Submission) -> list[str]:
    first = str(life.home / "runs" / Path(one.work.run_dir).name)
    return [folder for folder in life.works if folder == first or folder.startswith(f"{first}-again")]


def check_end(life: Life) -> None:
    for one in life.submissions:
        check_once(life, one)
        check_known(life, one)
        check_cancelled(life, one)
        check_strangers(life, one)
        check_waits(life, one)
        check_attempts(life, one)
        check_continuations(life, one)
        check_tasks(life, one)
    check_started_again(life)
    check_removed(life)
    check_states(life)
    check_folders(life)


def check_once(life: Life, one: Submission) -> None:
    """A submission runs exactly once, or is reported as not submitted."""
    jobs = [job for folder in folders_of(life, one) for job in jobs_of(life, folder)]
    roots = {job.root: job for job in jobs}
    # Jobs that continue another one are submitted by the job itself, or are late copies that it found.
    continuing = {text for folder in folders_of(life, one) for text in _continuations(life, folder)}
    originals = [job for job in roots.values() if "--dependency=afterany" not in job.submit_line]
    # The first one continues nothing, though a later copy of the same request may take it for its continuation.
    originals = [job for job in originals if job is originals[0] or str(job.root) not in continuing]
    cancelled_copies = [job for job in originals[1:] if job.state == "CANCELLED" or _is_late_copy(life, job)]
    alive = [job for job in originals if job not in cancelled_copies and job.state != "LOST"]
    at_work = {id(run.attempt.job) for folder in folders_of(life, one) for run in life.works[folder].runs}
    for job in jobs:
        if originals and job.root == originals[0].root and job.state == "COMPLETED" and id(job) not in at_work:
            life.errors.append(f"{one.plan.run_dir}: job {job.id} is COMPLETED, and its program never began")
    if life.has_forgotten:
        return  # a controller that lost its state knows none of its jobs: nobody can tell
    if one.outcome == "accepted":
        if not originals:
            life.errors.append(
                f"{one.plan.run_dir}: reported as job {one.entry and one.entry.job_id}, and there is none"
            )
        elif one.entry is not None and int(one.entry.job_id) not in roots:
            life.errors.append(f"{one.plan.run_dir}: reported as job {one.entry.job_id}, and it is {sorted(roots)}")
    if one.outcome == "refused" and originals and one.sent == 1:
        still = [job for job in originals if job.state != "CANCELLED"]
        if still:
            life.errors.append(f"{one.plan.run_dir}: reported as not submitted, and job {still[0].root} was")
    if any(folder in life.pruned for folder in folders_of(life, one)):
        return  # the command that a laptop repeats finds nothing of the first time
    if len(alive) > 1 and not _is_misled(life) and not (_keeps_no_trace(life) and _was_forgotten(life, alive)):
        life.errors.append(f"{one.plan.run_dir}: submitted {len(alive)} times: jobs {[job.root for job in alive]}")


def _continuations(life: Life, folder: str) -> set[str]:
    """The jobs of the folder that another one, by its history, is continued by."""
    if not life.works[folder].retries or not os.path.isdir(folder):
        return set()
    lines = [line.decision.partition("resubmitted as ") for line in read_attempts(Path(folder))]
    return {job_id for _, verb, job_id in lines if verb}


def _is_late_copy(life: Life, job: Job) -> bool:
    """slurmctld took a request up after that which was sent in its place; it may end before it is cancelled."""
    if not any(fault.detail.startswith("late2") for fault in life.world.injected):
        return False
    if _is_misled(life) and "--dependency=afterany" not in job.submit_line:
        return True  # its submitter was told that there is none
    if _was_killed_submitting(life, str(Path(job.script).parent)):
        return True  # nobody looked for it
    return job.cancelled_at is not None or (bool(job.ends) and job.ends[0][0] - job.submit < 10.0)


def _was_killed_submitting(life: Life, folder: str) -> bool:
    numbers = [number for number, one in enumerate(life.submissions) if folder in folders_of(life, one)]
    ends = tuple(f" submit {number}{again}: killed" for number in numbers for again in ("", " again"))
    return bool(ends) and any(line.endswith(ends) for line in life.world.trace)


def _is_misled(life: Life, *names: str) -> bool:
    """A command of a user or a job, by default one that submits, got a part of an answer, or a wrong one."""
    return any(name.startswith(names or ("submit", "job")) for name in life.world.misled)


def _has_late_copy(life: Life, run_dir: str) -> bool:
    """Two jobs were at work in the run folder for a moment."""
    jobs = jobs_of(life, run_dir)
    return any(job.root != jobs[0].root and _is_late_copy(life, job) for job in jobs)


def _keeps_no_trace(life: Life) -> bool:
    settings = life.settings
    return settings.accounting in ("absent", "lossy", "late") or not settings.keeps_commands


def _was_forgotten(life: Life, jobs: list[Job]) -> bool:
    """The first job had ended, without a state file, before the answer of its sbatch was given up."""
    ended = [when for when, _ in jobs[0].ends]
    return (
        bool(ended)
        and ended[0] + life.settings.min_job_age_s < jobs[1].submit + 1.0
        and ended[0] - jobs[0].submit < 5.0
    )


def check_known(life: Life, one: Submission) -> None:
    """No accepted job is unknown to `ps`, once a command has run after the faults."""
    if life.has_forgotten:
        return
    listed = {(entry.run_dir, entry.job_id) for entry in index.entries()}
    for folder in folders_of(life, one):
        jobs = jobs_of(life, folder)
        if jobs and not os.path.isdir(folder) and folder not in life.pruned and jobs[0].state != "CANCELLED":
            life.errors.append(f"{folder}: job {jobs[0].root} was accepted, and its run folder is removed")
        if not jobs or not os.path.isdir(folder):
            continue
        originals = sorted({job.root for job in jobs if "--dependency=afterany" not in job.submit_line})
        if _was_killed_submitting(life, folder) and _has_no_note(life):
            continue
        if any(folder in warning and "in the list of jobs" in warning for warning in life.world.warnings):
            continue  # the user was told to name it by its folder
        if one.outcome == "unknown" and all(job.state == "LOST" and not job.attempts for job in jobs):
            continue  # slurmctld forgot each request before it began: there is no job
        # Whom no id was told may find the job under that of the one which continues it.
        is_told = one.outcome == "accepted" and one.entry is not None and one.entry.run_dir == folder
        roots = [int(one.entry.job_id)] if one.entry and is_told else sorted({job.root for job in jobs})
        if not any((folder, str(root)) in listed for root in roots) and not _is_untraceable(life, folder, jobs):
            life.errors.append(f"{folder}: job {originals} was accepted, and ps does not list it")


def _has_no_note(life: Life) -> bool:
    """The list of jobs could not be written, and the submitter was killed before it could print that."""
    return any("on home/.local" in line and "submit" in line for line in life.world.trace)


def _is_untraceable(life: Life, folder: str, jobs: list[Job]) -> bool:
    """Slurm has forgotten it, shows no command of it, and it wrote nothing: no trace is left to find it by."""
    if os.path.exists(f"{folder}/state.json") or list(Path(folder).glob("*/state.json")):
        return False
    if any(job.number in life.slurm.jobs for job in jobs):
        return False
    # sacct shows the last job of an id alone.
    roots = {job.root for job in jobs if job.state == "LOST"}
    is_given_again = any(other.root in roots and other.script != jobs[0].script for other in life.slurm.every)
    return _keeps_no_trace(life) or is_given_again


def check_shown(life: Life, who: str, rows: list[tuple[str | None, JobRecord]]) -> None:
    """A job that waited or ran all the time while a command asked about it is not shown as ended."""
    process, slurm, world = life.world.current, life.slurm, life.world
    if process is None or process.pid in world.disturbed or slurm.down["ctl"] or slurm.back_at > process.started:
        return
    for run_dir, record in rows:
        if record.state.value not in ENDED or run_dir is None or "[" in record.job_id:
            continue
        task = record.job_id.partition("_")[2]
        jobs = [job for job in jobs_of(life, run_dir) if not task or str(job.task) == task]
        if not jobs or slurm.jobs.get(jobs[-1].number) is not jobs[-1]:
            continue
        job = jobs[-1]
        attempt, put_back_at, began = job.attempt, job.put_back_at, process.started
        since = max(job.put_back_at or 0.0, job.first_submit)
        if job.has_ended or job.completing or since > began or (job.ends and job.ends[-1][0] > began):
            continue
        text = f"{run_dir}: {who} shows job {job.id} as {record.state.value} ({record.source}), and it is {job.state}"

        def confirm(job: Job = job, text: str = text, before: object = (attempt, put_back_at)) -> None:
            # What ends just now has written so already.
            if (job.attempt, job.put_back_at) == before and not job.has_ended and not job.completing:
                life.errors.append(text)

        world.after(5.0, confirm)


def check_cancelled(life: Life, one: Submission) -> None:
    """A cancelled job stays cancelled."""
    if one.cancelling is None or one.cancelled is None or life.has_forgotten:
        return
    for folder in folders_of(life, one):
        jobs = jobs_of(life, folder)
        if jobs and min(job.first_submit for job in jobs) > one.cancelled:
            continue  # a rerun, which a job of its own may continue
        for job in jobs:
            if job.first_submit > one.cancelled and "--dependency=afterany" not in job.submit_line:
                continue
            if any(when > one.cancelling for when in one.requeued):
                continue
            if not job.has_ended and job.state != "LOST":
                life.errors.append(f"{folder}: cancelled, and job {job.id} is {job.shown_state}")
            # A start that the job had requested before it was cancelled may come, and does nothing.
            began = {id(run.attempt) for run in life.works[folder].runs}
            later = [a for a in job.attempts if a.started > one.cancelled + 1.0]
            if any(id(attempt) in began or attempt.end_state != "CANCELLED" for attempt in later):
                life.errors.append(f"{folder}: cancelled, and job {job.id} started again")


def check_interrupted(life: Life, plan: Plan) -> None:
    """Ctrl-C waits until an accepted job is recorded, or says that it may have been accepted."""
    process = life.world.current
    assert process is not None
    is_recorded = os.path.exists(f"{plan.run_dir}/submitted.json")
    if not process.alive:  # it was killed, and the signal that it deferred shows only as it is undone
        return
    is_told = any(f"may have taken job {plan.job.name}:" in warning for warning in life.world.warnings)
    is_known = is_recorded or is_told
    if process.has_submitted and not is_known and _is_undisturbed(life, signals=True) and not _is_misled(life):
        life.errors.append(f"{plan.run_dir}: interrupted before the accepted job was recorded")


def check_request(world: World, slurm: Slurm, argv: list[str]) -> None:
    """A job requests a requeue of itself alone, and writes so before: Slurm may end it in the course of that."""
    process = world.current
    if process is None or not process.name.startswith("job ") or argv[:2] != ["scontrol", "requeue"]:
        return
    job_id = process.name.split()[1].rpartition(".")[0]
    if argv[2] != job_id:
        world.problems.append(f"job {job_id} requests a requeue of {argv[2]}")
    job = next(job for job in reversed(slurm.every) if job.id == job_id)
    folder = Path(job.script).parent / ("" if job.task is None else str(job.task))
    try:
        state = json.loads((folder / "state.json").read_text())["state"]
    except (OSError, ValueError):
        return
    was_hindered = any(process.name in line and "state.json cannot" in line for line in world.trace)
    # A copy whose submission came late writes there too.
    was_hindered |= any(
        one.script == job.script and one.attempt is not None and one.id != job.id and one.task == job.task
        for one in slurm.every
    )
    if state != "REQUEUED" and not was_hindered:
        world.problems.append(f"job {job_id} requests its requeue, and its state is {state}")


def check_continuations(life: Life, one: Submission) -> None:
    """A job goes on as itself or as one other job."""
    if one.requeued or one.cancelled is not None or life.has_forgotten:
        return
    for folder in folders_of(life, one):
        jobs = jobs_of(life, folder)
        for first in jobs:
            others = [job for job in jobs if ("afterany", first.root) in job.dependency and job.state != "CANCELLED"]
            others = [job for job in others if job.state != "LOST" and not _is_late_copy(life, job)]
            if len(others) > 1 and not _is_misled(life):
                life.errors.append(f"{folder}: jobs {[job.root for job in others]} continue job {first.root}")
            if others and any(a.started > others[0].first_submit for a in first.attempts) and _is_asked_alone(first):
                life.errors.append(f"{folder}: job {first.root} started again, and job {others[0].root} continues it")


def _is_asked_alone(job: Job) -> bool:
    """Slurm did not start it again by itself, as after a node's failure."""
    return all(attempt.end_state not in ("NODE_FAIL", "PREEMPTED") for attempt in job.attempts)


def check_tasks(life: Life, one: Submission) -> None:
    """`ps` lists every task of an array."""
    folder = one.plan.run_dir.as_posix()
    records = [record for run_dir, record in life.listed if run_dir == folder]
    listed = {task for record in records for task in task_ids(record.job_id)}
    roots = {job.root for job in jobs_of(life, folder)}
    if not one.array or not records or len(roots) != 1 or not {str(root) for root in roots}.isdisjoint(listed):
        return
    missing = {f"{root}_{task}" for root in roots for task in range(one.array)} - listed
    if missing and folder not in life.pruned and not life.world.misled:
        life.errors.append(f"{folder}: ps does not list {sorted(missing)}")


def _is_undisturbed(life: Life, *, signals: bool = False) -> bool:
    """No file could not be written, and no clock was wrong. ``signals``: but for those that came at a file."""
    ignored = ("INT", "TERM", "HUP") if signals else ()
    kinds = {fault.kind for fault in life.world.injected if fault.detail not in ignored}
    return (
        not kinds & {"file", "write", "record", "append"}
        and not life.world.skews
        and not any(fault.detail in ("full", "power", "jump+", "jump-") for fault in life.world.injected)
    )


def check_strangers(life: Life, one: Submission) -> None:
    """Nobody's job is cancelled because another one had, or has, its id."""
    if one.cancelling is not None or one.token is not None or life.has_forgotten:
        return
    jobs = jobs_of(life, one.plan.run_dir.as_posix())
    for job in jobs if len({job.root for job in jobs}) == 1 else []:
        if job.cancelled_at is not None:
            life.errors.append(f"{one.plan.run_dir}: nobody cancelled job {job.id}, and it was")


def check_archive(life: Life, run_dir: str, path: Path) -> None:
    """An archive that was written is of a job that had ended, and complete."""
    for job in jobs_of(life, run_dir):
        if not job.has_ended and job.state != "LOST":
            life.errors.append(f"{run_dir}: archived, and job {job.id} is {job.shown_state}")
    with tarfile.open(path) as tar:
        members = {member.name: member.size for member in tar if member.isfile()}
    for folder, _, files in os.walk(run_dir):
        for name in files:
            file = Path(folder, name)
            member = str(Path(Path(run_dir).name, file.relative_to(run_dir)))
            if members.get(member) != file.stat().st_size:
                life.errors.append(f"{run_dir}: {member} is not complete in the archive")


def check_waits(life: Life, one: Submission) -> None:
    """`wait` ends, once the world is quiet, with the job's code."""
    for this in one.waits:
        if this.process.alive:
            life.errors.append(f"{one.plan.run_dir}: wait, begun at {this.began:.0f}, goes on for ever")
        if this.error is not None and "Scheduler" in this.error and this.ended is None and this.lasted > 600.0:
            life.errors.append(f"{one.plan.run_dir}: wait, begun at {this.began:.0f}, gives up: {this.error}")
        if this.known is None or this.code is None:
            continue
        jobs = jobs_of(life, this.known[0].entry.run_dir)
        states = {job.state for job in jobs}
        # An accounting without commands has the end of the job that got the id of a lost one.
        is_alike = not life.settings.keeps_commands and any(_has_namesake(life, job) for job in jobs)
        is_unknown = any(record.state.value == "UNKNOWN" for known in this.known for record in known.records)
        keeps_all = life.settings.accounting not in ("absent", "lossy", "late")
        is_certain = not is_unknown and (keeps_all or not _is_signalled(life, jobs))
        if states == {"COMPLETED"} and this.code != 0 and not one.requeued and is_certain:
            life.errors.append(f"{one.plan.run_dir}: wait ends with {this.code}, and the job completed")
        _check_code(life, one, this, is_certain=is_certain)
        states_before = {state for job in jobs for _, state in job.ends}  # of one that was requeued since
        has_completed = "COMPLETED" in states | states_before or life.works[this.known[0].entry.run_dir].completed
        if this.code == 0 and not has_completed and not is_alike:
            life.errors.append(f"{one.plan.run_dir}: wait ends with 0, and the job ended as {sorted(states)}")


def _is_signalled(life: Life, jobs: Iterable[Job]) -> bool:
    """One got a signal that is not Slurm's: without accounting, what it wrote about that is all that is left."""
    names = [f" job {job.id}." for job in jobs]
    return any("SIGTERM, not handled" in line and any(name in line for name in names) for line in life.world.trace)


def _check_code(life: Life, one: Submission, this: Wait, *, is_certain: bool) -> None:
    """Of a plain job that failed by itself, `wait` ends with the code of its program; taken away, that of a signal."""
    assert this.known is not None
    jobs = jobs_of(life, this.known[0].entry.run_dir)
    if one.array or one.requeued or not is_certain or len(jobs) != 1:
        return
    if jobs[0].state in ("CANCELLED", "TIMEOUT") and this.code not in (0, 137, 143):
        life.errors.append(f"{one.plan.run_dir}: wait ends with {this.code}, and the job is {jobs[0].state}")
    if jobs[0].state != "FAILED":
        return
    code = jobs[0].attempts[-1].code
    if code is not None and not _is_undisturbed(life) and this.code == code % 128:
        return  # sacct's code is all that is left
    if this.code != code:
        life.errors.append(f"{one.plan.run_dir}: wait ends with {this.code}, and the job failed with {code}")


def check_attempts(life: Life, one: Submission) -> None:
    """Budgets hold, attempts do not overlap, each work is completed once."""
    for folder in folders_of(life, one):
        work = life.works[folder]
        if not work.retries or _has_late_copy(life, folder):
            continue
        for job_id in {run.attempt.job.id for run in work.runs} if one.array else [""]:
            _check_attempts(life, one, folder, job_id)


def _check_attempts(life: Life, one: Submission, folder: str, job_id: str) -> None:
    """Of one task of an array, or (``job_id`` empty) of a plain job and those that continue it."""
    work = life.works[folder]
    runs = sorted((run for run in work.runs if job_id in ("", run.attempt.job.id)), key=lambda run: run.began)
    has_ghost = any(run.attempt.is_ghost for run in runs)
    for first, second in pairwise(runs):
        lives = first.ended is None and first.process is not None and first.process.alive
        is_ghost = first.attempt.is_ghost or second.attempt.is_ghost  # its script may have started late
        if (lives or (first.ended is not None and first.ended > second.began)) and not is_ghost:
            life.errors.append(f"{folder}: an attempt began at {second.began:.0f} while the last one lived")
    if runs and not has_ghost and _jobs_are_undisturbed(life):
        _check_progress(life, folder, runs)
        _check_continues(life, one, folder, runs)
    completed = [when for who, when in work.completed if job_id in ("", who)]
    if len(completed) > 1 and not one.requeued and not has_ghost:
        life.errors.append(f"{folder}: the program was completed {len(completed)} times")
    task = job_id.partition("_")[2]
    path = Path(folder, task) if task else Path(folder)
    lines = read_attempts(path) if os.path.isdir(path) else []
    keys = [line.key for line in lines]
    if len(set(keys)) != len(keys):
        life.errors.append(f"{folder}: attempts.jsonl has an attempt twice: {keys}")
    is_cancelled = one.cancelling is not None or any(job.cancelled_at is not None for job in jobs_of(life, folder))
    is_cancelled |= any(fault.detail in ("TERM", "INT", "HUP") for fault in life.world.injected)  # as by scancel
    state = read_usable(path, lambda: read_state_file(path / STATE))
    if state is not None and state.state == "CANCELLED" and not is_cancelled and not _is_misled(life):
        life.errors.append(f"{folder}: the job recorded that it was cancelled, and nobody did so")
    for cause, budget in BUDGET.items():
        spent = sum(line.cause == cause and line.decision.startswith(("requeued", "resubmitted")) for line in lines)
        if spent > budget:
            life.errors.append(f"{folder}: {spent} attempts after {cause}, and the budget is {budget}")
    for run in runs:
        later = [other.began for other in runs if other.attempt.number > run.attempt.number]
        recorded = [line.ended for line in lines if int(line.started) == int(run.attempt.started) and line.ended]
        if run.attempt.is_ghost and later and any(ended > min(later) + 5.0 for ended in recorded):
            life.errors.append(f"{folder}: an attempt recorded its end after another one had begun")
    idle = [line for first, line in pairwise(lines) if line.cause == first.cause == "timeout" and line.saved == 0]
    if len(idle) > 1 and not one.requeued:
        life.errors.append(f"{folder}: {len(idle) + 1} complete time limits, and nothing was saved")
    # A program that fails in the moment of a preemption is preempted.
    own_ends = [run for run in runs if run.attempt.end_state not in ("NODE_FAIL", "PREEMPTED")]
    failed = sum(run.code == work.code and run.code != 0 for run in own_ends if run.code is not None)
    preempted = sum(fault.detail == "preempt" for fault in life.world.injected)
    if work.fails_always and failed > 1 + max(BUDGET["error"], BUDGET["node"]) + len(one.requeued) + preempted:
        life.errors.append(f"{folder}: {failed} attempts failed, more than the budget allows")
    by_slurm = sum(run.attempt.end_state in ("NODE_FAIL", "PREEMPTED", "REQUEUED") for run in runs)
    if len(runs) > 1 + sum(BUDGET.values()) + by_slurm + len(one.requeued):
        life.errors.append(f"{folder}: {len(runs)} attempts, more than all budgets allow")


def _jobs_are_undisturbed(life: Life) -> bool:
    """No job met a fault, and slurmctld was never away: nodes may have failed, and jobs may have been preempted."""
    world = life.world
    met_fault = any(one.pid in world.disturbed and one.name.startswith("job ") for one in world.processes)
    return _is_undisturbed(life) and not met_fault and not life.slurm.back_at and not _is_misled(life, "job")


def _check_progress(life: Life, folder: str, runs: list[Run]) -> None:
    """An attempt begins at the step that the last one saved, and its program is told to save before the time limit."""
    for first, second in pairwise(runs):
        if second.first_step < first.saved:
            life.errors.append(f"{folder}: step {first.saved} was saved, and an attempt began at {second.first_step}")
    for run in runs:
        limit = run.attempt.limit
        if run.attempt.end_state == "TIMEOUT" and run.ended is None and not 0.0 < (run.warned or 0.0) < limit:
            life.errors.append(f"{folder}: the attempt that began at {run.began:.0f} was not told of its time limit")


def _check_continues(life: Life, one: Submission, folder: str, runs: list[Run]) -> None:
    """After an attempt that asked to continue, or failed, another one follows while its budget lasts."""
    last, work = runs[-1], life.works[folder]
    attempt, job = last.attempt, last.attempt.job
    if last.code == REQUEUE_CODE and last.saved > last.first_step:
        budget = min(BUDGET["timeout"], BUDGET["preempt"])
    elif last.code is not None and last.code == work.code != 0:
        budget = BUDGET["node" if work.code == 137 else "error"]
    else:
        return
    jobs = [other for other in jobs_of(life, folder) if other.task == job.task]
    # Each start before it may have spent of the same budget.
    earlier = sum(other.started < attempt.started for each in jobs for other in each.attempts)
    # Another job continues none whose attempts cannot be recorded, and no task of an array.
    may_resubmit = not one.array and os.path.exists(f"{folder}/attempts.jsonl")
    may_go_on = may_resubmit or (job.requeue and life.settings.allows_requeue)
    is_cut = attempt.code is None and attempt.end_state != "REQUEUED"  # before it could request another start
    is_cut |= attempt.end_state in ("NODE_FAIL", "TIMEOUT")
    is_over = one.cancelling is not None or any(each.cancelled_at is not None or each.state == "LOST" for each in jobs)
    if earlier < budget and may_go_on and not is_cut and not is_over and folder not in life.pruned:
        life.errors.append(f"{folder}: {earlier + 1} attempts, the last ended with {last.code}, and none follows")


def check_states(life: Life) -> None:
    """A final state never changes, and agrees with what happened."""
    by_task: dict[tuple[str, str], list[tuple[float, str, str, str]]] = {}
    kept_ends: set[tuple[str, str]] = set()
    for when, who, run_dir, record, is_away in life.seen:
        if run_dir in life.pruned:
            continue  # the run folder said which job continues it
        if is_away and record.state.value == "UNKNOWN" and (run_dir, record.job_id) not in kept_ends:
            continue  # with the reason that Slurm does not answer
        is_old = record.ended is not None and when - record.ended > FINAL_AFTER_S + CLOCK_TOLERANCE_S
        if is_old and record.state.ended and record.source in ("sacct", "scontrol"):
            kept_ends.add((run_dir, record.job_id))
        by_task.setdefault((run_dir, record.job_id), []).append((when, who, record.state.value, record.source))
    for (run_dir, job_id), rows in by_task.items():
        if _has_late_copy(life, run_dir):
            continue
        submission = next((s for s in life.submissions if run_dir in folders_of(life, s)), None)
        jobs = jobs_of(life, run_dir)
        # A job that was put back may start again, or be cancelled while it waits.
        starts = [when for job in jobs for when in (*(a.started for a in job.attempts), *job.put_backs)]
        # One that was put back and then lost with slurmctld has no end: that of an earlier start is not its own.
        task = job_id.partition("_")[2]
        lost = [job for job in jobs if job.state == "LOST" and (not task or str(job.task) == task)]
        put_backs = [when for job in lost for when in job.put_backs]
        final: tuple[float, str, str] | None = None
        for when, who, state, source in sorted(rows):
            if state not in ENDED:
                was_full = any(fault.detail == "full" for fault in life.schedule.faults)
                is_lost = ("_" in job_id or was_full) and life.settings.accounting in ("absent", "lossy")
                is_lost |= final is not None and any(final[0] <= back <= when for back in put_backs)
                # A requeue moves the submit time, and without its command nothing tells whose record it is.
                has_no_end = life.settings.accounting in ("absent", "lossy") or not life.settings.keeps_commands
                is_lost |= final is not None and has_no_end and any(final[0] <= start <= when for start in starts)
                # A requeue, also a refused one, removes the note that it was cancelled.
                requeued = submission.requeued if submission is not None else []
                by_note = final is not None and final[2] == "nobody"
                is_lost |= by_note and final is not None and any(final[0] <= back <= when for back in requeued)
                # It started while squeue answered.
                is_lost |= final is not None and any(
                    final[0] <= one.started <= when < one.started + SLOW_S for job in jobs for one in job.attempts
                )
                if final is not None and state == "UNKNOWN" and not is_lost:
                    life.errors.append(f"{run_dir}: job {job_id} was {final[1]}, and {who} calls it {state}")
                continue
            may_differ = source == "job" and {state, final[1] if final else ""} <= {
                "CANCELLED",
                "FAILED",
                "TIMEOUT",
                "NODE_FAIL",
            }
            if source == "job" and any(job.id == job_id and _lacks_last_end(life, job) for job in jobs):
                continue
            if may_differ and not _accounting_answers(life):
                continue  # what a job writes at its time limit is all that is left
            lag_s = life.settings.accounting_lag_s if life.settings.accounting == "late" else 0.0
            if final is not None and final[1] != state and not any(final[0] - lag_s <= at <= when for at in starts):
                life.errors.append(
                    f"{run_dir}: job {job_id} was {final[1]} ({final[2]}), and then {state} ({source}) to {who}"
                )
            if source != "job":
                final = (when, state, source)
        if submission is None or not rows:
            continue
        _check_last(life, run_dir, job_id, sorted(rows)[-1])


def _started_meanwhile(life: Life, job: Job, cancelled: float) -> bool:
    """It waited when its cancellation asked for it, and started before that was carried out: no note was left."""
    began = cancelled - 2 * SLOW_S
    return life.settings.accounting == "absent" and any(began < one.started < cancelled for one in job.attempts)


def _accounting_answers(life: Life) -> bool:
    away = any(fault.kind == "event" and fault.detail == "dbd" for fault in life.schedule.faults)
    return life.settings.accounting == "prompt" and not away


def _check_last(life: Life, run_dir: str, job_id: str, last: tuple[float, str, str, str]) -> None:
    """What is shown at the very end agrees with the truth, as far as anybody can know it."""
    when, who, state, source = last
    task = job_id.partition("_")[2]
    jobs = [job for job in jobs_of(life, run_dir) if not task or str(job.task) == task]
    if not jobs or "[" in job_id or _has_late_copy(life, run_dir):
        return
    truth = next((job for job in reversed(jobs) if job.attempts), jobs[-1])
    # The job that continues it may have been cancelled while it waited.
    truth = next((job for job in jobs if ("afterany", truth.root) in job.dependency), truth)
    one = next(s for s in life.submissions if run_dir in folders_of(life, s))
    if (
        not one.array
        and state == "UNKNOWN"
        and truth.state == "CANCELLED"
        and one.cancelling is not None
        and one.cancelled is not None
        and life.settings.accounting != "lossy"
        and not any(when > one.cancelling for when in one.requeued)  # which undoes the note of the cancellation
        and not _started_meanwhile(life, truth, one.cancelled)
        and _is_undisturbed(life)
        and not _is_misled(life, "cancel")
    ):
        life.errors.append(f"{run_dir}: job {job_id} was cancelled by a command that said so, and is UNKNOWN")
    # An accounting without commands shows a name and a submit time, and both fit the job that got the id, too.
    if source == "sacct" and not life.settings.keeps_commands and _has_namesake(life, truth):
        return
    if truth.state == "LOST":
        if when < life.slurm.back_at:
            return  # it was not lost yet
        is_continued = os.path.isdir(run_dir) and ControlDir(run_dir).continuation() is not None
        before = [truth] if is_continued else jobs[: jobs.index(truth) + 1]
        ends = {attempt.end_state for job in before for attempt in job.attempts}
        ends |= {ended for job in before for _, ended in job.ends}
        if source in ("sacct", "scontrol") and state in ends:
            return  # the end of a start, or of a job, before the one that was lost; that of scontrol was kept
        if source in ("squeue", "scontrol") or (source == "sacct" and state in ENDED):
            life.errors.append(
                f"{run_dir}: job {job_id} was lost with slurmctld's state, and {source} has it as {state}"
            )
        return
    if not truth.has_ended and state in ENDED:
        life.errors.append(f"{run_dir}: job {job_id} is shown as {state} ({source}), and is {truth.shown_state}")
    is_alive = state not in ENDED and state != "UNKNOWN"
    if is_alive and truth.has_ended and truth.end is not None and when > truth.end + 600.0:
        life.errors.append(f"{run_dir}: job {job_id} is shown as {state} ({source}), and ended as {truth.state}")
    if truth.attempts and _is_undisturbed(life) and not life.world.misled and not life.has_forgotten:
        attempt = truth.attempts[-1]
        ended = [when for who, when in life.works[run_dir].completed if who == truth.id and when >= attempt.started]
        if state == truth.state == "TIMEOUT" and attempt.code == 0 and ended and (truth.end or 0.0) > ended[-1] + 310.0:
            life.errors.append(f"{run_dir}: job {job_id} is shown as TIMEOUT ({source}), and its program completed")
        if state == "UNKNOWN" and truth.state in ("COMPLETED", "FAILED") and attempt.code is not None:
            life.errors.append(f"{run_dir}: job {job_id} is UNKNOWN to {who}, and wrote {truth.state}")
    if state == truth.state:
        return
    completed = bool(life.works[run_dir].completed)
    if state == "COMPLETED" and not completed:
        life.errors.append(f"{run_dir}: job {job_id} is shown as COMPLETED ({source}), and ended as {truth.state}")
    is_lost = source == "job" and state == "CANCELLED" and life.settings.accounting in ("absent", "lossy")
    is_signalled = is_lost and (_is_signalled(life, [truth]) or _lacks_last_end(life, truth))
    if truth.state == "COMPLETED" and state in ENDED and not is_signalled and not _lacks_last_start(life, truth, state):
        life.errors.append(f"{run_dir}: job {job_id} is shown as {state} ({source}), and COMPLETED")
    # It ended by itself, and slurmctld, which was away, met its limit before it heard of that.
    code = truth.attempts[-1].code if truth.attempts else None
    is_unheard = truth.state == "TIMEOUT" and code is not None and state == ("FAILED" if code else "COMPLETED")
    if is_unheard and any(fault.detail in ("restart", "lost_down") for fault in life.world.injected):
        return
    if source == "sacct" and life.settings.accounting == "prompt" and not life.slurm.down["dbd"] and state in ENDED:
        life.errors.append(f"{run_dir}: job {job_id} is shown as {state} (sacct), and ended as {truth.state}")
    # On a full disk the end of an earlier start is not written, and a later record is not known for the job's.
    wrote_all = not any(f"job {job_id}." in line and "state.json cannot" in line for line in life.world.trace)
    # A requeue moves the submit time, and without its command nothing tells whose record it is.
    is_known = truth.put_back_at is None or life.settings.keeps_commands
    if state == "UNKNOWN" and life.settings.accounting == "prompt" and wrote_all and is_known:
        life.errors.append(f"{run_dir}: job {job_id} is UNKNOWN to {who}, and the accounting has {truth.state}")


def _lacks_last_start(life: Life, job: Job, state: str) -> bool:
    """A lossy accounting may lack the last start, which by another clock may be one that ended as ``state``."""
    started = {attempt.ended: attempt.started for attempt in job.attempts}
    before = [started.get(when, when) for when, ended in job.ends if ended == state]
    return life.settings.accounting == "lossy" and any(
        job.attempts[-1].started - one <= CLOCK_TOLERANCE_S for one in before
    )


def _lacks_last_end(life: Life, job: Job) -> bool:
    """Its last start met a full disk, and without accounting the end that an earlier one wrote is all that is left."""
    if life.settings.accounting not in ("absent", "lossy") or not job.attempts:
        return False
    number = job.attempts[-1].number
    was_full = any(f" job {job.id}.{number}: ENOSPC" in line and "state.json" in line for line in life.world.trace)
    folder = Path(job.script).parent / ("" if job.task is None else str(job.task))
    state = read_usable(folder, lambda: read_state_file(folder / STATE))
    return was_full and state is not None and state.restarts < number


def _has_namesake(life: Life, job: Job) -> bool:
    """Another job of the same id and name was submitted within the time by which clocks may differ."""
    others = (other for other in life.slurm.every if other.root == job.root and other.script != job.script)
    return any(
        other.name == job.name and abs(other.first_submit - job.first_submit) <= CLOCK_TOLERANCE_S for other in others
    )


def check_removal(life: Life, run_dir: str) -> None:
    """`prune` removes nothing that anybody needs."""
    for job in jobs_of(life, run_dir):
        if not job.has_ended and job.state != "LOST":
            life.errors.append(f"{run_dir}: prune removes the folder of job {job.id}, which is {job.shown_state}")


def check_removed(life: Life) -> None:
    """A job that `prune` removed is no longer listed."""
    for folder in life.removed & {entry.run_dir for entry in index.entries()} if _is_undisturbed(life) else ():
        life.errors.append(f"{folder}: prune removed the folder, and the list of jobs has it")


def check_control(life: Life, verb: str, run_dir: str, began: float) -> None:
    """A requeue that succeeded has put a job back, and a release that succeeded has left one that is not held."""
    process, world, slurm = life.world.current, life.world, life.slurm
    if process is None or process.pid in world.disturbed or process.name in world.misled:
        return
    jobs = jobs_of(life, run_dir)
    has_ended = any(job.end is not None and job.end >= began for job in jobs)
    if slurm.down["ctl"] or slurm.back_at >= began or has_ended or any(job.state == "LOST" for job in jobs):
        return
    if verb == "requeue" and not any(_is_put_back(job, began) for job in jobs):
        life.errors.append(f"{run_dir}: a requeue succeeded, and no job was put back")
    alive = [job for job in jobs if not job.has_ended]
    is_held_again = any(one.alive and one.name.startswith("hold") for one in world.processes)
    is_held = bool(alive) and all(job.held and not job.is_requeued_held for job in alive)
    if verb == "release" and is_held and not is_held_again:
        life.errors.append(f"{run_dir}: a release succeeded, and the job is held")


def _is_put_back(job: Job, since: float) -> bool:
    """It is in the queue again, or will be once its start has ended."""
    is_on_its_way = job.attempt is not None and (job.attempt.cause == "REQUEUED" or job.attempt.is_requeued)
    return is_on_its_way or any(when >= since for when in job.put_backs)


def check_started_again(life: Life) -> None:
    """The program of a job that ended by itself, and was not completed, begins again after a requeue that succeeded."""
    for folder, began in life.started_again if _jobs_are_undisturbed(life) else ():
        jobs, work = jobs_of(life, folder), life.works[folder]
        if len(jobs) != 1 or folder in life.pruned or jobs[0].cancelled_at is not None:
            continue
        before = [attempt for attempt in jobs[0].attempts if attempt.started < began]
        after = jobs[0].attempts[len(before) :]
        if not before or before[-1].code is None or before[-1].ended is None or before[-1].ended + 20.0 > began:
            continue  # it lived, or was killed, or Slurm might have started it again by itself
        if (work.retries and work.completed) or any(a.end_state in ("NODE_FAIL", "PREEMPTED") for a in after):
            continue
        if not any(run.began >= began for run in work.runs):
            life.errors.append(f"{folder}: job {jobs[0].id} was requeued, and its program did not begin again")


def check_folders(life: Life) -> None:
    """Nothing is written into a folder of another job, and nothing is left half-written where it is read."""
    has_lost_power = any(fault.detail == "power" for fault in life.world.injected)
    for path in () if has_lost_power else (life.home / "runs").rglob("*"):
        if path.suffix == ".json" and not path.name.startswith("."):
            try:
                json.loads(path.read_text())
            except ValueError:
                life.errors.append(f"{path}: is half-written")
    for folder in life.works:
        path = Path(folder, "submitted.json")
        if not path.exists():
            continue
        try:
            content = json.loads(path.read_text())
        except ValueError:
            continue  # said above, unless a power loss explains it
        roots = {str(job.root) for job in jobs_of(life, folder)}
        if content["job_id"] not in roots or content["run_dir"] != folder:
            life.errors.append(
                f"{folder}: submitted.json names job {content['job_id']}, and its jobs are {sorted(roots)}"
            )
