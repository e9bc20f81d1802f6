"""Repeats a run from its manifest, exactly or with stated changes, and compares two runs."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from hpcjobs.errors import ConfigError, HpcJobsError, RequestError
from hpcjobs.files import read_regular
from hpcjobs.guards import limit_env, without_limits
from hpcjobs.job.environment import locate_run_root
from hpcjobs.job.fault_tolerance import avoided_on
from hpcjobs.job.models import Job, JobSpec, Layer, Plan
from hpcjobs.job.plan import plan_of, run_dir_of
from hpcjobs.job.resolve import resolve
from hpcjobs.job.script import render
from hpcjobs.record import MANIFEST, SUMMARY
from hpcjobs.record.manifest import Manifest
from hpcjobs.record.summary import flatten, read_summary
from hpcjobs.run.folder import code_state
from hpcjobs.run.index import Entry
from hpcjobs.run.job_files import output_dir, own_ids, read_job_manifest, read_usable
from hpcjobs.run.select import is_own
from hpcjobs.run.status import Known
from hpcjobs.site.library import load_site
from hpcjobs.site.models import Site
from hpcjobs.site.resources import Resources, fields_where
from hpcjobs.slurm_commands import HOST_PART

_OWN_VERBS = {
    "sweep": "hpcjobs sweep resume starts cells of a sweep again, and hpcjobs scale the runs of a study",
    "jupyter": "hpcjobs jupyter starts a session",
    "fabric": "hpcjobs fabric starts a check of nodes",
}
"""Templates of jobs that need more than their manifest."""


class Rerun(NamedTuple):
    """A plan for the same run again, with notes for the user."""

    plan: Plan
    notes: tuple[str, ...]


def plan_rerun(entry: Entry, changes: JobSpec, *, made_by: str, trusts: bool = False) -> Rerun:
    """Plan the run of ``entry`` again; without ``changes`` from the resolved job of its manifest.

    With changes, the original request is resolved again by the current site. Dependencies are left out: the jobs
    they name have ended. So is a hold, which was of the first run. A task of an array is an array of that task alone.

    Args:
        trusts: also plan a run that this user has not submitted. Otherwise the plan of such a run can only be printed,
            and the files that its manifest names (a configuration of Slurm, a site file, a Python) are not used.

    Raises RequestError: the manifest cannot be used, the job is part of a sweep or session, does not fit the site, a
    policy of the centre refuses it, or it is not this user's, not trusted, and to be changed.
    """
    run_dir = Path(entry.run_dir)
    manifest = read_job_manifest(run_dir)
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
        env = limit_env(without_limits(job.env), {})
        again = replace(job, resources=_for_another_run(job.resources, entry), env=env)
    else:
        again = resolve_again(job, entry, changes)
    if job.snapshot and changes.chdir is None:
        # Copied from the first run's copy, so that later edits do not matter.
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
    """The error for a run that another user has submitted."""
    return ConfigError(
        f"{run_dir} is the folder of a run that you have not submitted; its {MANIFEST} sets what would run as you",
        hint="read what `hpcjobs rerun --dry-run` prints of it, then use --trust",
    )


def resolve_again(job: Job, entry: Entry, changes: JobSpec) -> Job:
    """The request for ``job``, resolved again by its current site, with ``changes`` but without its
    dependencies and hold.

    Raises RequestError: the manifest is of an older hpcjobs, or the job does not fit the site.
    """
    if not job.layers:
        raise RequestError(
            f"the manifest of job {entry.job_id} does not hold what was requested, and nothing can be changed in it",
            hint="without changes the run can be repeated; hpcjobs submit takes all options",
        )
    site = _site_of(job)
    source = f"run {entry.job_id}"
    first = Layer(source, JobSpec(chdir=job.chdir, name=job.name))
    # The copy of the code is checked and run, not the current folder.
    copied = str(Path(entry.run_dir) / "code") if job.snapshot else None
    again = Layer(source, JobSpec(chdir=copied, resources=_for_another_run(Resources(), entry)))
    avoid = avoided_on(site.name) if site.kind.has_nodes else {}
    resolved = resolve([first, *job.layers, again, Layer("change", changes)], site, avoid=avoid)
    return replace(resolved, run_root=job.run_root) if job.snapshot and changes.chdir is None else resolved


def _for_another_run(resources: Resources, entry: Entry) -> Resources:
    """``resources`` without values for the first run alone; for an array task, of that task."""
    again = replace(resources, **dict.fromkeys(fields_where("first_run")))
    return again if entry.task is None else replace(again, array=str(entry.task))


def _site_of(job: Job, *, untrusted: bool = False) -> Site:
    """The current site of a run; for an ``untrusted`` run, this user's own site of that name."""
    if untrusted:
        return load_site(Path(job.site).stem)
    return load_site(job.site_file if os.path.isfile(job.site_file) else job.site)


