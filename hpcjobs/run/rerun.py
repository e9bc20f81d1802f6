"""Repeats a run from the manifest in its run folder: exactly, or with stated changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hpcjobs.errors import ConfigError, RequestError, reason_of
from hpcjobs.files import read_regular
from hpcjobs.job.fault_tolerance import avoided_on
from hpcjobs.job.models import Job, JobSpec, Layer, Plan
from hpcjobs.job.plan import plan_of, run_dir_of
from hpcjobs.job.resolve import resolve
from hpcjobs.job.script import locate_run_root
from hpcjobs.record.names import MANIFEST
from hpcjobs.run.index import Entry
from hpcjobs.run.provenance import CodeState, code_state
from hpcjobs.run.select import is_own
from hpcjobs.site.library import load_site
from hpcjobs.site.models import Site
from hpcjobs.site.resources import Resources, fields_where

_OWN_VERBS = {
    "sweep": "hpcjobs sweep resume starts cells of a sweep again, and hpcjobs scale the runs of a study",
    "jupyter": "hpcjobs jupyter starts a session",
    "fabric": "hpcjobs fabric starts a check of nodes",
}
"""Templates whose jobs need more than their manifest."""


class RecordedCode(msgspec.Struct, frozen=True):
    """The git state of the program's folder when a job was submitted."""

    commit: str | None = None
    dirty: bool = False
    untracked: tuple[str, ...] = ()


class Manifest(msgspec.Struct, frozen=True):
    """``manifest.json`` of a run folder."""

    job: Job
    hpcjobs: str = "unknown"
    user: str = "unknown"
    host: str = "unknown"
    code: RecordedCode | None = None


class Rerun(NamedTuple):
    """A plan for the same run again, and what the user should know of it."""

    plan: Plan
    notes: tuple[str, ...]


