"""Plans from a request exactly what will be written and run, without changing anything."""

from __future__ import annotations

import os
import shlex
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hpcjobs.errors import HpcJobsWarning
from hpcjobs.files import file_name
from hpcjobs.job.batch import batch_layers
from hpcjobs.job.fault_tolerance import avoided_on
from hpcjobs.job.layers import user_settings
from hpcjobs.job.models import Job, JobSpec, Layer, Plan
from hpcjobs.job.policy import with_policies
from hpcjobs.job.project import split_programs, with_project
from hpcjobs.job.request import checked_spec, make_spec
from hpcjobs.job.resolve import resolve
from hpcjobs.job.script import render
from hpcjobs.site.library import default_site, load_site
from hpcjobs.site.models import Site
from hpcjobs.site.trust import refusal_of_file
from hpcjobs.site.yaml_file import read_yaml


def plan(
    request: JobSpec | str | Sequence[str] = (),
    site: Site | str | None = None,
    *,
    spec: Layer | Sequence[Layer] | str | Path | None = None,
    made_by: str | None = None,
    allow_untrusted: bool = False,
    **options: object,
) -> Plan:
    """What submitting ``request`` to ``site`` would write and run.

    ``plan(JobSpec(program=("train.py",), resources=Resources(nodes=4)), site)`` and
    ``plan("train.py", site, nodes=4)`` are the same.

    Args:
        request: a `JobSpec`; or a program (a bundled trainer's name, a dotted module, a ``.py`` file or an executable)
            and its arguments, where one text is split like a shell line; or the name of a job of the project file, or
            nothing for its only one.
        site: a site, its name, or the path of its file; default that of the project file, then HPCJOBS_SITE, then the
            user's config, then ``local``.
        spec: a `JobSpec` in a YAML file, or as layers; ``request`` and ``options`` win over it.
        made_by: the command named in the script's header.
        allow_untrusted: also by a site file or template of a repository that is not trusted; such a plan cannot be
            submitted.
        options: fields of `JobSpec` (``retries="on"``) and of `Resources`, which are sbatch's long options with
            underscores (``nodes=4``, ``time="2h"``); they win over ``request``.

    Raises:
        ConfigError: a file is wrong. RequestError: an option is wrong, or the job does not fit the site.
    """
    if spec is None:
        named = with_project(request if isinstance(request, JobSpec) else make_spec(request, {}))
        if named.layers:
            request, spec, site = named.request, named.layers, site or named.site
    if not isinstance(site, Site):
        site = load_site(site or default_site(), allow_untrusted=allow_untrusted)
    job = resolve_request(request, site, spec=spec or (), settings_of="sbatch", **options)
    arguments = request.program if isinstance(request, JobSpec) else make_spec(request, {}).program
    made_by = made_by or shlex.join(["hpcjobs.plan:", *arguments])
    return plan_of(job, run_dir_of(job), made_by=made_by, allow_untrusted=allow_untrusted)


def resolve_request(
    request: JobSpec | str | Sequence[str],
    site: Site | str | None = None,
    *,
    spec: Layer | Sequence[Layer] | str | Path = (),
    settings_of: str = "sbatch",
    **options: object,
) -> Job:
    """The job that `plan` would render, from the same arguments; nothing is rendered.

    ``settings_of`` is the command whose variables of the environment count.
    """
    where = site if isinstance(site, Site) else load_site(site or default_site())
    layers = _layers(spec)
    if isinstance(request, JobSpec):
        layers.append(Layer("flag", checked_spec(request)))
        request = ()
    layers.append(Layer("flag", make_spec(request, options)))
    slurm = where.scheduler == "slurm"
    settings = user_settings(os.environ, command=settings_of, rehearsal=where.rehearsal) if slurm else ()
    return resolve([*batch_layers(layers), *settings, *layers], where, avoid=avoided_on(where.name) if slurm else {})


def _layers(spec: Layer | Sequence[Layer] | str | Path) -> list[Layer]:
    if isinstance(spec, str | Path):
        return [Layer(str(spec), read_yaml(Path(spec), JobSpec, what="spec file", prepare=split_programs))]
    return [spec] if isinstance(spec, Layer) else list(spec)


def plan_of(job: Job, run_dir: Path, *, made_by: str, allow_untrusted: bool = False) -> Plan:
    """What submitting ``job`` with this run folder would write and run; ``allow_untrusted`` as in `plan`.

    Raises:
        RequestError: a policy of the centre refuses it.
    """
    job = with_policies(job)
    untrusted: list[Path] = []
    script = render(job, run_dir, made_by=made_by, untrusted=untrusted if allow_untrusted else None)
    for path in (templates := dict.fromkeys(untrusted)):
        warnings.warn(
            f"{refusal_of_file('template', path).message}\nnothing of it is run", HpcJobsWarning, stacklevel=2
        )
    if templates:
        job = replace(job, untrusted=(*job.untrusted, *map(str, templates)))
    return Plan(job, script, run_dir, _command(job, run_dir), made_by)


def script_by_hand(plan: Plan) -> str:
    """The plan's script as a user can give it to sbatch without hpcjobs; on a local site the plan's own."""
    return render(plan.job, plan.run_dir, made_by=plan.made_by, by_hand=True, untrusted=[])


def run_dir_of(job: Job) -> Path:
    """A new run folder: its name is of job name, local time, and eight random hex digits against collisions."""
    return Path(job.run_root) / f"{file_name(job.name)}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(4).hex()}"


def _command(job: Job, run_dir: Path) -> tuple[str, ...]:
    script = str(run_dir / "job.sh")
    return ("sbatch", "--parsable", script) if job.scheduler == "slurm" else ("bash", script)