def _changed_code(manifest: Manifest[Job], run_dir: Path) -> str | None:
    """A note if the program's folder has changed."""
    recorded = manifest.code
    now = code_state(Path(manifest.job.chdir))
    if recorded is None or now is None:
        return None
    if recorded.commit != now.commit:
        return f"the code has changed since: commit {_short(recorded.commit)} then, {_short(now.commit)} now"
    if read_patch(run_dir) != (now.patch if now.dirty else ""):
        return f"the code has changed since: it differs from commit {_short(now.commit)} otherwise than then"
    return None


def read_patch(run_dir: Path) -> str:
    """``code.patch`` of a run folder; empty where the code was as committed."""
    return _read_text(run_dir / "code.patch") or ""


def _read_text(path: Path) -> str | None:
    """A file of a run folder; None: there is none, or, with a warning, it cannot be used."""
    return read_usable(path, lambda: read_regular(path).decode("utf-8", "surrogateescape"))


def _short(commit: str | None) -> str:
    return commit[:10] if commit else "none"


# Fields of a resolved job that name its folder, or repeat other fields.
_LEFT_OUT = (
    *("sources", "layers", "run_root", "rehearsal", "slurm_conf", "untrusted"),
    "time_limit_s",  # resources has it as `time`
    *("nodes", "max_nodes", "ntasks_per_node"),
)
_IDENTITY = frozenset({"job_id", "started_at", "ended_at", "hosts"})
"""Keys of summary.json that identify the run; all others are results."""


class Change(msgspec.Struct, frozen=True):
    """One value that differs; None: the run has none."""

    name: str
    first: str | None
    second: str | None


class Difference(msgspec.Struct, frozen=True):
    """All that differs between two runs."""

    settings: tuple[Change, ...]
    """The site, resources, program, launcher and the like."""
    environment: tuple[Change, ...]
    """Variables that the job sets, Python, versions, user and host of the submission."""
    image: tuple[Change, ...]
    code: tuple[Change, ...]
    script: tuple[str, ...]
    """Lines of job.sh that the settings do not explain, as a unified diff."""
    nodes: tuple[Change, ...]
    results: tuple[Change, ...]
    """State, exit code, and the numbers of summary.json."""

    @property
    def is_empty(self) -> bool:
        return not any(getattr(self, field) for field in self.__struct_fields__)


def compare_runs(first: Known, second: Known) -> Difference:
    """Compare two jobs. Raises RequestError: a manifest cannot be used."""
    runs = [Path(job.entry.run_dir) for job in (first, second)]
    manifests = [read_job_manifest(run) for run in runs]
    settings = changes(*(_settings(manifest.job) for manifest in manifests))
    return Difference(
        settings=tuple(settings),
        environment=tuple(changes(*(_environment(manifest) for manifest in manifests))),
        image=tuple(changes(*(_image(manifest.job) for manifest in manifests))),
        code=tuple(changes(*(_code(manifest, run) for manifest, run in zip(manifests, runs, strict=True)))),
        script=tuple(_script_lines(*zip(manifests, runs, strict=True))),
        nodes=tuple(changes(_nodes(first), _nodes(second))),
        results=tuple(changes(_results(first), _results(second))),
    )


def changes(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Change]:
    """Names with different values, in the order of the first mapping, then of the second."""
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            yield Change(name, first.get(name), second.get(name))


def job_changes(first: Job, second: Job) -> list[Change]:
    """Differences of two resolved jobs: settings, then variables."""
    return [*changes(_settings(first), _settings(second)), *changes(_variables(first), _variables(second))]


