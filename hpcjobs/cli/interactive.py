"""``hpcjobs alloc``, ``shell``, ``exec`` and ``jupyter``, which starts, lists, opens and stops sessions."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from hpcjobs.cli.arguments import CommandLineError
from hpcjobs.cli.completion import complete_jobs
from hpcjobs.cli.options import EPILOG, ProgramCommand, SbatchGroup, with_job_options
from hpcjobs.cli.output import DryRun, JobSite, Json, OneJob, SiteName, SpecFile, note, opt, print_output, print_table
from hpcjobs.cli.terminal import raw, write_document
from hpcjobs.job.models import JobSpec
from hpcjobs.printable import printable
from hpcjobs.units import clock

if TYPE_CHECKING:
    from hpcjobs.jupyter.session import Kind, Session, SessionRequest
    from hpcjobs.run.index import Entry
    from hpcjobs.scheduler.base import JobRecord

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command(cls=ProgramCommand, context_settings={"allow_interspersed_args": False}, epilog=EPILOG)
@with_job_options(
    without=[
        *("array", "retries", "signal_before", "wrap", "snapshot", "preflight", "spare", "min_nodes"),
        *("metric", "monitor", "notify", "notify_on"),
    ]
)
def alloc(
    *,
    site: SiteName = None,
    request: JobSpec,
    spec: SpecFile = None,
    dry_run: Annotated[bool, opt("--dry-run", help="Print a job script with the same request; write nothing.")] = False,
) -> None:
    """Allocate nodes now, and run PROGRAM or a shell on the first node, with the site's software.

    In the shell, `ranks PROGRAM` starts PROGRAM as the tasks of a job, with RANK, WORLD_SIZE and related variables.
    """
    from hpcjobs.job.plan import plan_of, resolve_request, run_dir_of
    from hpcjobs.processes.programs import run_in_terminal
    from hpcjobs.run.steps import Command, allocate

    # Named bash or interactive, Lightning would not take it for a Slurm job.
    named = replace(request, program=request.program or ("bash",), name=request.name or "alloc")
    job = resolve_request(named, site, spec=spec or (), settings_of="salloc")
    plan = plan_of(job, run_dir_of(job), made_by=shlex.join(["hpcjobs", *sys.argv[1:]]))
    if dry_run:
        print(plan.script, end="")
        return
    arguments = plan.job.argv if request.program else ()

    def run(command: Command) -> int:
        note(f"run folder {plan.run_dir}, removed at the end if it is empty but for files of hpcjobs")
        return run_in_terminal(command.argv, cwd=command.cwd, env=command.env)

    raise typer.Exit(allocate(plan, arguments, terminal=sys.stdin.isatty(), run=run))


Node = Annotated[str | None, opt(help="Use this node of the job.")]
Rank = Annotated[int | None, opt(help="Use the node of this rank.", min=0)]


@app.command()
def shell(
    job: OneJob,
    node: Node = None,
    rank: Rank = None,
    site: JobSite = None,
) -> None:
    """Open a shell on a node of a running job, beside its tasks, with their software and environment."""
    run_within(job, (), node=node, rank=rank, site=site, terminal=sys.stdin.isatty())


def run_within(
    job: str, arguments: tuple[str, ...], *, node: str | None, rank: int | None, site: str | None, terminal: bool
) -> None:
    """Run ``arguments`` (none: a shell) within a job, and end with its exit code."""
    from hpcjobs.processes.programs import run_in_terminal
    from hpcjobs.run.select import select_one
    from hpcjobs.run.steps import attach

    entry = select_one(job, site=site)
    command = attach(entry, arguments, node=node, rank=rank, terminal=terminal)
    raise typer.Exit(run_in_terminal(command.argv, cwd=command.cwd, env=command.env))


@app.command("exec")
def exec_(
    job: OneJob,
    command: Annotated[list[str], typer.Argument(help="Command and its arguments.")],
    node: Node = None,
    rank: Rank = None,
    site: JobSite = None,
) -> None:
    """Run COMMAND on every node of a running job, beside its tasks: hpcjobs exec 4711 -- nvidia-smi."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    run_within(job, tuple(command), node=node, rank=rank, site=site, terminal=on_terminal)


class LiveLine:
    """Shows the state of a job that has not started: one line that changes, or on a pipe a line per change."""

    def __init__(self) -> None:
        self._printed = ""

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._printed and sys.stderr.isatty():
            print(file=sys.stderr)

    def __call__(self, record: JobRecord) -> None:
        reason = f" ({record.reason})" if record.reason and record.reason != "None" and not record.node_list else ""
        start = f", estimated start {clock(record.start_estimate)}" if record.start_estimate else ""
        where = f" on {record.node_list}, the server is starting" if record.node_list else ""
        text = f"job {record.job_id} {record.state.value}{reason}{where}{start}"
        if sys.stderr.isatty():
            print(f"\r\033[Khpcjobs: {printable(text)}", end="", file=raw(sys.stderr), flush=True)
        elif text != self._printed:
            note(text)
        self._printed = text


