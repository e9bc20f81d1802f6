"""Which type each verb prints with ``--json``: a document, or the fields of another package's type with times.

What a verb prints may need half of the package, so it is imported when the verb prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

import msgspec

from hpcjobs.cli.json_documents import (
    Archived,
    Cancelled,
    CellCommand,
    CellResult,
    Document,
    GroupTotals,
    Held,
    ImageLine,
    Lines,
    Pruned,
    Released,
    Requeued,
    Session,
    SessionLine,
    SessionSubmitted,
    Setting,
    Signalled,
    SiteChecked,
    SiteDraft,
    SiteLine,
    Stopped,
    Submitted,
    SweepCancelled,
    SweepReport,
    SweepStatus,
    SweepSubmitted,
    Time,
    Updated,
)


def derive(source: type, name: str | None = None, /, **changed: Any) -> Any:
    """The type of what is printed of ``source``, a struct or named tuple: its fields, and those of ``changed``."""
    hints = get_type_hints(source)
    names = getattr(source, "__struct_fields__", None) or getattr(source, "_fields")  # noqa: B009 # of a named tuple
    fields = {field: hints[field] for field in names} | changed
    return _new(name or source.__name__, (source.__doc__ or "").split("\n\n")[0].strip(), **fields)


def _new(name: str, doc: str, /, **fields: Any) -> Any:
    return msgspec.defstruct(
        name, list(fields.items()), bases=(Document,), namespace={"__doc__": doc}, frozen=True, kw_only=True
    )


def _extend(document: type[Document], /, **fields: Any) -> Any:
    """``document`` with further fields, whose types are of packages that only this verb needs."""
    return msgspec.defstruct(
        document.__name__,
        [(name, *kind) if isinstance(kind, tuple) else (name, kind) for name, kind in fields.items()],
        bases=(document,),
        namespace={"__doc__": document.__doc__},
        frozen=True,
        kw_only=True,
    )


def _many(kind: Any) -> Any:
    return list[kind]


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

    return _many(derive(ListedJob, "JobLine", record=record()))


def _load() -> Any:
    from hpcjobs.accounting.load_page import NodeLoad

    return _new("LoadReport", "Means and the peak of each node, and the page.", nodes=_many(derive(NodeLoad)), page=str)


def _description() -> Any:
    from hpcjobs.run.attempts import Attempt
    from hpcjobs.run.describe import Description
    from hpcjobs.run.index import Entry
    from hpcjobs.run.samples import NodeSample

    return derive(
        Description,
        entry=derive(Entry, submitted=Time),
        records=_many(record()),
        attempts=_many(derive(Attempt, started=Time, ended=Time | None)),
        monitor=_many(derive(NodeSample, taken=Time)),
    )


@cache
def _placement() -> Any:
    from hpcjobs.diagnosis.placement import Placement

    return derive(Placement, start=Time | None)


def _pending() -> Any:
    from hpcjobs.diagnosis.pending import Pending

    return derive(Pending, start_estimate=Time | None, sooner=_many(_placement()))


def _diagnosis() -> Any:
    from hpcjobs.diagnosis.values import Diagnosis

    return Diagnosis


def _difference() -> Any:
    from hpcjobs.run.difference import Difference

    return Difference


def _drill() -> Any:
    from hpcjobs.drills.drill import DrillVerdict

    return derive(DrillVerdict)


def _study() -> Any:
    from hpcjobs.scaling.study import StudyRun

    return _new("StudySubmitted", "A scaling study: its file, and its runs.", study=str, points=list[StudyRun])


def _session_request() -> Any:
    from hpcjobs.job.models import Plan
    from hpcjobs.node.session.files import Settings

    return derive(Plan, "SessionPlan", run_dir=str, session=derive(Settings, "SessionSettings"))


@cache
def _session() -> Any:
    from hpcjobs.node.session.files import Connection
    from hpcjobs.node.session.tunnel import Tunnel

    connection = derive(Connection) | None
    return _extend(Session, connection=(connection, None), way=(derive(Tunnel) | None, None))


def _scaling() -> Any:
    from hpcjobs.scaling.analysis import Knee, SizeResult
    from hpcjobs.scaling.intervals import Interval

    interval: Any = derive(Interval)
    size = derive(SizeResult, throughput=interval, speedup=interval, efficiency=interval)
    law = _new("LawFit", "A law fitted to the sizes.", law=str, rms=float, chosen=bool, parameters=dict[str, interval])
    knee = derive(Knee, fitted=interval | None)
    text = "What a scaling study says; docs/reports.md explains it."
    return _new("ScalingReport", text, groups=_many(size), summary=list[str], fits=_many(law), knee=knee, page=str)


def _advice() -> Any:
    from hpcjobs.accounting.advice import Advice
    from hpcjobs.scaling.right_size import StartEstimates

    starts = derive(StartEstimates, as_requested=Time, as_advised=Time)
    text = "What to ask for next time, and when the job would start then."
    return _many(_new("Advised", text, job_id=str, advice=_many(derive(Advice)), starts=starts | None))


def _site_check() -> Any:
    from hpcjobs.discovery.compare import SiteFinding

    return _extend(SiteChecked, findings=_many(derive(SiteFinding, "SiteFinding")))


def _site_draft() -> Any:
    from hpcjobs.discovery.proposal import Question

    return _extend(SiteDraft, questions=_many(derive(Question)))


def _job_rows() -> Any:
    from hpcjobs.accounting.columns import COLUMNS

    kinds: dict[str, Any] = {"text": str, "whole": int, "real": float, "time": Time}
    fields = {name: kinds[kind] | None for name, (kind, _) in COLUMNS.items()}
    return _many(
        _new("AccountedJob", "A job as the accounting has it; docs/reports.md explains the columns.", **fields)
    )


def _fabric() -> Any:
    from hpcjobs.run.fabric import FabricReport

    return derive(FabricReport, time=Time)


def _nodes() -> Any:
    from hpcjobs.fabric.node_record import NodeVerdict

    node = derive(NodeVerdict, time=Time, left_out_until=Time | None)
    return _new("Nodes", "The record of nodes.", record=str, nodes=_many(node))


def _image() -> Any:
    from hpcjobs.containers.images import ImageManifest

    manifest = derive(ImageManifest, built=Time)
    return _new("ImageBuilt", "An image that was built.", path=str, new=bool, manifest=manifest)


def _images() -> Any:
    from hpcjobs.containers.images import ImageManifest

    image = _extend(ImageLine, manifest=derive(ImageManifest, built=Time) | None)
    return _new("Images", "Images of a site, and recipes.", images=_many(image), recipes=dict[str, str])


def _image_verdict() -> Any:
    from hpcjobs.containers.images import ImageFacts
    from hpcjobs.containers.verdict import ImageVerdict

    verdict = derive(ImageVerdict, facts=ImageFacts | None)
    return _new("ImageChecked", "Whether an image fits a site.", verdict=verdict, fits=bool)


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
    "submit": lambda: Submitted,
    "submit --dry-run": _plan,
    "submit --explain": lambda: list[Setting],
    "submit --test-only": _placement,
    "ps": _jobs,
    "show": _description,
    "logs": lambda: Lines,
    "why": _diagnosis,
    "why, of a job that waits": _pending,
    "why, of a job that has not failed": record,
    "diff": _difference,
    "where": lambda: _many(_placement()),
    "rerun": lambda: Submitted,
    "wait": lambda: _many(record()),
    "cancel": lambda: Cancelled,
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
