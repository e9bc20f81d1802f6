"""``manifest.json``: the submission, written before the job is handed over."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hpcjobs.files import write_beside
from hpcjobs.record import MANIFEST
from hpcjobs.record.values import convert, read_json, to_json

J = TypeVar("J")


class RecordedCode(NamedTuple):
    """The git state of the program's folder."""

    commit: str | None = None
    dirty: bool = False
    """It differed from the commit: ``code.patch`` has the difference."""
    untracked: list[str] = []
    """Files that git does not know."""
    missing: str | None = None
    """Changes that ``code.patch`` does not contain, and why."""


@dataclass(frozen=True)
class RequestedJob:
    """The fields of a resolved job that are read without loading all that resolves one."""

    nodes: int = 1
    max_nodes: int | None = None
    ntasks_per_node: int = 1
    argv: list[str] = field(default_factory=list)
    chdir: str | None = None
    launcher: str | None = None
    python: str | None = None
    batch_script: str | None = None
    container: dict[str, Any] | None = None
    resources: dict[str, Any] = field(default_factory=dict)
    """Options of sbatch, by their long names."""
    sources: dict[str, str] = field(default_factory=dict)
    """For every resolved value: where it was read."""


@dataclass(frozen=True)
class Manifest(Generic[J]):
    """A submission; ``job`` is a `hpcjobs.job.models.Job`, as JSON's own types where it was read."""

    job: J
    command_line: str | None = None
    """The command that made it."""
    command: list[str] = field(default_factory=list)
    """How the job's script is submitted."""
    created: float | None = None
    """Seconds since 1970."""
    user: str = "unknown"
    host: str = "unknown"
    """Host of the submission."""
    hpcjobs: str = "unknown"
    """The version."""
    code: RecordedCode | None = None
    """None: the program's folder has no git repository."""
    schema: int = 1

    @property
    def request(self) -> RequestedJob:
        """Raises ValueError."""
        return convert(self.job, RequestedJob)


def read_manifest(run_dir: Path) -> Manifest[dict[str, Any]]:
    """Read the manifest of a run folder. Raises OSError: it cannot be read. ValueError: it holds another value."""
    manifest: Manifest[dict[str, Any]] = read_json(run_dir / MANIFEST, Manifest)
    if not isinstance(manifest.job, dict):
        raise ValueError("job is no object")
    convert(manifest.job, RequestedJob)  # raises here, where every reader expects it, and not when a field is used
    return manifest


def write_manifest(run_dir: Path, manifest: Manifest[dict[str, Any]]) -> None:
    """Write the manifest of a run folder. Raises OSError."""
    write_beside(run_dir / MANIFEST, json.dumps(to_json(manifest), indent=2))
