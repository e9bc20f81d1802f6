"""From a request to exactly what will be written and run, touching nothing."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hpcjobs.errors import RequestError, nearest
from hpcjobs.job.avoid import avoided_on
from hpcjobs.job.models import Job, JobSpec, Layer, Plan
from hpcjobs.job.program import program_words
from hpcjobs.job.resolve import resolve
from hpcjobs.job.script import render
from hpcjobs.job.settings import user_settings
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Resources, Site
from hpcjobs.site.type_errors import in_plain_words
from hpcjobs.site.yaml_file import read_yaml


def plan(
    program: str | Sequence[str] = (),
    *,
    site: str | Site | None = None,
    spec: str | Path | Layer | None = None,
    name: str | None = None,
    launcher: str | None = None,
    env: Mapping[str, str] | None = None,
    template: str | None = None,
    chdir: str | Path | None = None,
    snapshot: bool | None = None,
    retries: str | None = None,
    signal_before: str | None = None,
    preflight: bool | None = None,
    spare: int | None = None,
    min_nodes: int | None = None,
    container: str | None = None,
    stage_image: bool | None = None,
    made_by: str | None = None,
    **resources: object,
) -> Plan:
    """What submitting ``program`` to ``site`` would write and run.

    Args:
        program: a bundled trainer's name, a dotted module, a ``.py`` file or an executable, then its arguments;
            one text is split like a shell line.
        site: a site, its name, or the path of its file; default HPCJOBS_SITE, then the user's config, then ``local``.
        spec: a `JobSpec`, in a YAML file or as a layer; what is said here wins over it.
        chdir: folder the tasks start in; default the current one.
        snapshot: copy the code beside the job and run the copy.
        retries: how often to start again, by what ended it: ``timeout=∞,preempt=∞,node=3,error=0``, ``on``, ``off``.
        signal_before: signals the program this long before its time limit (``5m``); default from what it measures.
        preflight: look at the nodes before the program starts, and stop with the name of a bad one.
        spare: ask for so many nodes more, and start on the best ones.
        min_nodes: go on with so few nodes while others have failed, within the allocation.
        container: image of the site by name, or by path; ``none``: in no image, whatever the site's default.
        stage_image: copy the image to each node before the tasks start.
        made_by: the command named in the script's header.
        resources: sbatch options by their long names with underscores (``nodes=4``, ``time="2h"``).

    Raises:
        ConfigError: a file is wrong. RequestError: the job does not fit the site.
    """
    if not isinstance(env, Mapping | None):
        raise RequestError(f"env is a mapping from names to values, not {env!r}")
    words = program_words(program)
    fields: dict[str, object] = {
        "program": words,
        "resources": resources,
        "name": name,
        "launcher": launcher,
        "env": dict(env or {}),
        "template": template,
        "chdir": None if chdir is None else str(chdir),
        "snapshot": snapshot,
        "retries": retries,
        "signal_before": signal_before,
        "preflight": preflight,
        "spare": spare,
        "min_nodes": min_nodes,
        "container": container,
        "stage_image": stage_image,
    }
    job = resolve_fields(fields, site=site, spec=spec)
    return plan_of(job, Path(job.run_root) / run_name(job), made_by=made_by or shlex.join(["hpcjobs.plan:", *words]))


def resolve_fields(
    fields: Mapping[str, object], *, site: str | Site | None = None, spec: str | Path | Layer | None = None
) -> Job:
    """The job that `plan` would render, from the fields of a `JobSpec` (None: not said); nothing is rendered.

    Raises:
        ConfigError: a file is wrong. RequestError: the job does not fit the site.
    """
    where = site if isinstance(site, Site) else load_site(site or default_site())
    layers = (
        [] if spec is None else [spec if isinstance(spec, Layer) else Layer(str(spec), read_yaml(Path(spec), JobSpec))]
    )
    avoid = avoided_on(where.name) if where.scheduler == "slurm" else {}
    settings = user_settings(os.environ, rehearsal=where.rehearsal) if where.scheduler == "slurm" else ()
    return resolve([*settings, *layers, Layer("flag", _spec(fields))], where, avoid=avoid)


def plan_of(job: Job, run_dir: Path, *, made_by: str) -> Plan:
    """What submitting ``job`` with this run folder would write and run."""
    return Plan(job, render(job, run_dir, made_by=made_by), run_dir, _command(job, run_dir), made_by)


def script_by_hand(plan: Plan) -> str:
    """The plan's script as a user can give it to sbatch without hpcjobs; on a local site the plan's own."""
    return render(plan.job, plan.run_dir, made_by=plan.made_by, by_hand=True)


def _spec(fields: Mapping[str, object]) -> JobSpec:
    try:
        return msgspec.convert(fields, JobSpec, strict=False)
    except UnicodeEncodeError as error:  # of msgspec, about to quote a value
        raise RequestError(f"{error.object!r} is not UTF-8 text") from error
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`").removeprefix("resources").lstrip(".")
        plain = in_plain_words(message)
        raise RequestError(f"{field}: {plain}" if field else plain, hint=_hint(message, field)) from error


def _hint(message: str, field: str) -> str | None:
    """What to write instead, for an unknown option, or one without its value."""
    if field in Resources.__struct_fields__ and message.endswith("got `bool`"):
        return f"it takes a value: -o {field}=VALUE"
    return resource_hint(message)


def resource_hint(message: str) -> str | None:
    """For an unknown option: the nearest one and all there are."""
    if "unknown field" not in message:
        return None
    return nearest(message.split("`")[1], Resources.__struct_fields__)


def run_name(job: Job) -> str:
    """Name of a new run folder: job name, local time, and eight random hex digits against collisions."""
    return f"{job.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


def _command(job: Job, run_dir: Path) -> tuple[str, ...]:
    script = str(run_dir / "job.sh")
    return ("sbatch", "--parsable", script) if job.scheduler == "slurm" else ("bash", script)
