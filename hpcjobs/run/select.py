"""Finds the jobs that a user names: by ids, ranges, array tasks, run folders, names; also as dependencies."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from hpcjobs.errors import CommandMissingError, RequestError, SchedulerError, UnknownJobError, nearest, reason_of
from hpcjobs.files import is_own_folder, name_of, user_name
from hpcjobs.record import JOB_SCRIPT, SUBMITTED
from hpcjobs.run import index
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import current_id, own_ids, require_submitted
from hpcjobs.run.status import Known, is_reachable, require_reachable, statuses
from hpcjobs.run.submission import read_index
from hpcjobs.scheduler.base import JobRecord, State
from hpcjobs.scheduler_kind import KINDS
from hpcjobs.site.library import load_site
from hpcjobs.site.machine import current_sandbox
from hpcjobs.units import array_indices, check_array, parent_id, task_ids, walltime_s

_PREFIX = "|".join(kind.id_prefix for kind in KINDS.values())
_ID = re.compile(rf"({_PREFIX})(\d+)(?:_(\d+)|(\+\d+))?\Z")
_TASKS = re.compile(rf"(?:{_PREFIX})\d+_\[.+\]\Z")
_MOST_OF_RANGE = 1_000_000
_RANGE = re.compile(rf"({_PREFIX})(\d+)-(?:{_PREFIX})(\d+)\Z")


def select(names: Sequence[str], *, site: str | None = None, foreign: bool = False) -> list[Entry]:
    """The jobs that ``names`` name, in that order, each once.

    ``123`` an id · ``123_4`` a task of an array · ``123+1`` a component of a heterogeneous job (also by SLURM_JOB_ID) ·
    ``123_[4-6]`` some tasks of an array, as Slurm prints them · ``123-130`` the existing jobs of the range · a run
    folder · a name (the newest job of that name). ``site``, a name or the path of a site file, restricts the search.
    With ``foreign``, an id may also name a job submitted by other means: the scheduler is asked. Such a job in the
    queue counts before an earlier one that hpcjobs submitted: a cluster that lost its state gives ids again. So may a
    name that no job of hpcjobs here has.

    Raises UnknownJobError: a name stands for no job. RequestError: an id that two sites have given out. ConfigError: no
    such site.
    """
    names = [one for name in names for one in _expand_tasks(name)]
    known = entries_of(site)
    of_site = f" of site {site}" if site is not None else ""
    if foreign and (ids := _ids_of_slurm(names)):
        known = _with_foreign(ids, known, site)
        here = {entry.job_id for entry in known if is_reachable(entry)}
        if full := _full_ids({name for name in names if name.isdecimal()} - here, site):
            names = [full.get(name, name) for name in names]
            known = _with_foreign(_ids_of_slurm(list(full.values())), known, site)
    if foreign and (others := {name for name in names if _is_name(name)} - {e.name for e in known if is_reachable(e)}):
        known = _with_foreign_names(others, known, site)
    selected = [entry for name in names for entry in _one(name, known, of_site, foreign=foreign)]
    return list({(entry.run_dir, entry.job_id, entry.task): entry for entry in selected}.values())


def _expand_tasks(name: str) -> list[str]:
    if not _TASKS.match(name):
        return [name]
    try:
        return task_ids(name)
    except ValueError as error:
        raise RequestError(f"{name}: {error}", hint="tasks are named as in 123_[0-3,7]") from error


def select_one(name: str, *, site: str | None = None, foreign: bool = False) -> Entry:
    """The one job that ``name`` names. Raises RequestError: it names several. Else as `select`."""
    first, *others = select([name], site=site, foreign=foreign)
    if others:
        raise RequestError(
            f"{name} names {len(others) + 1} jobs, and this is for one", hint=f"such as {first.named_id}"
        )
    return first


def newest(*, site: str | None = None) -> Entry:
    """The job submitted last. Raises UnknownJobError: no job is recorded."""
    known = entries_of(site)
    if not known:
        of_site = f" of site {site}" if site is not None else ""
        raise UnknownJobError(f"no job{of_site} recorded in {index.index_dir()}", hint="hpcjobs submit starts one")
    return _here_first(known)[-1]


def _ids_of_slurm(names: Sequence[str]) -> set[str]:
    ids = {match[2] + (match[4] or "") for name in names if (match := _ID.match(name)) and not match[1]}
    for match in filter(None, map(_RANGE.match, names)):
        if not match[1] and int(match[3]) - int(match[2]) < _MOST_OF_RANGE:
            ids |= {str(number) for number in range(int(match[2]), int(match[3]) + 1)}
    return ids


def _with_foreign(job_ids: set[str], known: list[Entry], site: str | None) -> list[Entry]:
    """``known`` and this user's jobs with ``job_ids`` in the scheduler."""
    from hpcjobs.run.listing import find_foreign

    there = [entry for entry in known if entry.job_id in job_ids and is_reachable(entry)]
    unknown = job_ids - {entry.job_id for entry in there}
    try:
        return [*known, *find_foreign(job_ids, there, site=site)]
    except CommandMissingError:  # a workstation
        return known
    except SchedulerError as error:
        if not unknown:
            return known
        ids = ", ".join(sorted(unknown, key=lambda job_id: int(parent_id(job_id))))
        raise UnknownJobError(
            f"no job {ids} was submitted with hpcjobs, and Slurm cannot be asked about others: {error.message}",
            hint=error.hint,
        ) from error


