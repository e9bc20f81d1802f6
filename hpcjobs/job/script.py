"""A settled job rendered to ``job.sh`` by a Jinja template."""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jinja2
from msgspec.structs import replace

from hpcjobs import __version__
from hpcjobs.data import shipped
from hpcjobs.errors import ConfigError, HpcJobsError, RequestError, nearest
from hpcjobs.files import cache_dir, config_dir
from hpcjobs.job.directives import sbatch_options
from hpcjobs.job.launch import Raw, command_line, gpus_of_node, launch, launched_by
from hpcjobs.job.models import Job
from hpcjobs.runtime.exits import ExitCode
from hpcjobs.site.retries import WARNING_S
from hpcjobs.templating import plain_text

SUFFIX = ".sh.j2"


def template_folders() -> tuple[Path, ...]:
    """Folders searched for ``NAME.sh.j2``; a template extends the shipped one as ``shipped/job.sh.j2``."""
    return (Path.cwd() / "templates", config_dir() / "templates", shipped("templates"))


def render(job: Job, run_dir: Path, *, made_by: str, by_hand: bool = False) -> str:
    """The text of ``job.sh``: what sbatch gets and what an admin reads.

    ``made_by`` is the command the header names. ``by_hand`` is the text that a user can give to sbatch without hpcjobs:
    it makes its run folder, and its log is a file of the folder where sbatch is called, since Slurm starts no job whose
    log has no folder.

    Raises:
        ConfigError: no such template, or it uses a name nobody defined.
        RequestError: a value that no ``#SBATCH`` line can hold.
    """
    with _explained(job):
        template = _environment().get_template(f"{job.template}{SUFFIX}")
        context = _context(job, run_dir, made_by=made_by, template=template.filename or job.template)
        context["by_hand"] = by_hand and job.scheduler == "slurm"
        if context["by_hand"]:
            context["header"] = [*_header(job, made_by, template.filename or job.template), *_header_by_hand(job)]
        context["directives"] = _directive_lines(job, None if context["by_hand"] else run_dir)
        return template.render(context)


def setup_text(job: Job, run_dir: Path, *, made_by: str) -> str:
    """What ``job.sh`` does on the node before it starts a task: for who starts the tasks by other means.

    It reads the shell variables ``job_id`` and ``run_dir``.
    """
    with _explained(job):
        template = _environment().get_template(f"{job.template}{SUFFIX}")
        context = _context(job, run_dir, made_by=made_by, template=job.template) | {"launched_by": made_by}
        return "".join(
            text
            for name in ("die", "steps", "prologue", "told")
            for text in template.blocks[name](template.new_context(context))
        )


def _context(job: Job, run_dir: Path, *, made_by: str, template: str) -> dict[str, object]:
    started = launch(job)
    inside = job.container
    return {
        "job": job,
        "header": _header(job, made_by, template),
        "run_dir": str(run_dir),
        "by_hand": False,
        "files_of_submit": files_of_submit(job),
        "chdir": str(run_dir / "code") if job.snapshot else job.chdir,
        "warning_s": job.signal_before_s or WARNING_S,
        "node_python": job.node_python,
        "requeue_code": int(ExitCode.REQUEUE),
        "container_code": int(ExitCode.CONTAINER),
        "inside": None if inside is None or inside.runtime == "pyxis" else inside,
        "first_words": command_line(_first_words(job)),
        "gpus_of_node": gpus_of_node(job),
        "launch": started,
        "launched_by": launched_by(job),
        "launch_line": command_line(started.command),
        "launch_line_of": lambda words: command_line(launch(replace(job, argv=(Raw(words),))).command),
    }


def _first_words(job: Job) -> tuple[str, ...]:
    """What is run in the image once, before any task: a start that fails fails once, and early."""
    if job.argv[0] != job.python:
        return ("sh", "-c", ":")
    old = "the image's Python is older than 3.10"
    return (job.python, "-c", f"import sys; sys.exit(sys.version_info < (3, 10) and {old!r})")


