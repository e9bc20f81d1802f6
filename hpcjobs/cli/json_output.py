"""Types of the output of ``--json``: the fields of the package's own types with times in ISO 8601, and documents.

A field that is a time is declared as `Moment` in the type itself. `OUTPUTS` has one line for each verb, and for each
option that changes the type of its output. A verb's types may need half of the package, so they are imported when the
verb prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import cache
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from hpcjobs.cli.output import print_json
from hpcjobs.site.checks import Moment

Time = Annotated[datetime, msgspec.Meta(tz=True)]
TEXT, TEXTS = str, list[str]

_MOMENTS = {"Attempt": ("started", "ended"), "NodeVerdict": ("time",), "FabricReport": ("time",)}
"""Times of named tuples on the node side: its Python may lack ``Annotated``."""
_PAIRS = ("Bind", "Kernel", "Layer")
"""Named tuples that are printed as lists."""
_NAMES = {"ListedJob": "JobLine", "Settings": "SessionSettings"}
"""Types with another name in docs/json.md."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A value that is printed as a mapping of its fields."""


def make_type(name: str, about: str, /, **fields: Any) -> Any:
    """Make the type of a mapping of ``fields``: a type each, or a type with its default."""
    rows: list[Any] = [(field, *kind) if isinstance(kind, tuple) else (field, kind) for field, kind in fields.items()]
    return msgspec.defstruct(name, rows, bases=(Document,), namespace={"__doc__": about}, frozen=True, kw_only=True)


def make_list(kind: Any) -> Any:
    """Return ``list[kind]``, which type checkers refuse for a type that is made while the program runs."""
    return list[kind]


@cache
def load_type(path: str) -> Any:
    """Import the type ``hpcjobs.PATH``, and return how it is printed."""
    module, _, name = path.rpartition(".")
    return convert_type(getattr(import_module(f"hpcjobs.{module}"), name))


def extend_type(name: str, path: str, /, **fields: Any) -> Any:
    """Return the type ``hpcjobs.PATH`` with further fields, by another name."""
    kind = load_type(path)
    return make_type(name, kind.__doc__, **{f.name: f.type for f in msgspec.structs.fields(kind)}, **fields)


@cache
def convert_type(kind: Any) -> Any:
    """Return the printed type: moments as times, paths as text, named tuples as mappings, other types unchanged."""
    arguments = get_args(kind)
    if kind == Moment:
        return Time
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(convert_type, arguments))]  # noqa: UP007 # of a number of types
    if get_origin(kind) in (list, tuple, dict) and kind != (
        changed := kind.__origin__[tuple(map(convert_type, arguments))]
    ):
        return changed
    if not isinstance(kind, type) or get_origin(kind) is not None or kind.__name__ in _PAIRS:
        return kind
    if issubclass(kind, Path):
        return TEXT
    names: tuple[str, ...] = getattr(kind, "__struct_fields__", getattr(kind, "_fields", ()))
    hints = get_type_hints(kind, include_extras=True) if names else {}
    own = {name: hints[name] for name in names}
    own |= {name: Moment | None if name == "ended" else Moment for name in _MOMENTS.get(kind.__name__, ())}
    fields = {name: convert_type(hint) for name, hint in own.items()}
    if not issubclass(kind, tuple) and fields == own:
        return kind  # msgspec prints this struct without help
    if not names:
        return kind
    about = (kind.__doc__ or "").split("\n\n")[0].strip()
    return make_type(_NAMES.get(kind.__name__, kind.__name__), about, **fields)


_LINES = make_type("Lines", "Lines of the logs of a job, or of its samples.", job_id=str, files=TEXTS, lines=TEXTS)
_SWEEP = make_type(
    "SweepSubmitted",
    "What one call submitted of a sweep; numbers are of cells.",
    **dict.fromkeys(("name", "folder"), TEXT),
    arrays=TEXTS,
    **dict.fromkeys(("cells", "waiting", "done", "open"), int),
)
_OLD_JOB = make_type(
    "OldJob",
    "A job whose run folder is old.",
    job_id=str,
    name=str,
    states=TEXTS,
    ended=Time,
    size_bytes=int,
    run_dir=str,
)
_CELL = make_type(
    "CellResult",
    "A cell of a sweep: its parameters, what it measured, and what is known of its run.",
    cell=str,
    params=dict[str, str | int | float | None],
    measured=dict[str, str | int | float | bool | None],  # summary.json, names joined by dots; null: not finite
    state=str,
    exit_code=int | None,
    elapsed_s=float | None,
    **dict.fromkeys(("nodes", "job_id", "error", "traceback"), str | None),
    folder=str,
    log=str | None,
)
_TOTALS = make_type(
    "GroupTotals",
    "Sums over the jobs of one group; docs/reports.md explains the columns.",
    by=str,
    group=str,
    jobs=int,
    failed=int,
    **dict.fromkeys(
        ("cpu_h", "gpu_h", "cpu_efficiency", "mem_efficiency", "mean_wait_s", "lost_h", "energy_kwh"), float | None
    ),
    energy_source=str | None,
    cost=float | None,
    currency=str | None,
)
_SITE = make_type(
    "SiteLine",
    "A site file.",
    **dict.fromkeys(("name", "path", "layer"), TEXT),
    shadowed=bool,
    shadowed_by=str | None,
    extends=TEXTS,
    untrusted=TEXTS,
    description=str,
)
_SESSION: dict[str, Any] = {
    **dict.fromkeys(("job_id", "site", "state", "run_dir", "kind", "folder"), TEXT),
    "node": (str | None, None),
    "ends": (Time | None, None),
    "tunnel": (list[str] | None, None),
}


