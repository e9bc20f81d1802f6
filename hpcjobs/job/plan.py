"""Plans: everything that would be submitted, and the notes that the user sees before."""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hpcjobs import slurm_commands
from hpcjobs.data import data_folder
from hpcjobs.errors import HpcJobsWarning, RequestError
from hpcjobs.files import file_name
from hpcjobs.job.batch import batch_layers
from hpcjobs.job.environment import OTHER_ENVIRONMENTS, find_private_installer
from hpcjobs.job.fault_tolerance import avoided_on
from hpcjobs.job.layers import checked_spec, make_spec, user_settings
from hpcjobs.job.limits import DoesNotFitError, with_policies
from hpcjobs.job.models import Job, JobSpec, Layer, Plan
from hpcjobs.job.program import TRAINER_MODULE, is_importable, misspelt_name, options_of_submit
from hpcjobs.job.project import split_programs, with_project
from hpcjobs.job.resolve import resolve
from hpcjobs.job.script import SUFFIX, render, template_folders
from hpcjobs.site.library import default_site, known_sites, load_site
from hpcjobs.site.models import Site
from hpcjobs.site.resources import LocalEffect, fields_where
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
    """Return the submission of ``request`` to ``site``; writes no files.

    ``plan(JobSpec(program=("train.py",), resources=Resources(nodes=4)), site)`` and
    ``plan("train.py", site, nodes=4)`` are the same.

    Args:
        request: a `JobSpec`; or a program (a bundled trainer's name, a dotted module, a ``.py`` file or an executable)
            and its arguments, where one text is split like a shell line; or the name of a job of the project file, or
            an empty one for its only job.
        site: a site, its name, or the path of its file; default HPCJOBS_SITE, then the project file's, then the
            user's config, then ``local``.
        spec: a `JobSpec` in a YAML file, or as layers; ``request`` and ``options`` win over it.
        made_by: the command named in the script's header.
        allow_untrusted: also by a site file or template of a repository that is not trusted; such a plan cannot be
            submitted.
        options: fields of `JobSpec` (``retries="on"``) and of `Resources`, which are sbatch's long options with
            underscores (``nodes=4``, ``time="2h"``); they win over ``request``.

    Raises ConfigError: a file is wrong. RequestError: an option is wrong, or the job does not fit the site.
    """
    if spec is None:
        named = with_project(request if isinstance(request, JobSpec) else make_spec(request, {}))
        if named.layers:
            request, spec = named.request, named.layers
    if not isinstance(site, Site):
        site = load_site(site or default_site(), allow_untrusted=allow_untrusted)
    try:
        job = resolve_request(request, site, spec=spec or (), settings_of="sbatch", **options)
    except DoesNotFitError as error:
        others = _find_sites_that_take(request, spec or (), site, options) if error.hint is None else []
        error.hint = error.hint or (f"takes it: {', '.join(f'--site {name}' for name in others)}" if others else None)
        raise
    arguments = request.program if isinstance(request, JobSpec) else make_spec(request, {}).program
    made_by = made_by or shlex.join(["hpcjobs.plan:", *arguments])
    return plan_of(job, run_dir_of(job), made_by=made_by, allow_untrusted=allow_untrusted)


def _find_sites_that_take(
    request: JobSpec | str | Sequence[str],
    spec: Layer | Sequence[Layer] | str | Path,
    refused: Site,
    options: Mapping[str, Any],
) -> list[str]:
    names = []
    for site in known_sites():
        if site.name != refused.name and site.scheduler == refused.scheduler:
            with suppress(RequestError):
                resolve_request(request, site, spec=spec, **options)
                names.append(site.name)
    return names


def resolve_request(
    request: JobSpec | str | Sequence[str],
    site: Site | str | None = None,
    *,
    spec: Layer | Sequence[Layer] | str | Path = (),
    settings_of: str = "sbatch",
    **options: object,
) -> Job:
    """Return the job that `plan` would render from the same arguments.

    ``settings_of`` is the command that gives its name to variables of the environment.
    """
    where = site if isinstance(site, Site) else load_site(site or default_site())
    layers = read_layers(spec)
    if isinstance(request, JobSpec):
        layers.append(Layer("flag", checked_spec(request)))
        request = ()
    layers.append(Layer("flag", make_spec(request, options)))
    slurm = where.kind.takes_sbatch_options
    settings = user_settings(os.environ, command=settings_of, rehearsal=where.rehearsal) if slurm else ()
    return resolve([*batch_layers(layers), *settings, *layers], where, avoid=avoided_on(where.name) if slurm else {})