def read_manifest(run_dir: Path) -> Manifest:
    """The manifest of a run.

    Raises:
        RequestError: there is none, or it was written by a hpcjobs whose jobs had other fields.
    """
    path = run_dir / MANIFEST
    try:
        return msgspec.json.decode(read_regular(path), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestError(
            f"{path} cannot be used: {reason_of(error)}", hint="a run can be compared or repeated by its manifest only"
        ) from error


def plan_rerun(entry: Entry, changes: JobSpec, *, made_by: str, trusts: bool = False) -> Rerun:
    """The plan of ``entry``'s run again; without ``changes`` from the job as it was resolved then.

    With changes, the request of then is resolved anew by the site as it is now. Dependencies are left out: the jobs
    they name have ended. So is a hold, which was of the first run. A task of an array is an array of that task alone.

    Args:
        trusts: also plan a run that this user has not submitted. Without it the plan of such a run can be printed
            alone: nothing is asked that its manifest names, such as a configuration of Slurm, a site file or a Python.

    Raises:
        RequestError: the manifest cannot be used, the job is part of a sweep or session, does not fit the site, a
            policy of the centre refuses it, or it is not this user's, not trusted, and to be changed.
    """
    run_dir = Path(entry.run_dir)
    manifest = read_manifest(run_dir)
    job = manifest.job
    own = is_own(entry)
    untrusted = not own and not trusts
    if untrusted:
        if changes != JobSpec():
            raise refusal_of_run(run_dir)
        job = replace(job, slurm_conf=None, untrusted=(f"{run_dir / MANIFEST}: of a run that you have not submitted",))
    if job.template in _OWN_VERBS:
        raise RequestError(f"job {entry.job_id} is made by template {job.template}", hint=_OWN_VERBS[job.template])
    folder = run_dir / "code" if job.snapshot else Path(job.chdir)
    if not folder.is_dir():
        raise RequestError(f"the folder in which job {entry.job_id} ran, {folder}, does not exist any more")
    notes = []
    values = {name: getattr(job.resources, name) for name in fields_where("first_run")}
    first_only = {name: value for name, value in values.items() if value}
    notes += [f"left out: {name}{'' if value is True else f'={value}'}" for name, value in first_only.items()]
    if changes == JobSpec():
        again = replace(job, resources=_for_another_run(job.resources, entry))
    else:
        again = resolve_again(job, entry, changes)
    if job.snapshot and changes.chdir is None:
        # The copy of the first run is what is copied, so that later edits do not matter.
        again = replace(again, chdir=str(run_dir / "code"))
    elif not untrusted and (difference := _changed_code(manifest, run_dir)) is not None:
        notes.append(difference)
    if not own:  # their folders are not ours to write into
        again = replace(again, run_root=str(locate_run_root(_site_of(job, untrusted=untrusted), Path.cwd())))
        notes.append(
            f"a run of {manifest.user}: its settings (account, mail) stay, the new run folder lies in {again.run_root}"
        )
    return Rerun(plan_of(again, run_dir_of(again), made_by=made_by), tuple(notes))


def refusal_of_run(run_dir: Path) -> ConfigError:
    """Why a run that somebody else has submitted is not submitted again."""
    return ConfigError(
        f"{run_dir} is the folder of a run that you have not submitted; its {MANIFEST} sets what would run as you",
        hint="read what `hpcjobs rerun --dry-run` prints of it, then use --trust",
    )


def resolve_again(job: Job, entry: Entry, changes: JobSpec) -> Job:
    """The request for ``job``, resolved anew by its site as it is now, with ``changes`` but without its
    dependencies and hold.

    Raises:
        RequestError: the manifest is of an older hpcjobs, or the job does not fit the site.
    """
    if not job.layers:
        raise RequestError(
            f"the manifest of job {entry.job_id} does not hold what was requested, and nothing can be changed in it",
            hint="without changes the run can be repeated; hpcjobs submit takes all options",
        )
    site = _site_of(job)
    source = f"run {entry.job_id}"
    first = Layer(source, JobSpec(chdir=job.chdir, name=job.name))
    # The copy of the code is checked and run, not the folder as it is now.
    copied = str(Path(entry.run_dir) / "code") if job.snapshot else None
    again = Layer(source, JobSpec(chdir=copied, resources=_for_another_run(Resources(), entry)))
    avoid = avoided_on(site.name) if site.scheduler == "slurm" else {}
    resolved = resolve([first, *job.layers, again, Layer("change", changes)], site, avoid=avoid)
    return replace(resolved, run_root=job.run_root) if job.snapshot and changes.chdir is None else resolved


def _for_another_run(resources: Resources, entry: Entry) -> Resources:
    """``resources`` without what was meant for the first run; of the array task that ``entry`` means, if it does."""
    again = replace(resources, **dict.fromkeys(fields_where("first_run")))
    return again if entry.task is None else replace(again, array=str(entry.task))


def _site_of(job: Job, *, untrusted: bool = False) -> Site:
    """The site of a run as it is now; of an ``untrusted`` run this user's own site of that name."""
    if untrusted:
        return load_site(Path(job.site).stem)
    return load_site(job.site_file if os.path.isfile(job.site_file) else job.site)


def _changed_code(manifest: Manifest, run_dir: Path) -> str | None:
    """A note where the program's folder is not as it was."""
    recorded = manifest.code
    now = code_state(Path(manifest.job.chdir))
    if recorded is None or now is None:
        return None
    if recorded.commit != now.commit:
        return f"the code has changed since: commit {_short(recorded.commit)} then, {_short(now.commit)} now"
    if read_patch(run_dir) != _patch(now):
        return f"the code has changed since: it differs from commit {_short(now.commit)} otherwise than then"
    return None


def read_patch(run_dir: Path) -> str:
    """``code.patch`` of a run folder; empty where the code was as committed."""
    try:
        return read_regular(run_dir / "code.patch").decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return ""


def _patch(code: CodeState) -> str:
    return code.patch if code.dirty else ""


def _short(commit: str | None) -> str:
    return commit[:10] if commit else "none"
