"""The types of the output of ``--json``, and printing by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from hpcjobs.cli.output import print_json


def derive(source: type, name: str | None = None, /, **changed: Any) -> Any:
    """The type of what is printed of ``source``, a struct or named tuple: its fields, and those of ``changed``."""
    hints = get_type_hints(source)
    names = getattr(source, "__struct_fields__", None) or getattr(source, "_fields")  # noqa: B009 # of a named tuple
    fields = {field: hints[field] for field in names} | changed
    return make_type(name or source.__name__, (source.__doc__ or "").split("\n\n")[0].strip(), **fields)


def make_type(name: str, doc: str, /, **fields: Any) -> Any:
    """A document of these fields; its name and ``doc`` are those of docs/json.md."""
    return msgspec.defstruct(
        name, list(fields.items()), bases=(Document,), namespace={"__doc__": doc}, frozen=True, kw_only=True
    )


def extend(document: type[Document], /, **fields: Any) -> Any:
    """``document`` with further fields, whose types are of packages that only this verb needs."""
    return msgspec.defstruct(
        document.__name__,
        [(name, *kind) if isinstance(kind, tuple) else (name, kind) for name, kind in fields.items()],
        bases=(document,),
        namespace={"__doc__": document.__doc__},
        frozen=True,
        kw_only=True,
    )


def list_of(kind: Any) -> Any:
    """``list[kind]``, which type checkers refuse for a type that is made while the program runs."""
    return list[kind]


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


@cache
def record() -> Any:
    """The record of a job, with times."""
    from hpcjobs.scheduler.base import JobRecord

    moment = Time | None
    return derive(JobRecord, submitted=moment, started=moment, start_estimate=moment, ended=moment)


def _plan() -> Any:
    from hpcjobs.job.models import Plan

    return derive(Plan, run_dir=str)


def _jobs() -> Any:
    from hpcjobs.run.listing import ListedJob

    return list_of(derive(ListedJob, "JobLine", record=record()))


def _load() -> Any:
    from hpcjobs.jobstats.load_page import NodeLoad

    return make_type(
        "LoadReport", "Means and the peak of each node, and the page.", nodes=list_of(derive(NodeLoad)), page=str
    )


def _description() -> Any:
    from hpcjobs.record.attempts import Attempt
    from hpcjobs.record.state import FirstFailure
    from hpcjobs.run.handle import Description
    from hpcjobs.run.index import Entry
    from hpcjobs.run.progress import NodeSample

    return derive(
        Description,
        entry=derive(Entry, submitted=Time),
        records=list_of(record()),
        attempts=list_of(derive(Attempt, started=Time, ended=Time | None)),
        first_failure=derive(FirstFailure) | None,
        monitor=list_of(derive(NodeSample, taken=Time)),
    )


@cache
def _placement() -> Any:
    from hpcjobs.diagnosis.placement import Placement

    return derive(Placement, start=Time | None)


def _pending() -> Any:
    from hpcjobs.diagnosis.pending import Pending

    return derive(Pending, start_estimate=Time | None, sooner=list_of(_placement()))


def _diagnosis() -> Any:
    from hpcjobs.diagnosis.values import Diagnosis

    return Diagnosis


def _difference() -> Any:
    from hpcjobs.run.rerun import Difference

    return Difference


def _cancellation() -> Any:
    from hpcjobs.run.control import Cancelled

    return derive(Cancelled)


def _drill() -> Any:
    from hpcjobs.drills.drill import DrillVerdict

    return derive(DrillVerdict)


def _study() -> Any:
    from hpcjobs.scaling.study import StudyRun

    return make_type("StudySubmitted", "A scaling study: its file, and its runs.", study=str, points=list[StudyRun])


@cache
def _size() -> Any:
    from hpcjobs.scaling.size_answer import SizeAnswer, SizeRow

    return derive(SizeAnswer, sizes=list_of(derive(SizeRow)))


@cache
def _submission() -> Any:
    return extend(JobSubmitted, size=(_size() | None, None))


def _session_request() -> Any:
    from hpcjobs.job.models import Plan
    from hpcjobs.node.session.files import Settings

    return derive(Plan, "SessionPlan", run_dir=str, session=derive(Settings, "SessionSettings"))


@cache
def _session() -> Any:
    from hpcjobs.node.session.files import Connection, Tunnel

    connection = derive(Connection) | None
    return extend(SessionAccess, connection=(connection, None), way=(derive(Tunnel) | None, None))


def _scaling() -> Any:
    from hpcjobs.scaling.analysis import Knee, SizeResult
    from hpcjobs.scaling.fits import Interval

    interval: Any = derive(Interval)
    size = derive(SizeResult, throughput=interval, speedup=interval, efficiency=interval)
    law = make_type(
        "LawFit",
        "A law fitted to the sizes.",
        law=str,
        rms=float,
        chosen=bool,
        possible=bool,
        parameters=dict[str, float],
    )
    knee = derive(Knee, fitted=interval | None)
    text = "What a scaling study says; docs/reports.md explains it."
    return make_type(
        "ScalingReport", text, groups=list_of(size), summary=list[str], fits=list_of(law), knee=knee, page=str
    )


def _advice() -> Any:
    from hpcjobs.jobstats.advice import Advice
    from hpcjobs.scaling.right_size import StartEstimates

    starts = derive(StartEstimates, as_requested=Time, as_advised=Time)
    text = "What to ask for next time, and when the job would start then."
    return list_of(make_type("Advised", text, job_id=str, advice=list_of(derive(Advice)), starts=starts | None))


def _site_check() -> Any:
    from hpcjobs.discovery.compare import SiteFinding

    return extend(SiteChecked, findings=list_of(derive(SiteFinding, "SiteFinding")))


def _site_draft() -> Any:
    from hpcjobs.discovery.proposal import Question

    return extend(SiteDraft, questions=list_of(derive(Question)))


def _job_rows() -> Any:
    from hpcjobs.jobstats.columns import COLUMNS

    kinds: dict[str, Any] = {"text": str, "whole": int, "real": float, "time": Time}
    fields = {name: kinds[kind] | None for name, (kind, _) in COLUMNS.items()}
    return list_of(
        make_type("AccountedJob", "A job as the accounting has it; docs/reports.md explains the columns.", **fields)
    )


def _fabric() -> Any:
    from hpcjobs.run.fabric import FabricReport

    return derive(FabricReport, time=Time)


def _nodes() -> Any:
    from hpcjobs.fabric.node_record import NodeVerdict

    node = derive(NodeVerdict, time=Time, left_out_until=Time | None)
    return make_type("Nodes", "The record of nodes.", record=str, nodes=list_of(node))


def _image() -> Any:
    from hpcjobs.containers.images import ImageManifest

    manifest = derive(ImageManifest, built=Time)
    return make_type("ImageBuilt", "An image that was built.", path=str, new=bool, manifest=manifest)


def _images() -> Any:
    from hpcjobs.containers.images import ImageManifest

    image = extend(ImageLine, manifest=derive(ImageManifest, built=Time) | None)
    return make_type("Images", "Images of a site, and recipes.", images=list_of(image), recipes=dict[str, str])


def _image_verdict() -> Any:
    from hpcjobs.containers.images import ImageFacts
    from hpcjobs.containers.verdict import ImageVerdict

    verdict = derive(ImageVerdict, facts=ImageFacts | None)
    return make_type("ImageChecked", "Whether an image fits a site.", verdict=verdict, fits=bool)


def _site() -> Any:
    from hpcjobs.site.models import Site

    return Site


def _cloud() -> Any:
    from hpcjobs.cloud.check import Report

    return Report


def _sandbox() -> Any:
    from hpcjobs.sandbox import Sandbox

    return Sandbox


def _sandbox_status() -> Any:
    from hpcjobs.sandbox import Status

    return Status


OUTPUTS: Mapping[str, Callable[[], Any]] = {
    "submit": _submission,
    "submit --dry-run": _plan,
    "submit --explain": lambda: list[Setting],
    "submit --test-only": _placement,
    "submit -N auto --dry-run, before its trials": _size,
    "ps": _jobs,
    "show": _description,
    "logs": lambda: Lines,
    "why": _diagnosis,
    "why, of a job that waits": _pending,
    "why, of a job that has not failed": record,
    "diff": _difference,
    "where": lambda: list_of(_placement()),
    "rerun": _submission,
    "wait": lambda: list_of(record()),
    "cancel": _cancellation,
    "cancel --signal": lambda: Signalled,
    "hold": lambda: Held,
    "release": lambda: Released,
    "requeue": lambda: Requeued,
    "update": lambda: Updated,
    "prune": lambda: Pruned,
    "archive": lambda: Archived,
    "drill": _drill,
    "sweep run": lambda: SweepSubmitted,
    "sweep run --dry-run": lambda: list[CellCommand],
    "sweep status": lambda: SweepStatus,
    "sweep resume": lambda: SweepSubmitted,
    "sweep results": lambda: list[CellResult],
    "sweep results --min": lambda: CellResult | None,
    "sweep cancel": lambda: SweepCancelled,
    "scale": _study,
    "jupyter": _session,
    "jupyter --dry-run": _session_request,
    "jupyter --no-wait": lambda: SessionSubmitted,
    "jupyter list": lambda: list[SessionLine],
    "jupyter open": _session,
    "jupyter stop": lambda: Stopped,
    "report jobs": _job_rows,
    "report jobs --by": lambda: list[GroupTotals],
    "report scaling": _scaling,
    "report load": _load,
    "report sweep": lambda: SweepReport,
    "report advise": _advice,
    "fabric": _fabric,
    "nodes": _nodes,
    "container build": _image,
    "container list": _images,
    "container check": _image_verdict,
    "sites": lambda: list[SiteLine],
    "sites show": _site,
    "sites check": _site_check,
    "sites init": _site_draft,
    "cloud check": _cloud,
    "sandbox up": _sandbox,
    "sandbox status": _sandbox_status,
}
"""Verb, with the option that makes it print something else, -> the type of what it prints."""


@cache
def output_type(verb: str) -> Any:
    """The type of what ``hpcjobs VERB --json`` prints."""
    return OUTPUTS[verb]()


def schema(verb: str) -> dict[str, Any]:
    """The JSON Schema of what ``hpcjobs VERB --json`` prints."""
    return msgspec.json.schema(output_type(verb))


def print_as(verb: str, value: object) -> None:
    """Print ``value`` as ``hpcjobs VERB --json`` does."""
    print_json(_convert(value, output_type(verb)))


def _convert(value: Any, kind: Any) -> Any:
    """``value`` for the encoder: documents as mappings of their fields, moments as times."""
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (Union, UnionType):
        kinds = [one for one in arguments if one is not type(None)]
        return _convert(value, kinds[0]) if len(kinds) == 1 else value
    if kind is Time or (origin is Annotated and arguments[0] is datetime):
        return datetime.fromtimestamp(value, timezone.utc)
    if origin in (list, tuple):
        return [_convert(one, arguments[0]) for one in value]
    if origin is dict:
        return {key: _convert(one, arguments[1]) for key, one in value.items()}
    if kind is str:
        return str(getattr(value, "value", value))
    if isinstance(kind, type) and issubclass(kind, Document):
        return {field.name: _convert(_field(value, field), field.type) for field in msgspec.structs.fields(kind)}
    return value


def _field(value: Any, field: msgspec.structs.FieldInfo) -> Any:
    if not isinstance(value, Mapping):
        return getattr(value, field.name)
    return value[field.name] if field.required else value.get(field.name, field.default)