@cache
def _submission_type() -> Any:
    return make_type(
        "JobSubmitted",
        "A job that was submitted.",
        job_id=str,
        cluster=str | None,
        site=str,
        run_dir=str,
        name=str,
        size=(load_type("scaling.size_choice.SizeAnswer") | None, None),
    )


@cache
def _session_type() -> Any:
    return make_type(
        "SessionAccess",
        "A session and the way to it. It holds the token.",
        **_SESSION,
        url=(str | None, None),
        connection=(load_type("node.session.files.Connection") | None, None),
        way=(load_type("node.session.files.Tunnel") | None, None),
    )


def _scaling_type() -> Any:
    numbers = dict[str, float]
    text = "A law fitted to the sizes."
    law = make_type("LawFit", text, law=str, rms=float, chosen=bool, possible=bool, parameters=numbers)
    fields: dict[str, Any] = {
        "groups": make_list(load_type("scaling.analysis.SizeResult")),
        "summary": TEXTS,
        "fits": make_list(law),
        "knee": load_type("scaling.analysis.Knee"),
    }
    series = make_type("ScalingSeries", "One series of a study over an axis.", series=str, **fields)
    text = "What a scaling study says, of one with series what the first says; docs/reports.md explains it."
    return make_type("ScalingReport", text, **fields, series=make_list(series), page=str)


def _job_row_type() -> Any:
    from hpcjobs.jobstats.columns import COLUMNS

    kinds: dict[str, Any] = {"text": str, "whole": int, "real": float, "time": Time}
    fields = {name: kinds[kind] | None for name, (kind, _) in COLUMNS.items()}
    return make_type("AccountedJob", "A job as the accounting has it; docs/reports.md explains the columns.", **fields)


def _advice_type() -> Any:
    advice, starts = load_type("jobstats.usage.Advice"), load_type("scaling.right_size.StartEstimates")
    text = "What to ask for next time, and when the job would start then."
    return make_type("Advised", text, job_id=str, advice=make_list(advice), starts=starts | None)


def _images_type() -> Any:
    manifest = load_type("containers.images.ImageManifest") | None
    image = make_type("ImageLine", "An image of the site.", name=str, path=str, manifest=manifest)
    return make_type("Images", "Images of a site, and recipes.", images=make_list(image), recipes=dict[str, str])


def _nodes_type() -> Any:
    node = extend_type("NodeVerdict", "fabric.verdict.NodeVerdict", left_out_until=Time | None)
    return make_type("Nodes", "The record of nodes.", record=str, nodes=make_list(node))