def read_layers(spec: Layer | Sequence[Layer] | str | Path) -> list[Layer]:
    """Return the layers of ``spec``; a path names a spec file."""
    if isinstance(spec, str | Path):
        return [Layer(str(spec), read_yaml(Path(spec), JobSpec, what="spec file", prepare=split_programs))]
    return [spec] if isinstance(spec, Layer) else list(spec)


def plan_of(job: Job, run_dir: Path, *, made_by: str, allow_untrusted: bool = False) -> Plan:
    """Return the submission of ``job`` with this run folder; ``allow_untrusted`` as in `plan`.

    Raises RequestError: a policy of the centre refuses it.
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
    return tuple(slurm_commands.submit(script)) if job.kind.takes_sbatch_options else ("bash", script)


_LAUNCHERS = frozenset(("srun", "salloc", "sbatch", "mpirun", "mpiexec", "torchrun", "accelerate", "deepspeed"))
_LETTERS_OF_SLURM = frozenset(("-N", "-G"))
_OF_MANY = frozenset(
    (
        *("--name", "--env", "--time", "--json", "--output", "--comment", "--profile", "--wait", "--follow", "--site"),
        *("--exclude", "--exclusive", "--network", "--power", "--priority", "--signal", "--prefer", "--spec"),
    )
)
"""Options of submit that many a program has too, which may be written in any language."""


def notes(job: Job) -> Iterator[str]:
    """One line each: options without effect, nodes left out, a template in a shipped one's place, a missing command."""
    if not job.kind.takes_sbatch_options and (
        without_effect := [job.describe_option(field) for field in _unused_locally(job)]
    ):
        yield f"{', '.join(without_effect)}: no effect on site {job.site}, which is this machine alone"
    yield from job.messages
    for node, why in job.left_out.items():
        yield f"leaves out {node}: {why}; hpcjobs nodes --clear {node} forgets it"
    yield from _options_of_script(job)
    yield from _python_of_hpcjobs(job)
    yield from _own_checkpoints(job)
    for arg, _ in _options_after_program(job):
        yield f"warning: {arg} comes after the program, which gets it; options of submit come before the program"
    if (path := _shadowing_template(job.template)) is not None:
        yield f"template {path} is used in place of the one that comes with hpcjobs"
    if (meant := misspelt_name(job.argv[0])) is not None:
        yield f"no command {job.argv[0]!r} on this machine; the nodes must have it ({meant})"


def _unused_locally(job: Job) -> list[str]:
    """Options of the user that a local job does without; a partition that the site file has gives it defaults."""
    noted = fields_where("local", LocalEffect.NOTED)
    given = [field for field in noted if getattr(job.resources, field) not in (None, False)]
    used = any(source.startswith("partition ") for source in job.sources.values())
    of_user = [field for field in given if not job.sources.get(field, "site").startswith(("site", "partition "))]
    return [field for field in of_user if field != "partition" or not used]


def _options_of_script(job: Job) -> Iterator[str]:
    """Yield options of a batch script that hpcjobs treats differently."""
    if job.batch_script is None:
        return
    for field in ("output", "error"):
        if field in job.sources:
            yield f"--{field} ({job.sources[field]}) is left out: `hpcjobs logs` prints the output, of the run folder"


def _python_of_hpcjobs(job: Job) -> Iterator[str]:
    """Yield packages missing for a Python program that runs in hpcjobs' environment because no other is named."""
    is_ours = job.python == sys.executable and job.argv[0] == job.python and job.container is None
    if not is_ours or job.prologue or job.batch_script is not None:
        return
    lacks = [name for name in _find_imports(job) if not is_importable(name, _folder_of_program(job))]
    installer = find_private_installer(job.python)
    if not lacks and installer is None:
        return
    made = f", which {installer} made for hpcjobs alone" if installer else ""
    without = f"; {job.name} imports {', '.join(lacks)}, which it lacks" if lacks else ""
    extra = "" if "torch" not in lacks or installer else "; `pip install 'hpcjobs[train]'` adds torch to this one"
    yield (
        f"{'warning: ' if lacks else ''}the job runs with {job.python}{made}{without}. "
        f"{OTHER_ENVIRONMENTS} names another; or use --container IMAGE{extra}"
    )