def as_dict(session: Session) -> dict[str, Any]:
    """The session for scripts and for ``--connect``. It holds the token."""
    connection = session.connection
    fields: dict[str, Any] = {
        "job_id": session.entry.job_id,
        "site": session.entry.site,
        "state": session.record.state.value,
        "run_dir": session.entry.run_dir,
        "kind": session.settings.kind,
        "folder": session.settings.folder,
    }
    if connection is not None:
        tunnel = session.tunnel
        fields |= {
            "node": connection.host,
            "ends": connection.ends,
            "url": session.url,
            "tunnel": session.command,
            "connection": connection._asdict(),
            "way": None if tunnel is None else tunnel._asdict(),
        }
    return fields


def print_session(session: Session, *, as_json: bool) -> None:
    """Print the node, the ssh line for the laptop, the address, and the end."""
    fields = as_dict(session)
    if as_json:
        print_output("jupyter", fields)
        return
    if session.connection is None:
        print(f"job {session.entry.job_id} {session.record.state.value}: no server answers")
        return
    until = f", until {clock(fields['ends'])}" if fields["ends"] else ""
    print(f"job {fields['job_id']}  {fields['kind']} on {fields['node']}, site {fields['site']}{until}")
    if fields["tunnel"]:
        print(f"on your laptop:  {shlex.join(fields['tunnel'])}")
    print(f"then open:       {fields['url']}" if fields["tunnel"] else f"open:            {fields['url']}", flush=True)
    if session.connection.kind == "code":
        print(f"password:        {session.connection.token}", flush=True)


def cells(session: Session) -> list[str]:
    """One row of ``hpcjobs jupyter list``."""
    connection = session.connection
    return [
        session.entry.job_id,
        session.entry.site,
        session.settings.kind,
        session.record.state.value if connection else f"{session.record.state.value}, not answering yet",
        connection.host if connection else "-",
        clock(connection.ends) if connection else "-",
        session.settings.folder,
    ]


jupyter_app = typer.Typer(cls=SbatchGroup, rich_markup_mode=None, add_completion=False)