OUTPUTS: Mapping[str, Callable[[], Any]] = {
    "submit": _submission_type,
    "submit --dry-run": lambda: load_type("job.models.Plan"),
    "submit --explain": lambda: make_list(
        make_type("Setting", "One resolved value of a job, and where it was read.", name=str, value=str, source=str)
    ),
    "submit --test-only": lambda: load_type("diagnosis.placement.Placement"),
    "submit -N auto --dry-run, before its trials": lambda: load_type("scaling.size_choice.SizeAnswer"),
    "ps": lambda: make_list(load_type("run.listing.ListedJob")),
    "show": lambda: load_type("run.progress.Description"),
    "logs": lambda: _LINES,
    "why": lambda: load_type("diagnosis.values.Diagnosis"),
    "why, of a job that waits": lambda: load_type("diagnosis.placement.Pending"),
    "why, of a job that has not failed": lambda: load_type("scheduler.base.JobRecord"),
    "diff": lambda: load_type("run.rerun.Difference"),
    "where": lambda: make_list(load_type("diagnosis.placement.Placement")),
    "rerun": _submission_type,
    "wait": lambda: make_list(load_type("scheduler.base.JobRecord")),
    "cancel": lambda: load_type("run.control.Cancelled"),
    "cancel --signal": lambda: make_type("Signalled", "Jobs that were sent a signal.", signalled=TEXTS),
    "hold": lambda: make_type("Held", "Jobs that were held.", held=TEXTS),
    "release": lambda: make_type("Released", "Jobs that may start.", released=TEXTS),
    "requeue": lambda: make_type("Requeued", "Jobs that are in the queue again.", requeued=TEXTS),
    "update": lambda: make_type("Updated", "What was changed, in Slurm's words.", job_id=str, changed=TEXTS),
    "prune": lambda: make_type(
        "Pruned",
        "Old jobs, and whether they were removed.",
        jobs=make_list(_OLD_JOB),
        removed=bool,
        size_bytes=int,
        left=int,  # jobs of that age that stay
    ),
    "archive": lambda: make_type("Archived", "The file that was written.", path=str, files=int, size_bytes=int),
    "drill": lambda: load_type("run.drill.DrillVerdict"),
    "sweep run": lambda: _SWEEP,
    "sweep run --dry-run": lambda: make_list(make_type("CellCommand", "What a cell would run.", cell=str, command=str)),
    "sweep status": lambda: make_type(
        "SweepStatus", "How many cells are in which state.", name=str, folder=str, states=dict[str, int], total=int
    ),
    "sweep resume": lambda: _SWEEP,
    "sweep results": lambda: make_list(_CELL),
    "sweep results --min": lambda: _CELL | None,
    "sweep cancel": lambda: make_type("SweepCancelled", "Arrays that were cancelled.", cancelled=TEXTS),
    "scale": lambda: make_type(
        "StudySubmitted",
        "A scaling study: its file, and its runs.",
        study=str,
        points=make_list(load_type("scaling.study.StudyRun")),
    ),
    "jupyter": _session_type,
    "jupyter --dry-run": lambda: extend_type(
        "SessionPlan", "job.models.Plan", session=load_type("node.session.files.Settings")
    ),
    "jupyter --no-wait": lambda: make_type(
        "SessionSubmitted", "A session that was submitted.", job_id=str, site=str, run_dir=str
    ),
    "jupyter list": lambda: make_list(
        make_type("SessionLine", "A session; without a node its server does not answer yet.", **_SESSION)
    ),
    "jupyter open": _session_type,
    "jupyter stop": lambda: make_type(
        "Stopped", "Sessions that were ended, and those that had ended.", stopped=TEXTS, had_ended=TEXTS
    ),
    "report jobs": lambda: make_list(_job_row_type()),
    "report jobs --by": lambda: make_list(_TOTALS),
    "report scaling": _scaling_type,
    "report load": lambda: make_type(
        "LoadReport",
        "Means and the peak of each node, and the page.",
        nodes=make_list(load_type("jobstats.pages.NodeLoad")),
        page=str,
    ),
    "report sweep": lambda: make_type("SweepReport", "The best cell, and the page.", best=_CELL | None, page=str),
    "report advise": lambda: make_list(_advice_type()),
    "fabric": lambda: load_type("record.fabric.FabricReport"),
    "nodes": _nodes_type,
    "container build": lambda: make_type(
        "ImageBuilt",
        "An image that was built.",
        path=str,
        new=bool,
        manifest=load_type("containers.images.ImageManifest"),
    ),
    "container list": _images_type,
    "container check": lambda: make_type(
        "ImageChecked", "Whether an image fits a site.", verdict=load_type("containers.look.ImageVerdict"), fits=bool
    ),
    "sites": lambda: make_list(_SITE),
    "sites show": lambda: load_type("site.models.Site"),
    "sites check": lambda: make_type(
        "SiteChecked",
        "What differs between a site file and the live cluster.",
        site=str,
        path=str,
        ok=bool,
        findings=make_list(load_type("discovery.compare.SiteFinding")),
    ),
    "sites init": lambda: make_type(
        "SiteDraft",
        "A site file made from the live cluster.",
        name=str,
        path=str,
        written=bool,
        site=dict[str, Any],
        origins=dict[str, str],
        left_out=dict[str, str],  # partition -> why
        facts=TEXTS,
        questions=make_list(load_type("discovery.partitions.Question")),
    ),
    "cloud check": lambda: load_type("cloud.check.Report"),
    "sandbox up": lambda: load_type("sandbox.Sandbox"),
    "sandbox status": lambda: load_type("sandbox.Status"),
}
"""Verb, with the option that changes its output -> the type of its output."""


ERROR = "error"
"""In place of a verb: the document that a failing command prints."""


@cache
def output_type(verb: str) -> Any:
    """Return the type of the output of ``hpcjobs VERB --json``."""
    return _error_type() if verb == ERROR else OUTPUTS[verb]()


