"""Compares two runs: what was requested, the code, the script, the nodes, and the outcome."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hpcjobs.errors import HpcJobsError
from hpcjobs.files import read_regular
from hpcjobs.job.models import Job
from hpcjobs.job.script import render
from hpcjobs.record.names import SUMMARY
from hpcjobs.run.describe import flat
from hpcjobs.run.folder import output_dir
from hpcjobs.run.index import Entry
from hpcjobs.run.rerun import Manifest, read_manifest, read_patch
from hpcjobs.run.state_file import own_ids, read_json
from hpcjobs.run.status import Known
from hpcjobs.runtime.hostlist import hosts_of
from hpcjobs.runtime.numbers import restore

# Of a resolved job: where it lies, and what its other fields say already.
_LEFT_OUT = (
    *("sources", "layers", "run_root", "rehearsal", "slurm_conf", "untrusted"),
    "time_limit_s",  # resources has it as `time`
    *("nodes", "max_nodes", "ntasks_per_node"),
)
_IDENTITY = frozenset({"job_id", "started_at", "ended_at", "hosts"})
"""Keys of summary.json that say which run it was; every other one is a result."""


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
    """What differs between two jobs.

    Raises:
        RequestError: a manifest cannot be used.
    """
    runs = [Path(job.entry.run_dir) for job in (first, second)]
    manifests = [read_manifest(run) for run in runs]
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
    """The names whose values differ, in the order of the first, then of the second."""
    for name in dict.fromkeys((*first, *second)):
        if first.get(name) != second.get(name):
            yield Change(name, first.get(name), second.get(name))


def job_changes(first: Job, second: Job) -> list[Change]:
    """What was resolved differently: settings, then variables."""
    return [*changes(_settings(first), _settings(second)), *changes(_variables(first), _variables(second))]


def _settings(job: Job) -> dict[str, str]:
    """All that a job was resolved to, but its variables, image and Python; what it leaves open is left out."""
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


def _environment(manifest: Manifest) -> dict[str, str]:
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


def _code(manifest: Manifest, run_dir: Path) -> dict[str, str]:
    code = manifest.code
    if code is None:
        return {}
    known = {"commit": code.commit or "none", "untracked files": ", ".join(sorted(code.untracked))}
    return known | {"changes since the commit": read_patch(run_dir)}


def _script_lines(first: tuple[Manifest, Path], second: tuple[Manifest, Path]) -> Iterator[str]:
    """Differing lines of the scripts; none where each is what its settings make of one and the same template."""
    texts = [_neutral(manifest, run) for manifest, run in (first, second)]
    if texts[0] == texts[1] or all(_is_rendered(manifest, run) for manifest, run in (first, second)):
        return
    names = [str(run / "job.sh") for _, run in (first, second)]
    yield from difflib.unified_diff(texts[0], texts[1], names[0], names[1], lineterm="", n=0)


def _neutral(manifest: Manifest, run_dir: Path) -> list[str]:
    """The script without its header, which names the command, and with the run folder, also moved, by one name."""
    try:
        text = read_regular(run_dir / "job.sh").decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return []
    for folder in (Path(manifest.job.run_root, run_dir.name), run_dir):
        text = text.replace(str(folder), "RUN_DIR")
    return _without_header(text)


def _without_header(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("# ")]


def _is_rendered(manifest: Manifest, run_dir: Path) -> bool:
    """Whether today's template makes this script of the job: then its settings say all about it."""
    try:
        text = render(manifest.job, run_dir, made_by="", untrusted=[])
    except HpcJobsError:
        return False  # a template that is not there any more
    return _without_header(text.replace(str(run_dir), "RUN_DIR")) == _neutral(manifest, run_dir)


def _nodes(job: Known) -> dict[str, str]:
    nodes = {node for record in job.records if record.node_list for node in hosts_of(record.node_list)}
    return {"nodes": ",".join(sorted(nodes))} if nodes else {}


def _results(job: Known) -> dict[str, str]:
    ends = {record.job_id.partition("_")[2] or "job": record for record in job.records}
    results = {f"state of {name}" if name != "job" else "state": ends[name].state.value for name in ends}
    results |= {
        f"exit code of {name}" if name != "job" else "exit code": str(record.exit_code)
        for name, record in ends.items()
        if record.exit_code is not None
    }
    return results | dict(_summary(job.entry))


def _summary(entry: Entry) -> Iterator[tuple[str, str]]:
    folder = output_dir(Path(entry.run_dir), own_ids(entry)[0])
    summary = restore(read_json(folder / SUMMARY, dict[str, Any]) or {})
    for name, value in flat({key: value for key, value in summary.items() if key != "config"}):
        if name.split(".")[0] not in _IDENTITY:
            yield name, _text(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
