"""Maps each verb to the type it prints with ``--json``: a document, or another package's fields with times.

What a verb prints may need half of the package, so it is imported when the verb prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from hpcjobs.cli import json_documents as documents
from hpcjobs.cli.json_derivation import derive, extend, list_of, make_type
from hpcjobs.cli.json_documents import Time


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
    from hpcjobs.accounting.load_page import NodeLoad

    return make_type(
        "LoadReport", "Means and the peak of each node, and the page.", nodes=list_of(derive(NodeLoad)), page=str
    )


def _description() -> Any:
    from hpcjobs.record.attempts import Attempt
    from hpcjobs.record.state import FirstFailure
    from hpcjobs.run.describe import Description
    from hpcjobs.run.index import Entry
    from hpcjobs.run.samples import NodeSample

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
    from hpcjobs.run.difference import Difference

    return Difference


def _cancellation() -> Any:
    from hpcjobs.run.cancel import Cancelled

    return derive(Cancelled)


def _drill() -> Any:
    from hpcjobs.drills.drill import DrillVerdict

    return derive(DrillVerdict)


def _study() -> Any:
    from hpcjobs.scaling.study import StudyRun

    return make_type("StudySubmitted", "A scaling study: its file, and its runs.", study=str, points=list[StudyRun])


def _session_request() -> Any:
    from hpcjobs.job.models import Plan
    from hpcjobs.node.session.files import Settings

    return derive(Plan, "SessionPlan", run_dir=str, session=derive(Settings, "SessionSettings"))


@cache
def _session() -> Any:
    from hpcjobs.node.session.files import Connection
    from hpcjobs.node.session.tunnel import Tunnel

    connection = derive(Connection) | None
    return extend(documents.SessionAccess, connection=(connection, None), way=(derive(Tunnel) | None, None))


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
    from hpcjobs.accounting.advice import Advice
    from hpcjobs.scaling.right_size import StartEstimates

    starts = derive(StartEstimates, as_requested=Time, as_advised=Time)
    text = "What to ask for next time, and when the job would start then."
    return list_of(make_type("Advised", text, job_id=str, advice=list_of(derive(Advice)), starts=starts | None))


def _site_check() -> Any:
    from hpcjobs.discovery.compare import SiteFinding

    return extend(documents.SiteChecked, findings=list_of(derive(SiteFinding, "SiteFinding")))


def _site_draft() -> Any:
    from hpcjobs.discovery.proposal import Question

    return extend(documents.SiteDraft, questions=list_of(derive(Question)))


def _job_rows() -> Any:
    from hpcjobs.accounting.columns import COLUMNS

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

    image = extend(documents.ImageLine, manifest=derive(ImageManifest, built=Time) | None)
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
    "submit": lambda: documents.JobSubmitted,
    "submit --dry-run": _plan,
    "submit --explain": lambda: list[documents.Setting],
    "submit --test-only": _placement,
    "ps": _jobs,
    "show": _description,
    "logs": lambda: documents.Lines,
    "why": _diagnosis,
    "why, of a job that waits": _pending,
    "why, of a job that has not failed": record,
    "diff": _difference,
    "where": lambda: list_of(_placement()),
    "rerun": lambda: documents.JobSubmitted,
    "wait": lambda: list_of(record()),
    "cancel": _cancellation,
    "cancel --signal": lambda: documents.Signalled,
    "hold": lambda: documents.Held,
    "release": lambda: documents.Released,
    "requeue": lambda: documents.Requeued,
    "update": lambda: documents.Updated,
    "prune": lambda: documents.Pruned,
    "archive": lambda: documents.Archived,
    "drill": _drill,
    "sweep run": lambda: documents.SweepSubmitted,
    "sweep run --dry-run": lambda: list[documents.CellCommand],
    "sweep status": lambda: documents.SweepStatus,
    "sweep resume": lambda: documents.SweepSubmitted,
    "sweep results": lambda: list[documents.CellResult],
    "sweep results --min": lambda: documents.CellResult | None,
    "sweep cancel": lambda: documents.SweepCancelled,
    "scale": _study,
    "jupyter": _session,
    "jupyter --dry-run": _session_request,
    "jupyter --no-wait": lambda: documents.SessionSubmitted,
    "jupyter list": lambda: list[documents.SessionLine],
    "jupyter open": _session,
    "jupyter stop": lambda: documents.Stopped,
    "report jobs": _job_rows,
    "report jobs --by": lambda: list[documents.GroupTotals],
    "report scaling": _scaling,
    "report load": _load,
    "report sweep": lambda: documents.SweepReport,
    "report advise": _advice,
    "fabric": _fabric,
    "nodes": _nodes,
    "container build": _image,
    "container list": _images,
    "container check": _image_verdict,
    "sites": lambda: list[documents.SiteLine],
    "sites show": _site,
    "sites check": _site_check,
    "sites init": _site_draft,
    "cloud check": _cloud,
    "sandbox up": _sandbox,
    "sandbox status": _sandbox_status,
}
"""Verb, with the option that makes it print something else, -> the type of what it prints."""