def _error_type() -> Any:
    error = make_type(
        "CommandError",
        "Why a command failed. ``maybe_taken``: the scheduler may have accepted the job, although it did not answer.",
        exit_code=int,
        message=str,
        hint=str | None,
        maybe_taken=bool,
    )
    return make_type("Failed", "Printed by a command that fails before it has printed its output.", error=error)


def schema(verb: str) -> dict[str, Any]:
    """Return the JSON Schema of the output of ``hpcjobs VERB --json``."""
    return msgspec.json.schema(output_type(verb))


def print_as(verb: str, value: object) -> None:
    """Print ``value`` as ``hpcjobs VERB --json`` does."""
    print_json(_convert(value, output_type(verb)))


def _convert(value: Any, kind: Any) -> Any:
    """Return ``value`` for the encoder: documents as mappings of their fields, moments as times."""
    origin, arguments = get_origin(kind), get_args(kind)
    if value is None or kind is Any:
        return value
    if origin in (Union, UnionType):
        kinds = [one for one in arguments if one is not type(None)]
        return _convert(value, kinds[0]) if len(kinds) == 1 else value
    if kind == Time:
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


_INTRODUCTION = """\
# What `--json` prints

After reading this page you can use the output of any command in a program.

This page is made from the types in `hpcjobs/cli/json_output.py`; tests compare it, and the output of each command, with
these types. Times are ISO 8601 in UTC, durations are seconds (`_s`), sizes are bytes (`_bytes`), and `null` means "not
known". The id of a job is always `job_id`, its run folder `run_dir`, its site `site`. Fields may be added; no field
changes its meaning. Standard output has only the JSON: notes and warnings go to standard error, and the exit code is
that of the command. `wait --timeout` prints the records also if the time is over.

A command that fails before it has its output prints [Failed](#failed) instead, an object whose only key is `error`:
standard output is one JSON document in any case. A failed job is no error of `wait`: it prints the records and ends
with the job's exit code; `submit --wait` prints [JobSubmitted](#jobsubmitted). Nor is the answer no of a verb that
checks, such as `where` and `sites check`: it prints its output, and its exit code is not 0.
"""
_OF_OTHER_PAGES = ("Job", "Resources", "Site", "Partition")
"""Values that other pages explain: job requests and site files."""


def json_page() -> str:
    """The text of docs/json.md, from the types of the outputs."""
    schemas = {verb: schema(verb) for verb in OUTPUTS}
    values: dict[str, Any] = {}
    for one in (*schemas.values(), schema(ERROR)):
        values |= one.get("$defs", {})
    rows = "".join(f"| {_command(verb)} | {_type(one)} |\n" for verb, one in schemas.items())
    sections = "".join(_section(name, values[name]) for name in sorted(values) if "enum" not in values[name])
    return f"{_INTRODUCTION}\n| command | prints |\n|---|---|\n{rows}\n## Values\n{sections}"


def _command(verb: str) -> str:
    arguments, comma, case = verb.partition(", ")
    return f"`hpcjobs {arguments} --json`{comma}{case}"


def _section(name: str, value: dict[str, Any]) -> str:
    text = " ".join(value.get("description", "").split()).replace("``", "`")
    if name in _OF_OTHER_PAGES:
        return f"\n### {name}\n\n{text}\n\n[Keys of site files](site_keys.md), [options of jobs](sbatch_options.md).\n"
    if "prefixItems" in value:
        return f"\n### {name}\n\n{text}\n\nA {_type(value)}.\n"
    rows = "".join(f"| `{field}` | {_type(kind)} |\n" for field, kind in value["properties"].items())
    return f"\n### {name}\n\n{text}\n\n| field | type |\n|---|---|\n{rows}"


def _type(kind: dict[str, Any]) -> str:
    """The type in words: ``list of [JobLine](#jobline)``."""
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return "text" if name in ("State", "Kind") else f"[{name}](#{name.lower()})"
    if "anyOf" in kind:
        return " or ".join(dict.fromkeys(map(_type, kind["anyOf"])))
    if "enum" in kind:
        return " or ".join(f"`{value}`" for value in kind["enum"])
    if kind.get("format") == "date-time":
        return "time"
    if "prefixItems" in kind:
        return f"list of {' or '.join(dict.fromkeys(map(_type, kind['prefixItems'])))}"
    if kind.get("type") == "array":
        return f"list of {_type(kind.get('items') or {})}"
    if kind.get("type") == "object":
        return f"mapping to {_type(kind.get('additionalProperties') or {})}"
    names = {
        "string": "text",
        "integer": "whole number",
        "number": "number",
        "boolean": "true or false",
        "null": "null",
    }
    return names.get(kind.get("type", ""), "any value")
