"""A resolved job as a script; checks the options that sbatch will read from it."""

from __future__ import annotations

import os
import re
import shlex
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jinja2
import msgspec
from jinja2.loaders import split_template_path
from msgspec.structs import replace

from hpcjobs import __version__
from hpcjobs.data import data_folder, plain_text
from hpcjobs.errors import ConfigError, HpcJobsError, RequestError, nearest, reason_of
from hpcjobs.files import cache_dir, config_dir, file_name, make_folder, read_regular
from hpcjobs.job.environment import (
    FIGURES_PROGRAM,
    MONITOR_PROGRAM,
    enter_options,
    export_lines,
    omp_threads,
    shell_files,
)
from hpcjobs.job.launch import Raw, command_line, entering, gpus_of_node, launch, launched_by, task
from hpcjobs.job.models import Job
from hpcjobs.job.options import MARKS_OF_OTHERS, sbatch_options
from hpcjobs.runtime.exits import ExitCode
from hpcjobs.site.models import WARNING_S
from hpcjobs.site.trust import is_project_folder, is_trusted, refusal_of_file


def check_script(script: str, job: Job) -> None:
    """Refuse a line of another scheduler, which sbatch reads wherever it stands.

    Raises RequestError: names the line.
    """
    for line in script.split("\n") if job.kind.takes_sbatch_options else ():
        if line.startswith(MARKS_OF_OTHERS):
            raise RequestError(
                f"the script has the line {line!r}, which sbatch reads as an option of the job",
                hint="it stands in the template, or in a value of several lines: change it there",
            )


SUFFIX = ".sh.j2"


def template_folders() -> tuple[Path, ...]:
    """Folders searched for ``NAME.sh.j2``; a template extends the shipped one as ``shipped/job.sh.j2``."""
    return (Path.cwd() / "templates", config_dir() / "templates", data_folder("templates"))


def project_templates() -> tuple[Path, ...]:
    """The templates of the current folder, which act only where they are trusted; none in a folder of the user's."""
    folder, *others = template_folders()
    return tuple(sorted(folder.glob(f"**/*{SUFFIX}"))) if is_project_folder(folder, *others) else ()


def is_template(path: Path) -> bool:
    """Whether ``path`` is a template by its name, or a file that one may include."""
    return path.name.endswith(SUFFIX) or "templates" in path.parts[:-1]


def read_template(path: Path) -> str:
    """Return the text of a template before rendering. Raises ConfigError: it cannot be read."""
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template {path}: cannot be read: {reason_of(error)}") from error


class _ProjectLoader(jinja2.BaseLoader):
    """Templates of the current folder, which may be anybody's.

    One that is not trusted is an error, or, where ``untrusted`` is a list, is added to it.
    """

    def __init__(self, folder: Path, untrusted: list[Path] | None) -> None:
        self._folder, self._untrusted = folder, untrusted

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool] | None]:
        path = self._folder.joinpath(*split_template_path(template))
        if not os.path.isfile(path):
            raise jinja2.TemplateNotFound(template)
        text = read_template(path)
        if not is_trusted(path, text):
            if self._untrusted is None:
                raise refusal_of_file("template", path)
            self._untrusted.append(path)
        return text, str(path), None


def render(job: Job, run_dir: Path, *, made_by: str, by_hand: bool = False, untrusted: list[Path] | None = None) -> str:
    """Return the text of ``job.sh``, for sbatch and for an administrator.

    ``made_by`` is the command the header names. ``by_hand`` is the text that a user can give to sbatch without hpcjobs:
    it makes its run folder with the shell files, and its log is a file of the folder where sbatch is called, since
    Slurm does not start a job if the folder of its log is missing.

    A template of the current folder that is not trusted is added to ``untrusted``, where that is a list.

    Raises ConfigError: no such template, it uses an undefined name, or is not trusted. RequestError: a value that no
    ``#SBATCH`` line can hold, or a line that the template may not have.
    """
    with _explain_errors(job):
        template = _environment(untrusted).get_template(f"{job.template}{SUFFIX}")
        origin = template.filename or job.template
        context = _context(job, run_dir)
        lines = {"header": _header(job, made_by, origin), "directives": _directive_lines(job, run_dir)}
        script = template.render(context | lines)
        check_script(script, job)
        if not by_hand or not job.kind.takes_sbatch_options:
            return script
        header = [*_header(job, made_by, origin), *_header_by_hand(job)]
        own = {"header": header, "directives": _directive_lines(job, None), "by_hand": True}
        return template.render(context | own | {"shell_texts": shell_files(script)})