@jupyter_app.callback(invoke_without_command=True, epilog=EPILOG)
@with_job_options(
    only=["env", "container"],
    without=["array", "ntasks", "ntasks_per_node", "ntasks_per_gpu", "monitor"],
    help={"container": "Image with Jupyter: a name in the site file, or a file."},
)
def jupyter(
    *,
    context: typer.Context,
    site: SiteName = None,
    request: JobSpec,
    folder: Annotated[str, opt("--dir", help="Folder that the server shows [current folder].")] = ".",
    lab: Annotated[bool, opt("--lab", help="JupyterLab; the default.")] = False,
    notebook: Annotated[bool, opt("--notebook", help="Jupyter Notebook.")] = False,
    code: Annotated[bool, opt("--code", help="code-server, if the node has it.")] = False,
    idle: Annotated[str | None, opt("--idle", help="End after this time without activity: 30m, or never.")] = None,
    token_file: Annotated[
        Path | None, opt("--token-file", help="Private file with a token, or - for standard input [a random one].")
    ] = None,
    connect: Annotated[
        bool, opt("--connect", help="On a laptop: start it by ssh, open tunnel and browser; Ctrl-C ends all.")
    ] = False,
    detach: Annotated[bool, opt("--detach", help="Return when the server answers; the session keeps running.")] = False,
    no_wait: Annotated[bool, opt("--no-wait", help="Return as soon as the job is submitted.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Start Jupyter on a node: submit a job, wait until it answers, and print how to connect to it."""
    if context.invoked_subcommand is not None:
        return
    if lab + notebook + code > 1:
        raise CommandLineError("use one of --lab, --notebook, --code")
    if connect:
        raise typer.Exit(_from_laptop(site, token_file))
    from hpcjobs.cli.submit import print_notes
    from hpcjobs.jupyter import session
    from hpcjobs.jupyter.session import private_token, session_request

    kind: Kind = "code" if code else "notebook" if notebook else "lab"
    session_plan = session_request(
        request,
        site,
        kind=kind,
        folder=folder,
        idle=idle,
        token=private_token(token_file) if token_file else None,
        made_by=shlex.join(["hpcjobs", *sys.argv[1:]]),
    )
    print_notes(session_plan.plan.job)
    if dry_run:
        _print_request(session_plan, as_json=as_json)
        return
    entry = session.start(session_plan)
    note(f"job {entry.job_id} on site {entry.site}; run folder {entry.run_dir}")
    if not no_wait:
        _attend(entry, detach=detach, as_json=as_json)
    elif as_json:
        print_output("jupyter --no-wait", {"job_id": entry.job_id, "site": entry.site, "run_dir": entry.run_dir})
    else:
        print(f"next: hpcjobs jupyter open {entry.job_id}")


def _print_request(request: SessionRequest, *, as_json: bool) -> None:
    plan = request.plan
    if as_json:
        settings = request.settings._replace(token=None)
        print_output(
            "jupyter --dry-run", plan._asdict() | {"run_dir": str(plan.run_dir), "session": settings._asdict()}
        )
        return
    note(f"dry run, nothing written; would create {plan.run_dir} and run: {shlex.join(plan.command)}")
    write_document(plan.script)


def _attend(entry: Entry, *, detach: bool, as_json: bool) -> None:
    """Until it answers, and then, unless it is to run on alone, until it ends or the user has had enough of it."""
    from hpcjobs.jupyter import session

    try:
        with LiveLine() as line:
            ready = session.await_answer(entry, progress=line)
        print_session(ready, as_json=as_json)
        if not detach:
            note("Ctrl-C asks whether to keep the session")
            note(f"job {entry.job_id} {session.await_end(entry).value}")
    except KeyboardInterrupt:
        _keep_or_cancel(entry)
        raise


def _keep_or_cancel(entry: Entry) -> None:
    """Ask whether a session continues without its terminal; without a terminal to ask at, it is cancelled."""
    from hpcjobs.jupyter import session

    answer = "c"
    if sys.stdin.isatty():
        try:
            answer = input(f"\nkeep job {entry.job_id}, or cancel it? [K/c] ").strip().lower()
        except EOFError:
            answer = ""
        except KeyboardInterrupt:
            answer = "c"
    if not answer.startswith("c"):
        job = entry.job_id
        note(f"the session continues; open it: hpcjobs jupyter open {job}; end it: hpcjobs jupyter stop {job}")
        return
    session.stop([entry])
    note(f"job {entry.job_id} is cancelled")


@jupyter_app.command("list")
def list_(site: JobSite = None, as_json: Json = False) -> None:
    """List my sessions that have not ended."""
    from hpcjobs.jupyter.session import sessions

    running = sessions(site=site)
    if as_json:
        print_output("jupyter list", [as_dict(one) for one in running])
    elif not running:
        print("no sessions (hpcjobs jupyter starts one)")
    else:
        print_table(["JOB", "SITE", "KIND", "STATE", "NODE", "UNTIL", "FOLDER"], map(cells, running))


@jupyter_app.command("open")
def open_(
    job: Annotated[
        str | None, typer.Argument(help="Id, run folder or name [newest].", autocompletion=complete_jobs)
    ] = None,
    site: JobSite = None,
    browser: Annotated[bool, opt("--browser", help="Also open a browser (for a session on this machine).")] = False,
    as_json: Json = False,
) -> None:
    """Wait until a session answers, and print how to connect to it."""
    from hpcjobs.jupyter import session

    with LiveLine() as line:
        ready = session.await_answer(session.find(job, site=site), progress=line)
    print_session(ready, as_json=as_json)
    if browser and ready.url is not None:
        from hpcjobs.jupyter.laptop import show

        show(ready.url, Path(ready.entry.run_dir))


@jupyter_app.command()
def stop(
    jobs: Annotated[
        list[str] | None, typer.Argument(help="Ids, run folders or names [newest].", autocompletion=complete_jobs)
    ] = None,
    everything: Annotated[bool, opt("--all", "-a", help="All of my sessions.")] = False,
    site: JobSite = None,
    as_json: Json = False,
) -> None:
    """End sessions, and wait until they have ended."""
    from hpcjobs.jupyter import session

    entries = (
        [running.entry for running in session.sessions(site=site)]
        if everything
        else [session.find(job, site=site) for job in jobs or (None,)]
    )
    stopped = [entry.job_id for entry in session.stop(entries)]
    ended = [entry.job_id for entry in entries if entry.job_id not in stopped]
    if as_json:
        print_output("jupyter stop", {"stopped": stopped, "had_ended": ended})
        return
    if stopped:
        print(" ".join(["stopped", *stopped]))
    if ended:
        print(" ".join(["had ended already:", *ended]))
    if not entries:
        print("no sessions")


def _from_laptop(site: str | None, token_file: Path | None) -> int:
    """The same words on the login node, and the tunnel from here. A token file is read here, and sent by a pipe."""
    from hpcjobs.jupyter.laptop import connect, remote_of
    from hpcjobs.jupyter.session import private_token
    from hpcjobs.site.library import default_site, load_site

    where = load_site(site or default_site())
    token = None if token_file is None else private_token(token_file)
    arguments = words_of_session(sys.argv[1:], token=token)
    if site is None:
        arguments += ["--site", where.name]  # the default there may be another one
    return connect(remote_of(where), arguments, token=token, say=note)


def words_of_session(typed: list[str], *, token: str | None) -> list[str]:
    """The words for the login node, where standard input holds the ``token``."""
    arguments: list[str] = []
    rest = iter(typed)
    for arg in rest:
        if arg == "--token-file":
            next(rest)
        elif arg != "--connect" and not arg.startswith("--token-file="):
            arguments.append(arg)
    return arguments if token is None else [*arguments, "--token-file", "-"]