@contextmanager
def _explained(job: Job) -> Iterator[None]:
    """Turn what jinja2 raises into errors that name the template and its line."""
    try:
        yield
    except jinja2.TemplateNotFound as error:
        known = {p.name.removesuffix(SUFFIX) for folder in template_folders() for p in folder.glob(f"*{SUFFIX}")}
        raise ConfigError(f"no template {error.name!r}", hint=nearest(job.template, known)) from error
    except jinja2.TemplateError as error:
        raise ConfigError(f"template {_where(error) or job.template}: {error}") from error
    except RecursionError as error:
        raise ConfigError(
            f"template {_where(error) or job.template} extends itself",
            hint=f"the shipped one is reached as shipped/job{SUFFIX}",
        ) from error
    except HpcJobsError:
        raise
    except Exception as error:  # a template may raise anything: 1/0, len(1), range(10**9)
        where = _where(error)
        if where is None:
            raise
        raise ConfigError(f"template {where}: {type(error).__name__}: {error}") from error


def _where(error: Exception) -> str | None:
    """File and line of the template at fault; jinja2 puts its lines into tracebacks."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(SUFFIX)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def _environment() -> jinja2.Environment:
    """The compiled templates are kept between runs: compiling costs more than everything else here."""
    folders = jinja2.FileSystemLoader([str(folder) for folder in template_folders()])
    only_shipped = jinja2.PrefixLoader({"shipped": jinja2.FileSystemLoader(str(shipped("templates")))})
    return plain_text(jinja2.ChoiceLoader([only_shipped, folders]), bytecode_cache=_bytecode_cache())


def _bytecode_cache() -> jinja2.BytecodeCache | None:
    folder = cache_dir() / "sandboxed-templates"  # compiled for no other environment
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None  # a home that cannot be written costs time, not the job
    return jinja2.FileSystemBytecodeCache(str(folder))


def _header(job: Job, made_by: str, template: str) -> list[str]:
    lines = [f"hpcjobs {__version__}", f"site {job.site} ({job.site_file})", f"template {template}"]
    if job.rehearsal:
        lines.append("rehearsal: the sandbox on this machine plays the site, with this machine's software")
    lines.append(f"made by: {made_by}")
    lines += [f"leaves out {node}: {why}" for node, why in job.left_out.items()]
    return [re.sub(r"[\x00-\x1f\x7f]", "?", line) for line in lines]


def files_of_submit(job: Job) -> tuple[str, ...]:
    """What ``hpcjobs submit`` puts into the run folder and the script needs there, by name."""
    return (*(("node.pyz",) if job.retries else ()), *(("code",) if job.snapshot else ()))


def _header_by_hand(job: Job) -> list[str]:
    if needed := files_of_submit(job):
        return [f"not for sbatch by hand: hpcjobs submit puts {' and '.join(needed)} into the run folder"]
    log = _LOGS[bool(job.resources.array)]
    return [f"by hand: sbatch FILE, in a folder that all nodes see; the log is {log} there"]


_LOGS = ("%x_%j.out", "%x_%A_%a.out")
"""Names of the log of a job and of a task of an array, as sbatch writes them."""


def _directive_lines(job: Job, run_dir: Path | None) -> list[str]:
    """The ``#SBATCH`` options, quoted as sbatch reads them; a local job has none.

    Without ``run_dir`` the log goes to the folder where sbatch is called.
    """
    if job.scheduler == "local":
        return []
    log = _LOGS[bool(job.resources.array)]
    output = log if run_dir is None else f"{_literal(str(run_dir))}/logs/{log}"
    options = [("job-name", job.name), *sbatch_options(job), ("output", output)]
    return [_directive(name, value) for name, value in options]


def _literal(path: str) -> str:
    """``path`` for --output, where ``%`` starts a replacement symbol."""
    return path.replace("%", "%%")


def _directive(name: str, value: str | None) -> str:
    text = name if value is None else f"{name}={value}"
    if any(ord(c) < 32 for c in text) or "\\" in text:
        raise RequestError(
            f"--{text!r}: an #SBATCH line can hold neither newlines nor backslashes",
            hint="choose another folder or value",
        )
    return name if value is None else f"{name}={shlex.quote(value)}"
