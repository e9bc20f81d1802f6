"""The command line: a verb builds a value, calls one public function, prints.

Verbs live in modules of this package and are imported when they are called, so that ``hpcjobs --help``
costs no more than Typer itself.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_command_from_info

from hpcjobs import __version__
from hpcjobs.cli.arguments import check_values, refuse_options_as_values
from hpcjobs.cli.completion import complete_sites, prepare
from hpcjobs.cli.terminal import fail, json_state, note_json, printable_streams, raw, reset_json
from hpcjobs.errors import UNFORESEEN, HpcJobsError, HpcJobsWarning, nearest

_REFUSALS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EISDIR, errno.ENOTDIR),
    *(errno.EIO, errno.ESTALE, errno.EFBIG, errno.EINVAL, errno.ENOENT, errno.EEXIST),
)
DEBUG_VARIABLE = "HPCJOBS_DEBUG"

GROUPS = {
    "Submit and follow": {
        "submit": ("submit", "Submit a job: hpcjobs submit [OPTIONS] PROGRAM [ARGS]..."),
        "init": ("submit", "Write hpcjobs.yaml, the job that submit runs in this folder."),
        "where": ("why", "Show where a program can run: fit, start and cost by partition."),
        "ps": ("jobs", "List my jobs, with state, reason and estimated start."),
        "top": ("follow", "Watch my jobs on a screen: progress, loss, load."),
        "logs": ("follow", "Print the output of a job; -f follows it."),
        "show": ("jobs", "Show one job: state, settings with their sources, results."),
        "wait": ("follow", "Wait for jobs to end, and return their exit code."),
        "cancel": ("jobs", "Cancel jobs, or send them a signal."),
        "hold": ("jobs", "Keep jobs from starting."),
        "release": ("jobs", "Let held jobs start."),
        "requeue": ("jobs", "Put jobs back into the queue."),
        "update": ("jobs", "Change a job: hpcjobs update JOB time=2h."),
        "rerun": ("runs", "Submit a run again, unchanged or with changes."),
        "fetch": ("fetch", "On a laptop: copy a run folder from the cluster."),
    },
    "Understand": {
        "why": ("why", "Explain why a job failed or is pending, and what to do."),
        "diff": ("runs", "Show the differences between two runs."),
        "report": ("report", "Reports: accounting, scaling, what to request next time."),
        "monitor": ("follow", "Watch the load of a running job's nodes, with alarms."),
    },
    "Many runs": {
        "sweep": ("sweep", "Many runs of one program: run, status, resume, results, cancel."),
        "scale": ("sweep", "Scaling study: measure one program at several node counts."),
        "prune": ("runs", "List old run folders and records, or remove them."),
        "archive": ("runs", "Write a run folder to one tar file, with checksums."),
    },
    "Interactive": {
        "alloc": ("interactive", "Allocate nodes now for a shell or a program."),
        "shell": ("interactive", "Open a shell on a node of a running job."),
        "exec": ("interactive", "Run a command on the nodes of a running job."),
        "jupyter": ("interactive", "Jupyter on a node: start, list, open, stop."),
    },
    "Sites, nodes and images": {
        "sites": ("sites", "List the sites; `sites init` writes a site file."),
        "nodes": ("fabric", "List the known bad nodes, which submit excludes."),
        "fabric": ("fabric", "Health check: measure nodes and name the bad ones."),
        "container": ("container", "Images: build, list, check against a site."),
    },
    "Rehearse and rent": {
        "sandbox": ("rehearse", "Start a real Slurm on this machine, to rehearse jobs."),
        "drill": ("rehearse", "Inject a fault into a run and show whether it recovers."),
        "cloud": ("rehearse", "A rented cluster: render, check, plan, up, down."),
    },
    "This program": {
        "help": ("about", "Explain a command, or a topic: hpcjobs help topics."),
        "doctor": ("about", "Examine this installation: text for a bug report."),
        "skill": ("about", "Print SKILL.md: the commands as an agent or script needs them."),
        "completion": ("completion", "Print the completion script of bash, zsh or fish."),
    },
}
"""Verb -> its module and its line of help, grouped as in the help."""

VERBS = {verb: row for group in GROUPS.values() for verb, row in group.items()}


_OTHER_NAMES = {
    **dict.fromkeys(("sbatch", "run", "start", "create", "qsub"), "submit"),
    **dict.fromkeys(("squeue", "list", "ls", "queue", "qstat", "jobs"), "ps"),
    **dict.fromkeys(("scancel", "kill", "stop", "delete", "rm", "qdel"), "cancel"),
    **dict.fromkeys(("status", "view", "info", "describe"), "show"),
    **dict.fromkeys(("tail", "log", "output", "attach"), "logs"),
    **dict.fromkeys(("sacct", "seff", "usage"), "report"),
    **dict.fromkeys(("sinfo", "partitions"), "sites"),
    "salloc": "alloc",
    "srun": "exec",
    "ssh": "shell",
    "scontrol": "update",
    "retry": "rerun",
    "clean": "prune",
}
"""Verbs of Slurm and of other tools -> ours, also if the spelling is unlike."""


@contextmanager
def _noted_usage_error() -> Iterator[None]:
    """Keep the message of a usage error, which Typer prints, for the output of ``--json``."""
    try:
        yield
    except Exception as error:
        if (message := getattr(error, "format_message", None)) is not None:
            json_state.usage_error = message()
        raise


class _LazyGroup(TyperGroup):
    """The verbs of `VERBS`, each imported when it is needed."""

    _is_listing = False
    """Whether only names and lines of help are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        if self._is_listing:
            return TyperCommand(cmd_name, help=VERBS[cmd_name][1])
        module = import_module(f"{__name__}.{VERBS[cmd_name][0]}")
        command = _make_command(getattr(module, f"{cmd_name}_app", None) or module.app, cmd_name)
        command.name = cmd_name
        from hpcjobs.cli.fetch import intercept

        intercept(command, cmd_name)
        refuse_options_as_values(command)
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing:
            check_values(ctx, args)
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _noted_usage_error():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _noted_usage_error():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        widest = max(map(len, VERBS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{verb:{widest}}", text) for verb, (_, text) in group.items()])

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self._is_listing = True
        return super().shell_complete(ctx, incomplete)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            if (verb := _OTHER_NAMES.get(args[0])) is not None:
                ctx.fail(f"no command {args[0]!r}; did you mean {verb!r}? {VERBS[verb][1]}")
            ctx.fail(f"no command {args[0]!r}; {nearest(args[0], VERBS)}")
        return super().resolve_command(ctx, args)


def _make_command(app: typer.Typer, verb: str) -> Any:
    """The group ``app``, or the one verb of it: options of the others are not needed."""
    for command in () if app.registered_callback else app.registered_commands:
        if verb == (command.name or getattr(command.callback, "__name__", None)):
            return get_command_from_info(command, pretty_exceptions_short=True, rich_markup_mode=app.rich_markup_mode)
    return get_command(app)


app = typer.Typer(
    cls=_LazyGroup,
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # of every verb too
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"hpcjobs {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    remote: Annotated[
        str | None,
        typer.Option(
            metavar="SITE|HOST",
            help="From a laptop: run the command on the login host of a site, or on this ssh host [HPCJOBS_REMOTE].",
            show_default=False,
            autocompletion=complete_sites,
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """One site file, one command: distributed training on any Slurm cluster, or on this machine."""
    if debug:
        os.environ[DEBUG_VARIABLE] = "1"


def main() -> None:
    """Run the command line; text of others is printed in printable form."""
    # No garbage is collected among imported modules, which would cost --help and ps 1.2 to 1.3 times the CPU time.
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)
    _use_utf8()
    with printable_streams():
        _main()


def _main() -> None:
    """The one place where an error becomes a message and an exit code."""
    if "HPCJOBS_OUTPUTS" in os.environ:
        from hpcjobs.remote.connection import end_with_connection

        end_with_connection()
    warnings.simplefilter("once", HpcJobsWarning)  # whatever PYTHONWARNINGS says, and wherever it is met again
    if "_HPCJOBS_COMPLETE" in os.environ:
        prepare()
    warnings.showwarning = lambda message, *_, **__: print(f"hpcjobs: warning: {message}", file=sys.stderr)
    output, errors = raw(sys.stdout), raw(sys.stderr)  # Typer replaces a stream once its reader is gone
    reset_json()
    try:
        try:
            app(prog_name="hpcjobs")
        finally:
            output.flush()  # at the end of the interpreter it would be too late to explain a full disk
    except BrokenPipeError as error:  # the reader (head, less) has seen enough: only what was done has its own code
        _drop(output, errors)
        end = error.__context__
        sys.exit(end.code if isinstance(end, SystemExit) and not _is_cut_short(end) else CUT_SHORT)
    except SystemExit as end:
        if _is_cut_short(end):
            _drop(output, errors)
            sys.exit(CUT_SHORT)
        if json_state.usage_error is None:
            raise
        note_json("--json" in sys.argv)
        fail(json_state.usage_error, exit_code=int(end.code or 0))
    except HpcJobsError as error:
        if debugging():
            traceback.print_exception(error)
        print(f"hpcjobs: {error}", file=sys.stderr)
        maybe_taken = getattr(error, "maybe_taken", False)
        fail(error.message, exit_code=error.exit_code, hint=error.hint, maybe_taken=maybe_taken)
    except KeyboardInterrupt:
        fail("interrupted", exit_code=130)
    except Exception as error:
        message: object = None
        if _current_folder_is_gone():
            message = "the current folder does not exist any more: change to another one"
        elif isinstance(error, RuntimeError) and os.path.expanduser("~") == "~":
            message = "this user has no home folder: set HOME to a folder that is yours"
        elif (message := _refused_file(error)) is not None and debugging():
            traceback.print_exception(error)
        if message is not None:
            print(f"hpcjobs: {message}", file=sys.stderr)
            fail(str(message), exit_code=HpcJobsError.exit_code)
        explained = _explain(error)
        print(f"hpcjobs: {explained}", file=sys.stderr)
        if not isinstance(error, OSError):
            fail(explained, exit_code=UNFORESEEN)
        _drop(output, errors)
        sys.exit(UNFORESEEN)


CUT_SHORT = 128 + signal.SIGPIPE
"""Exit code of a command whose reader left before the command was done, as of other programs: it is no success."""


def _is_cut_short(end: SystemExit) -> bool:
    """Whether Typer ended the command, with 1, at a line that nobody reads."""
    return isinstance(end.__context__, BrokenPipeError)


def _drop(*streams: TextIO) -> None:
    """Discard what cannot be written: the interpreter would write it again at exit, print an error and end with 120."""
    for stream in streams:
        if isinstance(stream, TextIOWrapper):
            try:
                stream.flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _use_utf8() -> None:
    """Use UTF-8 in every locale, like the files of jobs; characters that cannot be printed are escaped."""
    if sys.getfilesystemencoding() != "utf-8":
        arguments = (sys.executable, "-X", "utf8", *sys.orig_argv[1:])
        from hpcjobs.processes.start import become

        become(sys.executable, [os.fsencode(arg) for arg in arguments])
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 # until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            utf8 = stream.encoding.lower().replace("-", "") == "utf8"
            stream.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")


def debugging() -> bool:
    """Whether tracebacks are to be shown: ``hpcjobs --debug VERB``, or HPCJOBS_DEBUG=1."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0")


def _explain(error: Exception) -> str:
    """Return one line for ``error``; its traceback goes to the screen when debugging, otherwise to a file."""
    details = "".join(traceback.format_exception(error))
    if debugging():
        sys.stderr.write(details)
        return _summary(error)
    place = _write(details)
    where = f"details in {place}" if place is not None else "details: hpcjobs --debug VERB ..."
    return f"{_summary(error)} ({where})"


def _current_folder_is_gone() -> bool:
    """Whether the current folder of this process has been removed."""
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def _refused_file(error: Exception) -> str | None:
    """Return one line if the system refused a file, or could not read or write it; otherwise None."""
    if isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None:
        return f"{Path(os.fsdecode(error.filename)).absolute()}: {error.strerror}"
    return None


def _summary(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
        return ": ".join([error.strerror, " and ".join(names)]) if names else error.strerror
    first_line = (str(error).strip() or "no message").splitlines()[0]
    return f"unexpected {type(error).__name__}: {first_line}"


def _write(details: str) -> Path | None:
    """The file with ``details``, in the user's state folder or, where that cannot be written, in the temporary one."""
    import tempfile

    from hpcjobs.files import make_folder, state_dir

    context = [
        f"hpcjobs {__version__}, Python {sys.version.split()[0]}, {time.strftime('%F %T %z')}",
        f"command: {sys.argv!r}",
        f"encoding of files: {sys.getfilesystemencoding()}, of the terminal: {getattr(sys.stdout, 'encoding', None)}",
    ]
    text = "\n".join([*context, "", details])
    for folder in (lambda: state_dir() / "errors", tempfile.gettempdir):
        try:
            place = Path(folder())
            make_folder(place)
            descriptor, path = tempfile.mkstemp(".txt", time.strftime("error-%Y%m%d-%H%M%S-"), place)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
        except (OSError, RuntimeError):  # a full disk, or a user without a home
            continue
        return Path(path)
    return None
