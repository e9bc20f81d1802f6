"""The project file ``hpcjobs.yaml``: the jobs of a folder by name, which `submit` runs without further words."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
from msgspec import to_builtins
from msgspec.structs import replace

from hpcjobs import trainers
from hpcjobs.errors import ConfigError, RequestError
from hpcjobs.job.batch import batch_layers
from hpcjobs.job.models import Flag, JobSpec, Layer
from hpcjobs.job.program import program_words
from hpcjobs.site.library import PROJECT_FILE, check_site_name, find_project, is_ours, project_jobs
from hpcjobs.site.trust import refusal_of_file
from hpcjobs.site.yaml_file import YamlFile, convert_tree, read_tree, read_yaml, words_of_switches

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z", re.ASCII)
"""Names of jobs have no dot and no slash: these begin files and modules."""


class Project(JobSpec, frozen=True):
    """A project file: the keys of a spec file for its job, or for all of `jobs`."""

    site: str | None = None
    """Name of the site where its jobs run [the default site]."""
    jobs: dict[str, JobSpec] = {}
    """Further jobs by name, each with the keys of a spec file; keys outside `jobs` apply to them too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.site is not None:
            check_site_name(self.site)
        for name in self.jobs:
            if not _NAME.match(name):
                raise ValueError(f"job {name!r}: a name has letters, digits, _ and -, and begins with a letter")
            if name in trainers.NAMES:
                raise ValueError(f"job {name!r}: a bundled trainer has this name; choose another one")


class Requested(NamedTuple):
    """A request, and the layers of the project file below it."""

    request: JobSpec
    layers: tuple[Layer, ...] = ()
    """Lowest first; empty: the request already has a program."""


def read_project(path: Path) -> Project:
    """The project file ``path``.

    Raises ConfigError: the file is wrong, or another user owns it and it is not trusted.
    """
    if not is_ours(path):
        raise refusal_of_file("project file", path)
    return read_yaml(path, Project, prepare=split_programs)


def split_programs(tree: Any) -> Any:
    """Return ``tree`` of a spec or project file with each ``program`` as a list; text is split like a shell line.

    YAML reads ``retries: on`` as true.
    """
    if not isinstance(tree, Mapping):
        return tree
    split = words_of_switches(tree)
    if isinstance(program := split.get("program"), str):
        split["program"] = program_words(program)
    if isinstance(jobs := split.get("jobs"), Mapping):
        split["jobs"] = {name: _split_programs_of(name, job) for name, job in jobs.items()}
    return split


def _split_programs_of(name: object, job: Any) -> Any:
    try:
        return split_programs(job)
    except RequestError as error:
        raise RequestError(f"job {name!r} of {PROJECT_FILE}: {error.message}", hint=error.hint) from error


def with_project(request: JobSpec) -> Requested:
    """Find the job of the project file that ``request`` names in place of a program, or its only job.

    Arguments after the name are appended to the job's program.

    Raises ConfigError: the project file is wrong. RequestError: it has several jobs, and none is named.
    """
    name, *arguments = request.program or (None,)
    if request.wrap is not None or name in trainers.NAMES or (name is not None and not _NAME.match(name)):
        return Requested(request)
    if (path := find_project()) is None:
        return Requested(request)
    if name is not None and not is_ours(path) and not _names_job(path, name):
        return Requested(request)
    project = read_project(path)
    if name is not None and name not in project.jobs:
        return Requested(request)
    if name is None and not project.program and project.wrap is None:
        name = _only_job(project, path)
    layers = _layers_of(project, name, path)
    program = next((layer.spec.program for layer in reversed(layers) if layer.spec.program), ())
    return Requested(replace(request, program=(*program, *arguments) if arguments else ()), layers)


def layers_of_text(text: str, path: Path) -> tuple[Layer, ...]:
    """The layers of the job at the top of a project file ``path`` that has the content ``text``.

    Raises ConfigError: the text is wrong.
    """
    tree = read_tree(path, text)
    return _layers_of(convert_tree(split_programs(tree), Project, [YamlFile(path, text, tree)]), None, path)