def _full_ids(numbers: set[str], site: str | None) -> dict[str, str]:
    from hpcjobs.run.listing import find_full_ids

    try:
        return find_full_ids(numbers, site=site)
    except CommandMissingError:  # a workstation
        return {}


def _is_name(text: str) -> bool:
    """Whether it can only be a job's name: no id, no range, no run folder."""
    return not (_ID.match(text) or _RANGE.match(text) or "/" in text or os.path.isfile(os.path.join(text, SUBMITTED)))


def _with_foreign_names(names: set[str], known: list[Entry], site: str | None) -> list[Entry]:
    """``known`` and this user's jobs with ``names`` in the scheduler."""
    from hpcjobs.run.listing import find_foreign_by_name

    try:
        return [*known, *find_foreign_by_name(names, known, site=site)]
    except CommandMissingError:  # a workstation
        return known
    except SchedulerError as error:
        raise UnknownJobError(
            f"no job named {', '.join(map(repr, sorted(names)))} was submitted with hpcjobs, and Slurm cannot be asked"
            f" about others: {error.message}",
            hint=error.hint,
        ) from error


def entries_of(site: str | None) -> list[Entry]:
    """Recorded jobs, oldest first: all of them, or the jobs of ``site``. The site file may be gone.

    Raises ConfigError: no such site, and no job of it.
    """
    known = read_index().entries
    if site is None:
        return known
    if of_site := [entry for entry in known if entry.site == site]:
        return of_site
    name = load_site(site).name
    return [entry for entry in known if entry.site == name]


def _here_first(entries: list[Entry]) -> list[Entry]:
    """Entries with a scheduler that is reachable from here, if any: hosts and clusters may share a home."""
    return [entry for entry in entries if is_reachable(entry)] or entries


def _one(name: str, known: list[Entry], of_site: str, *, foreign: bool) -> list[Entry]:
    if match := _ID.match(name):
        return [_by_id(f"{match[1]}{match[2]}{match[4] or ''}", match[3], known, of_site, foreign=foreign)]
    if match := _RANGE.match(name):
        return _by_range(name, match[1], int(match[2]), int(match[3]), known, of_site)
    named = _here_first([entry for entry in known if entry.name == name])
    if not named and not _is_name(name):
        return [_by_folder(Path(name))]
    if not named:
        hint = nearest(name, {entry.name for entry in known}) if known else "no job was submitted with hpcjobs yet"
        message = f"no job named {name!r}{of_site}"
        if os.path.isdir(name):
            message += f", and folder {name} is no run folder of a submitted job (no {SUBMITTED})"
        raise UnknownJobError(message, hint=hint)
    return [named[-1]]


def _by_id(job_id: str, task: str | None, known: list[Entry], of_site: str, *, foreign: bool = False) -> Entry:
    matches = _here_first([entry for entry in known if entry.job_id == job_id])
    if not matches and foreign:
        raise UnknownJobError(
            f"no job {job_id} of yours{of_site}: neither submitted with hpcjobs,"
            " nor known to the queue or the accounting",
            hint="`hpcjobs ps -a` lists your jobs",
        )
    if not matches:
        raise UnknownJobError(
            f"no job {job_id}{of_site} was submitted with hpcjobs (looked in {index.index_dir()})",
            hint="`hpcjobs ps -a` lists your jobs; of one submitted with sbatch, what needs a run folder is not there",
        )
    if len(sites := dict.fromkeys(entry.site for entry in matches)) > 1:
        raise RequestError(f"job {job_id} exists on several sites: {', '.join(sites)}", hint="use --site")
    if len(clusters := dict.fromkeys(entry.cluster or "one not recorded" for entry in matches)) > 1:
        raise RequestError(
            f"job {job_id} exists on several clusters or hosts: {', '.join(clusters)}", hint="name its run folder"
        )
    newest_one = matches[-1]  # a cluster that lost its state gives ids out again
    if task is None:
        return newest_one
    # A plain job has no tasks: an earlier array of the id is meant.
    arrays = [entry for entry in matches if entry.array is not None]
    if arrays and int(task) in array_indices(arrays[-1].array or ""):
        return msgspec.structs.replace(arrays[-1], task=int(task))
    what = "is no array" if newest_one.array is None else f"is an array of {newest_one.array}"
    raise UnknownJobError(f"no task {job_id}_{task}: job {job_id} {what}")