def setup_text(job: Job, run_dir: Path, *, launched_by: str) -> str:
    """Return the set-up that ``job.sh`` does on the node before it starts a task, for tasks started by other means.

    It reads HPCJOBS_JOB_ID, HPCJOBS_RUN_DIR and HPCJOBS_SCHEDULER.
    """
    with _explain_errors(job):
        template = _environment().get_template(f"{job.template}{SUFFIX}")
        context = _context(job, run_dir) | {"exports": list(export_lines(job, launched_by=launched_by))}
        blocks = [
            text
            for name in ("steps", "prologue", "variables")
            for text in template.blocks[name](template.new_context(context))
        ]
    return shell_files("")["common.bash"] + "".join(blocks)


def _context(job: Job, run_dir: Path) -> dict[str, object]:
    started = launch(job)
    inside = None if job.container is None or job.container.runtime == "pyxis" else job.container
    cell = launch(replace(job, argv=(Raw('"$@"'),)))
    one_task = job.ntasks == 1 and job.launcher == "srun"
    return {
        "job": job,
        "run_dir": str(run_dir),
        "by_hand": False,
        "files_of_submit": files_of_submit(job),
        "chdir": str(run_dir / "code") if job.snapshot else job.chdir,
        "exports": list(export_lines(job, launched_by=launched_by(job))),
        "omp_threads": omp_threads(job),
        "step_tasks": job.nodes if job.launcher == "torchrun" else job.ntasks,
        "monitor_words": command_line((job.node_python, "-I", str(run_dir / MONITOR_PROGRAM))),
        "figures_words": command_line((job.node_python, "-I", str(run_dir / FIGURES_PROGRAM), *_figures_options(job))),
        "attempts_options": command_line(_attempts_options(job)) if job.retries else "",
        "notify_options": command_line(job.notify),
        "requeue_code": int(ExitCode.REQUEUE),
        "container_code": int(ExitCode.CONTAINER),
        "inside": inside,
        "enter_options": command_line(enter_options(inside, job.env)) if inside else "",
        "first_words": command_line(_first_words(job)),
        "gpus_of_node": gpus_of_node(job),
        "launch": started,
        "launch_line": command_line(started.command),
        "program_line": command_line(job.argv),
        "session_line": command_line(
            (*entering(job), job.python, "-u", str(run_dir / "session.pyz"), "serve", str(run_dir))
        ),
        "cell_line": command_line(cell.command),
        "packed_line": _ONE_TASK + command_line((*task(job), *entering(job), Raw('"$@"'))) if one_task else "",
        "in_own_group": lambda line: _in_background(line, job),
    }


_ONE_TASK = "SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=1 "
"""Before a task that is started without srun."""


def _in_background(line: str, job: Job) -> str:
    """``line`` in the background; locally in a separate process group.

    The TERM that ends the script's group reaches it once, by the script's trap.
    """
    return f"{line} </dev/null &" if job.kind.has_nodes else f"set -m\n{line} </dev/null &\nset +m"


def _attempts_options(job: Job) -> tuple[str, ...]:
    """Return options of ``node.pyz attempts``, without values known only on the node."""
    retries = job.retries
    assert retries is not None
    budgets = f"timeout={retries.timeout},preempt={retries.preempt},node={retries.node},error={retries.error}"
    return (
        *("--scheduler", job.scheduler, "--budgets", budgets, "--warning", str(job.signal_before_s or WARNING_S)),
        *(() if job.signal_before_s is None else ("--signal-before", str(job.signal_before_s))),
        *(("--agents",) if job.launcher == "torchrun" else ()),
        *(("--may-shrink",) if job.min_nodes else ()),
        *(("--held",) if job.resources.hold else ()),
        *(("--nodes", ",".join(job.hosts)) if job.hosts else ()),
    )


def _figures_options(job: Job) -> tuple[str, ...]:
    """Return arguments of ``figures.pyz``, before values known only on the node."""
    rules = [
        {"name": name, "pattern": figure.pattern, "json_path": figure.json, "unit": figure.unit_text,
         "better": figure.better, "take": figure.take}
        for name, figure in job.figures.items()
    ]  # fmt: skip
    return job.name, str(job.ntasks), msgspec.json.encode(rules).decode()