def _layers_of(project: Project, name: str | None, path: Path) -> tuple[Layer, ...]:
    """The keys for all jobs, and those of the job ``name``."""
    source = PROJECT_FILE if path.parent == Path.cwd() else str(path)
    shared = {field: getattr(project, field) for field in JobSpec.__struct_fields__}
    shared["chdir"] = project.chdir or (None if path.parent == Path.cwd() else ".")
    layers = [Layer(source, _in_folder(JobSpec(**shared), path.parent))]
    if name is not None:
        job = project.jobs[name]
        layers.append(Layer(f"{source}: {name}", _in_folder(replace(job, name=job.name or name), path.parent)))
    return tuple(layers)


def refuse_job_name(program: Sequence[str]) -> None:
    """Refuse the name of a job of the project file, for verbs that take a program alone.

    Raises RequestError: ``program`` is one, and no command of this machine.
    """
    if program and program[0] in project_jobs(Path.cwd()) and shutil.which(program[0]) is None:
        raise RequestError(
            f"program {program[0]}: it is a job of {PROJECT_FILE}, which only submit and where take by its name",
            hint="write the job's program and options here; --no-check takes it as a command of the nodes",
        )


def _names_job(path: Path, name: str) -> bool:
    """Whether the project file of another user can be read and has a job of that name."""
    with suppress(ConfigError):
        return name in read_yaml(path, Project, prepare=split_programs).jobs
    return False


def _only_job(project: Project, path: Path) -> str:
    if len(project.jobs) == 1:
        return next(iter(project.jobs))
    if project.jobs:
        raise RequestError(
            f"{path} has the jobs {', '.join(project.jobs)}", hint="hpcjobs submit NAME runs one of them"
        )
    raise RequestError(f"{path} names no program", hint="write `program: train.py` there")


def _in_folder(spec: JobSpec, folder: Path) -> JobSpec:
    """``spec`` with paths from the project's folder on, from wherever it is submitted."""
    image, chdir = spec.container, spec.chdir
    if image is not None and os.path.isfile(folder / image):
        image = str(folder / image)
    if chdir is not None:
        chdir = str(folder / Path(chdir).expanduser())
    return replace(spec, chdir=chdir, container=image)


def project_text(request: JobSpec, site: str | None = None) -> str:
    """Write a project file for ``request``, with the options of its program's ``#SBATCH`` lines.

    Options that are passed to sbatch unread stay in the script, which is read again at each submission.

    Raises RequestError: a line of the script is not an option of sbatch.
    """
    of_script = [replace(layer.spec, sbatch=()) for layer in batch_layers([Layer("flag", request)])]
    specs = [*of_script, request]
    stated = [{key: value for key, value in to_builtins(spec).items() if value} for spec in specs]
    resources = {key: value for keys in stated for key, value in keys.get("resources", {}).items()}
    keys = {"site": site, "program": shlex.join(request.program)} | {k: v for own in stated for k, v in own.items()}
    keys |= {"program": shlex.join(request.program), "resources": resources}
    import yaml

    body: str = yaml.safe_dump({k: v for k, v in keys.items() if v}, sort_keys=False, allow_unicode=True, width=10**9)
    return f"# The job that `hpcjobs submit` runs in this folder. Options of submit override these values.\n{body}"


def schema_text() -> str:
    """JSON Schema (2020-12) of a project file."""
    schema = msgspec.json.schema(Project)
    helps = {
        field: parts[-1].help
        for field, hint in get_type_hints(JobSpec, include_extras=True).items()
        if (parts := get_args(hint)) and isinstance(parts[-1], Flag)
    }
    for definition in (schema["$defs"]["Project"], schema["$defs"]["JobSpec"]):
        properties = definition["properties"]
        properties["program"] = {"anyOf": [{"type": "string"}, properties["program"]]}
        for field, text in helps.items():
            properties[field]["description"] = text
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "hpcjobs project file"}
    return msgspec.json.format(msgspec.json.encode(head | schema), indent=2).decode() + "\n"
