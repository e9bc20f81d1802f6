"""The types of what verbs print with ``--json`` where no type of another package has these fields.

Moments are times of ISO 8601 in UTC.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec

Time = Annotated[datetime, msgspec.Meta(tz=True)]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A value as it is printed."""


class JobSubmitted(Document, frozen=True, kw_only=True):
    """A job that was submitted."""

    job_id: str
    cluster: str | None
    site: str
    run_dir: str
    name: str


class Setting(Document, frozen=True, kw_only=True):
    """One resolved value of a job, and where it was read."""

    name: str
    value: str
    source: str


class Lines(Document, frozen=True, kw_only=True):
    """Lines of the logs of a job, or of its samples."""

    job_id: str
    files: list[str]
    lines: list[str]


class Signalled(Document, frozen=True, kw_only=True):
    """Jobs that were sent a signal."""

    signalled: list[str]


class Held(Document, frozen=True, kw_only=True):
    """Jobs that were held."""

    held: list[str]


class Released(Document, frozen=True, kw_only=True):
    """Jobs that may start."""

    released: list[str]


class Requeued(Document, frozen=True, kw_only=True):
    """Jobs that are in the queue again."""

    requeued: list[str]


class Updated(Document, frozen=True, kw_only=True):
    """What was changed, in Slurm's words."""

    job_id: str
    changed: list[str]


class OldJob(Document, frozen=True, kw_only=True):
    """A job whose run folder is old."""

    job_id: str
    name: str
    states: list[str]
    ended: Time
    size_bytes: int
    run_dir: str


class Pruned(Document, frozen=True, kw_only=True):
    """Old jobs, and whether they were removed."""

    jobs: list[OldJob]
    removed: bool
    size_bytes: int
    left: int
    """Jobs of that age that stay."""


class Archived(Document, frozen=True, kw_only=True):
    """The file that was written."""

    path: str
    files: int
    size_bytes: int


class CellCommand(Document, frozen=True, kw_only=True):
    """What a cell would run."""

    cell: str
    command: str


class SweepSubmitted(Document, frozen=True, kw_only=True):
    """What one call submitted of a sweep; numbers are of cells."""

    name: str
    folder: str
    arrays: list[str]
    cells: int
    waiting: int
    done: int
    open: int


class SweepStatus(Document, frozen=True, kw_only=True):
    """How many cells are in which state."""

    name: str
    folder: str
    states: dict[str, int]
    total: int


class SweepCancelled(Document, frozen=True, kw_only=True):
    """Arrays that were cancelled."""

    cancelled: list[str]


class CellResult(Document, frozen=True, kw_only=True):
    """A cell of a sweep: its parameters, what it measured, and what is known of its run."""

    cell: str
    params: dict[str, str | int | float | None]
    measured: dict[str, str | int | float | bool | None]
    """summary.json of the cell, names of nested values joined by dots; None: not a finite number."""
    state: str
    exit_code: int | None
    elapsed_s: float | None
    nodes: str | None
    job_id: str | None
    error: str | None
    traceback: str | None
    folder: str
    log: str | None


class SweepReport(Document, frozen=True, kw_only=True):
    """The best cell, and the page."""

    best: CellResult | None
    page: str


class GroupTotals(Document, frozen=True, kw_only=True):
    """Sums over the jobs of one group; docs/reports.md explains the columns."""

    by: str
    group: str
    jobs: int
    failed: int
    cpu_h: float | None
    gpu_h: float | None
    cpu_efficiency: float | None
    mem_efficiency: float | None
    mean_wait_s: float | None
    lost_h: float | None
    energy_kwh: float | None
    energy_source: str | None
    """``measured``, or ``modelled`` where a part of it is not measured."""
    cost: float | None
    currency: str | None


class SessionSubmitted(Document, frozen=True, kw_only=True):
    """A session that was submitted."""

    job_id: str
    site: str
    run_dir: str


class SessionLine(Document, frozen=True, kw_only=True):
    """A session; without a node its server does not answer yet."""

    job_id: str
    site: str
    state: str
    run_dir: str
    kind: str
    folder: str
    node: str | None = None
    ends: Time | None = None
    tunnel: list[str] | None = None
    """Words to type on the laptop."""


class SessionAccess(SessionLine, frozen=True, kw_only=True):
    """A session and the way to it. It holds the token."""

    url: str | None = None


class Stopped(Document, frozen=True, kw_only=True):
    """Sessions that were ended, and those that had ended."""

    stopped: list[str]
    had_ended: list[str]


class ImageLine(Document, frozen=True, kw_only=True):
    """An image of the site."""

    name: str
    path: str


class SiteLine(Document, frozen=True, kw_only=True):
    """A site file."""

    name: str
    path: str
    layer: str
    shadowed: bool
    shadowed_by: str | None
    extends: list[str]
    untrusted: list[str]
    description: str


class SiteChecked(Document, frozen=True, kw_only=True):
    """What differs between a site file and the live cluster."""

    site: str
    path: str
    ok: bool


class SiteDraft(Document, frozen=True, kw_only=True):
    """A site file made from the live cluster."""

    name: str
    path: str
    written: bool
    site: dict[str, Any]
    origins: dict[str, str]
    left_out: dict[str, str]
    """Partition -> why."""
    facts: list[str]