def _by_range(name: str, prefix: str, first: int, last: int, known: list[Entry], of_site: str) -> list[Entry]:
    ids = {f"{prefix}{number}" for number in range(first, last + 1)} if last - first < _MOST_OF_RANGE else set()
    matches = [entry for entry in known if entry.job_id in ids]
    if not matches:
        raise UnknownJobError(f"no job in the range {name}{of_site}", hint="`hpcjobs ps -a` lists them")
    return [_by_id(job_id, None, matches, of_site) for job_id in dict.fromkeys(entry.job_id for entry in matches)]


def _by_folder(folder: Path) -> Entry:
    real = os.path.realpath(folder)
    # The user's own list counts before the folder's record.
    alike = (e for e in reversed(index.entries()) if os.path.basename(e.run_dir) == os.path.basename(real))
    known = next((entry for entry in alike if os.path.realpath(entry.run_dir) == real), None)
    if known is not None:
        return known
    try:
        entry = require_submitted(folder)
        check_array(entry.array or "0")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnknownJobError(f"{folder} is no run folder of a submitted job (no {SUBMITTED})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownJobError(f"{folder / SUBMITTED} cannot be used: {reason_of(error)}") from error
    if not _ID.match(entry.job_id):
        raise UnknownJobError(f"{folder / SUBMITTED} cannot be used: {entry.job_id!r} is no id of a job")
    # A copy, or anybody's: it is about this folder, and about a job of whoever owns it.
    owner = folder.stat().st_uid
    user = entry.user if owner == os.getuid() else name_of(owner)
    return without_unknown_configuration(msgspec.structs.replace(entry, run_dir=str(folder.absolute()), user=user))


def is_own(entry: Entry) -> bool:
    """Whether this user has submitted the job, and its run folder still belongs to this user.

    A folder that was copied, unpacked or cloned is not in this user's list of jobs, whatever its files contain.
    """
    if not is_own_folder(entry.run_dir):
        return False
    return any((own.run_dir, own.job_id) == (entry.run_dir, entry.job_id) for own in index.entries())


def require_own(entry: Entry, records: Iterable[JobRecord] = ()) -> None:
    """Refuse a run folder that would decide about programs of this user, unless the job runs already.

    Args:
        records: the scheduler's own; a job of this user that runs the folder's script is this user's.

    Raises RequestError: this user's list lacks the job, or its folder belongs to another user.
    """
    script = os.path.join(entry.run_dir, JOB_SCRIPT)
    mine = (None, user_name())  # squeue is asked for this user's jobs alone
    if is_own(entry) or any(record.command == script and record.user in mine for record in records):
        return
    is_taken = os.path.lexists(entry.run_dir) and not is_own_folder(entry.run_dir)
    what = "belongs to another user" if is_taken else "is the run folder of a job that you have not submitted"
    raise RequestError(
        f"{entry.run_dir} {what}, whose files would decide what runs as you",
        hint="`hpcjobs rerun FOLDER` prints what its job was, and submits it as yours where you add --trust",
    )


def require_all_own(jobs: Iterable[tuple[Entry, list[JobRecord]]]) -> None:
    """Refuse jobs that a run folder alone names: see `require_own`. Raises RequestError: there is one."""
    own = {(entry.run_dir, entry.job_id) for entry in index.entries()}
    for entry, records in jobs:
        if not entry.is_foreign and (entry.run_dir, entry.job_id) not in own:
            require_own(entry, records)


def without_unknown_configuration(entry: Entry) -> Entry:
    """``entry``, read from a folder that may be anybody's, without a configuration that is not known.

    Its site must be a name, which means this user's own site, not the path of a site file.
    """
    conf = entry.slurm_conf if is_known_configuration(entry.slurm_conf) else None
    is_path = "/" in entry.site or entry.site.endswith((".yaml", ".yml"))
    return msgspec.structs.replace(entry, slurm_conf=conf, site=Path(entry.site).stem if is_path else entry.site)


def is_known_configuration(slurm_conf: str | None) -> bool:
    """Whether Slurm's commands may read this configuration, which names the plugins that they load.

    A run folder may be anybody's, of a cloned repository: its word alone does not count.
    """
    if slurm_conf in (None, os.environ.get("SLURM_CONF")) or any(e.slurm_conf == slurm_conf for e in index.entries()):
        return True
    if (sandbox := current_sandbox()) is not None and sandbox.slurm_conf == slurm_conf:
        return True
    try:
        return os.getuid() != 0 and os.stat(str(slurm_conf)).st_uid == 0
    except OSError:
        return False


_DELAY = re.compile(r"(?P<job>.+)\+(?P<delay>[0-9.]+[a-z0-9.]*)\Z")
_FLAGS = {"afterok": "--after", "afterany": "--after-any", "afternotok": "--after-fail"}
_NEVER = "DependencyNeverSatisfied"


def dependency_on(jobs: Mapping[str, Sequence[str]], *, site: str | None = None) -> str | None:
    """Slurm's dependency for ``jobs``, by kind (``afterok``); None: no job is named.

    ``JOB+10m`` is 10 minutes after that job has started, whatever the kind. A resubmitted job stands for its current
    job.

    Raises UnknownJobError: a word names no job. RequestError: a job of another cluster, or no delay in whole minutes.
    """
    parts: list[str] = []
    for kind, arguments in jobs.items():
        plain: list[str] = []
        for text in arguments:
            match = _DELAY.match(text)
            try:
                entries = select([match["job"] if match else text], site=site)
                require_reachable(entries)
            except UnknownJobError as error:
                raise UnknownJobError(f"{_FLAGS[kind]} {text}: {error.message}", hint=error.hint) from error
            ids = [current_id(entry) if entry.task is None else own_ids(entry)[0] for entry in entries]
            if match:
                parts += [f"after:{job_id}+{_minutes(text, match['delay'])}" for job_id in ids]
            else:
                plain += ids
        if plain:
            parts.append(":".join([kind, *dict.fromkeys(plain)]))
    return ",".join(parts) or None


def require_possible(jobs: Mapping[str, Sequence[str]], *, site: str | None = None) -> None:
    """Refuse a dependency on jobs that have ended otherwise: slurmctld starts a job at once that depends on one which
    it has forgotten, some minutes after its end (MinJobAge).

    Raises RequestError: one of ``jobs``, by kind (``afterok``), has ended in a way that the kind excludes.
    """
    for kind in ("afterok", "afternotok"):
        texts = [text for text in jobs.get(kind, ()) if not _DELAY.match(text)]
        for known in statuses(select(texts, site=site)) if texts else ():
            if (end := _excluding_end(kind, known)) is not None:
                raise RequestError(
                    f"{_FLAGS[kind]} {known.entry.job_id}: {end}",
                    hint="--after-any starts the job whatever the end of the other; `hpcjobs rerun` repeats a run",
                )


def _excluding_end(kind: str, known: Known) -> str | None:
    """Why the job can never satisfy the dependency ``kind``; None: it can."""
    if not all(record.state.ended or record.source == "nobody" for record in known.records):
        return None
    others = [record.state for record in known.records if record.state is not State.COMPLETED]
    if kind == "afternotok":
        return None if others else "the job has COMPLETED, it will not fail"
    if not others:
        return None
    if others[0] is State.UNKNOWN:
        return "the scheduler does not know the job any more, and it wrote no end"
    return f"the job has ended, {others[0].value}; it will not succeed"


def _minutes(text: str, delay: str) -> int:
    try:
        seconds = int(delay) * 60 if delay.isdecimal() else walltime_s(delay)
    except ValueError as error:
        raise RequestError(f"--after {text}: {error}", hint="10m, 2h, or a number of minutes") from error
    if seconds % 60:
        raise RequestError(f"--after {text}: Slurm counts the delay in minutes")
    return seconds // 60


def is_never_met(record: JobRecord) -> bool:
    """Whether the job waits for others in a way that they can no longer end: it stays in the queue until cancelled."""
    return record.state is State.PENDING and record.reason is not None and _NEVER in record.reason