def _find_imports(job: Job) -> list[str]:
    """Return the imports that a program needs at its start, from its first statements."""
    if any(arg.startswith(TRAINER_MODULE) for arg in job.argv[1:5]):
        return ["torch"]
    try:
        statements = ast.parse(_source(job) or "").body
    except (SyntaxError, ValueError):
        return []  # the program reports the error itself
    names = [alias.name for each in statements if isinstance(each, ast.Import) for alias in each.names]
    names += [each.module for each in statements if isinstance(each, ast.ImportFrom) and each.module and not each.level]
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _folder_of_program(job: Job) -> Path:
    """Return the folder of modules that the program can import."""
    file = job.argv[2] if len(job.argv) > 2 and job.argv[2].endswith(".py") else "."
    return Path(job.chdir, file).parent if file != "." else Path(job.chdir)


def _own_checkpoints(job: Job) -> Iterator[str]:
    """A script that is started again and does not use hpcjobs, which would find its last checkpoint."""
    if job.retries is None:
        return
    text = _source(job) if job.batch_script is None else job.batch_script.decode(errors="replace")
    if text is not None and "hpcjobs" not in text:
        yield (
            f"retries start {job.name} again with the same arguments: it must find its last checkpoint itself "
            "(`hpcjobs help own_scripts`)"
        )


def refuse_options_after_program(job: Job) -> None:
    """Refuse options of submit among the arguments of a file that has none of these names: the job would lack them.

    Raises RequestError: there are some, and the request does not say ``no_check``.
    """
    if any(layer.spec.no_check for layer in job.layers):
        return
    if typed := [arg for arg, is_file in _options_after_program(job) if is_file]:
        raise RequestError(
            f"{' '.join(typed)} after the program: the program, which would get it, does not have it",
            hint="options of hpcjobs come before the program; --no-check submits the command as it is",
        )


def _options_after_program(job: Job) -> Iterator[tuple[str, bool]]:
    """Options of submit among the arguments of a program that does not seem to have them.

    With each, whether the program is a file that was searched for the option, and leaves its arguments to a parser.
    """
    if job.argv[0] in _LAUNCHERS:
        return
    arguments = job.argv[1:]
    of_submit = options_of_submit() | _LETTERS_OF_SLURM
    typed = [arg for arg in arguments if arg.startswith("-") and arg.partition("=")[0] in of_submit]
    if not typed or any(arg.startswith("hpcjobs.trainers.") for arg in arguments[:4]):  # those were checked
        return
    text = _source(job) if job.batch_script is None else _source_of_batch(job.batch_script)
    for arg in typed:
        name = arg.partition("=")[0]
        common = _OF_MANY if job.argv[0] == job.python and job.batch_script is None else _OF_MANY | _LETTERS_OF_SLURM
        unknown = name not in common if text is None else not _mentions(text, name)
        if unknown:
            yield arg, text is not None and "argv" not in text


def _source(job: Job) -> str | None:
    """The text of a program that is one file of Python; None: another kind of program."""
    python, *args = job.argv
    file = Path(job.chdir, args[1]) if python == job.python and len(args) > 1 else None
    if file is None or file.suffix != ".py" or not file.is_file():
        return None
    return file.read_text(encoding="utf-8", errors="replace")


def _source_of_batch(script: bytes) -> str | None:
    """The text of a batch script without its #SBATCH lines; None: it hands its arguments on to another program."""
    text = script.decode(errors="replace")
    if "$@" in text or "$*" in text:
        return None
    return "\n".join(line for line in text.splitlines() if not line.startswith("#SBATCH"))


def _mentions(text: str, option: str) -> bool:
    """Whether a program seems to have the option: by its text, or, as Fire does it, by a parameter's name."""
    if not option.startswith("--"):
        return f'"{option}"' in text or f"'{option}'" in text
    return option in text or re.search(rf"\b{option[2:].replace('-', '_')}\s*[:=]", text) is not None


def _shadowing_template(name: str) -> Path | None:
    """The user's own template of a name that hpcjobs ships too; a checkout of hpcjobs has the shipped ones itself."""
    files = [folder / f"{name}{SUFFIX}" for folder in template_folders()]
    if not (data_folder("templates") / f"{name}{SUFFIX}").is_file():
        return None
    used = next(path for path in files if path.is_file())
    return None if used.samefile(files[-1]) else used