def _settings(job: Job) -> dict[str, str]:
    """The resolved settings of a job without variables, image, Python and unset values."""
    fields: dict[str, Any] = msgspec.to_builtins(job)
    elsewhere = ("env", "container", "python", *(["chdir"] if job.snapshot else []))  # a snapshot runs where it is
    for name in (*_LEFT_OUT, *elsewhere):
        fields.pop(name, None)
    resources = fields.pop("resources")
    if job.retries is not None:
        fields["retries"] = str(job.retries)
    return {name: _text(value) for name, value in {**resources, **fields}.items() if value not in (None, [], {}, False)}


def _variables(job: Job) -> dict[str, str]:
    return {f"env.{name}": value for name, value in job.env.items()}


def _environment(manifest: Manifest[Job]) -> dict[str, str]:
    return {
        **_variables(manifest.job),
        "python": manifest.job.python,
        "hpcjobs": manifest.hpcjobs,
        "user": manifest.user,
        "submitted from": manifest.host,
    }


def _image(job: Job) -> dict[str, str]:
    fields = msgspec.to_builtins(job.container) if job.container is not None else {}
    return {name: _text(value) for name, value in fields.items() if value not in (None, [], False)}


def _code(manifest: Manifest[Job], run_dir: Path) -> dict[str, str]:
    code = manifest.code
    if code is None:
        return {}
    known = {"commit": code.commit or "none", "untracked files": ", ".join(sorted(code.untracked))}
    return known | {"changes since the commit": read_patch(run_dir)}


def _script_lines(first: tuple[Manifest[Job], Path], second: tuple[Manifest[Job], Path]) -> Iterator[str]:
    """Differing lines of the scripts; empty if both are made by their settings from the current template."""
    texts = [_neutral(manifest, run) for manifest, run in (first, second)]
    if texts[0] == texts[1] or all(_is_rendered(manifest, run) for manifest, run in (first, second)):
        return
    names = [str(run / "job.sh") for _, run in (first, second)]
    yield from difflib.unified_diff(texts[0], texts[1], names[0], names[1], lineterm="", n=0)


def _neutral(manifest: Manifest[Job], run_dir: Path) -> list[str]:
    """The script without its header, which names the command, and with the run folder, also moved, by one name."""
    text = _read_text(run_dir / "job.sh") or ""
    for folder in (Path(manifest.job.run_root, run_dir.name), run_dir):
        text = text.replace(str(folder), "RUN_DIR")
    return _without_header(text)


def _without_header(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("# ")]


def _is_rendered(manifest: Manifest[Job], run_dir: Path) -> bool:
    """Whether today's template makes this script of the job: then its settings say all about it."""
    try:
        text = render(manifest.job, run_dir, made_by="", untrusted=[])
    except HpcJobsError:
        return False  # a template that is not there any more
    return _without_header(text.replace(str(run_dir), "RUN_DIR")) == _neutral(manifest, run_dir)


def _nodes(job: Known) -> dict[str, str]:
    nodes = {part for record in job.records if record.node_list for part in HOST_PART.findall(record.node_list)}
    return {"nodes": ",".join(sorted(nodes))} if nodes else {}


def _results(job: Known) -> dict[str, str]:
    """How the job ended, and its numbers. An array of several tasks has none of its own: its tasks have."""
    is_one = len(own_ids(job.entry)) == 1
    ends = {"job" if is_one else record.job_id.partition("_")[2] or "job": record for record in job.records}
    results = {f"state of {name}" if name != "job" else "state": ends[name].state.value for name in ends}
    results |= {
        f"exit code of {name}" if name != "job" else "exit code": str(record.exit_code)
        for name, record in ends.items()
        if record.exit_code is not None
    }
    return results | (dict(_summary(job.entry)) if is_one else {})


def _summary(entry: Entry) -> Iterator[tuple[str, str]]:
    folder = output_dir(Path(entry.run_dir), own_ids(entry)[0])
    summary = read_usable(folder / SUMMARY, lambda: read_summary(folder / SUMMARY)) or {}
    for name, value in flatten({key: value for key, value in summary.items() if key != "config"}):
        if name.split(".")[0] not in _IDENTITY:
            yield name, _text(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