def _first_words(job: Job) -> tuple[str, ...]:
    """Return a command that runs in the image once, before any task: a start that fails is reported once, and early."""
    if job.argv[0] != job.python:
        return ("sh", "-c", ":")
    old = "the image's Python is older than 3.10"
    return (job.python, "-c", f"import sys; sys.exit(sys.version_info < (3, 10) and {old!r})")


@contextmanager
def _explain_errors(job: Job) -> Iterator[None]:
    """Turn errors of jinja2 into errors with the template and its line."""
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


def _environment(untrusted: list[Path] | None = None) -> jinja2.Environment:
    """Keep compiled templates between runs: compiling costs more than all the rest."""
    here, *others = template_folders()
    only_shipped = jinja2.PrefixLoader({"shipped": jinja2.FileSystemLoader(str(data_folder("templates")))})
    of_project = [_ProjectLoader(here, untrusted)] if is_project_folder(here, *others) else []
    folders = jinja2.FileSystemLoader([str(folder) for folder in others])
    return plain_text(jinja2.ChoiceLoader([only_shipped, *of_project, folders]), bytecode_cache=_bytecode_cache())


def _bytecode_cache() -> jinja2.BytecodeCache | None:
    folder = cache_dir() / "sandboxed-templates"  # compiled for no other environment
    try:
        make_folder(folder)
    except OSError:
        return None  # a home that cannot be written costs time, not the job
    return _OptionalCache(str(folder))


class _OptionalCache(jinja2.FileSystemBytecodeCache):
    """Compiled templates in a folder that may be full, or become unreadable: it costs time, not the job."""

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        with suppress(OSError):
            super().load_bytecode(bucket)

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        with suppress(OSError):
            super().dump_bytecode(bucket)


def _header(job: Job, made_by: str, template: str) -> list[str]:
    lines = [f"hpcjobs {__version__}", f"site {job.site} ({job.site_file})", f"template {template}"]
    if job.rehearsal:
        lines.append("rehearsal: the sandbox on this machine plays the site, with this machine's software")
    lines.append(f"made by: {made_by}")
    lines += [f"leaves out {node}: {why}" for node, why in job.left_out.items()]
    return [re.sub(r"[\x00-\x1f\x7f]", "?", line) for line in lines]


def files_of_submit(job: Job) -> tuple[str, ...]:
    """Return the files that the script needs in the run folder, by name."""
    return (
        *(("node.pyz",) if job.retries else ()),
        *((MONITOR_PROGRAM,) if job.monitor else ()),
        *((FIGURES_PROGRAM,) if job.figures else ()),
        *(("code",) if job.snapshot else ()),
        *(("batch_script",) if job.batch_script is not None else ()),
    )


def _header_by_hand(job: Job) -> list[str]:
    if needed := files_of_submit(job):
        return [f"not for sbatch by hand: hpcjobs submit puts {' and '.join(needed)} into the run folder"]
    log = _LOGS[bool(job.resources.array)]
    return [f"by hand: sbatch FILE, in a folder that all nodes see; the log is {log} there"]


_LOGS = ("%x_%j.out", "%x_%A_%a.out")
"""Names of the log of a job and of an array task, in sbatch's notation."""


def _directive_lines(job: Job, run_dir: Path | None) -> list[str]:
    """The ``#SBATCH`` options, quoted as sbatch reads them; a local job has none.

    Without ``run_dir`` the log goes to the folder where sbatch is called.
    """
    if not job.kind.takes_sbatch_options:
        return []
    log = _LOGS[bool(job.resources.array)]
    if (name := file_name(job.name)) != job.name:
        log = log.replace("%x", name)
    output = log if run_dir is None else f"{run_dir}/logs".replace("%", "%%") + f"/{log}"  # % starts a symbol
    options = [("job-name", job.name), *sbatch_options(job), ("output", output)]
    return [_directive(name, value) for name, value in options]


def _directive(name: str, value: str | None) -> str:
    text = name if value is None else f"{name}={value}"
    if any(ord(c) < 32 for c in text) or "\\" in text:
        raise RequestError(
            f"--{text!r}: an #SBATCH line can hold neither newlines nor backslashes",
            hint="choose another folder or value",
        )
    return name if value is None else f"{name}={shlex.quote(value)}"
