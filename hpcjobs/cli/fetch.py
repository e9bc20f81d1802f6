"""``hpcjobs fetch``, and other commands of a laptop that run on a login host."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcjobs.cli.output import JobSite, note, opt
from hpcjobs.errors import HpcJobsError, RequestError

if TYPE_CHECKING:
    from hpcjobs.remote.laptop import Laptop, Target


VARIABLE = "HPCJOBS_REMOTE"
"""The site or host of ``--remote`` for every command; ``no``: none."""
HERE = "no"
_OF_THIS_MACHINE = frozenset(("sites", "cloud", "sandbox", "container"))
"""Verbs that go to the login host only where ``--remote`` is typed."""
_SUBMIT = frozenset(("submit", "rerun", "sweep", "scale", "drill", "alloc", "fabric", "where", "exec", "shell"))
"""Verbs that take the code along."""


def intercept(command: Any, verb: str) -> None:
    """Have ``command``, and the commands of a group, run on the login host where this machine is a laptop."""
    for inner in getattr(command, "commands", {}).values():
        intercept(inner, verb)
    run = command.invoke

    def invoke(context: Any) -> Any:
        if context._protected_args or verb == "fetch":  # the command of a group is intercepted later
            return run(context)
        site = context.params.get("site")
        target = find_target(context.find_root().params.get("remote"), site, verb=verb)
        if target is None:
            return run(context)
        return context.exit(_run_there(target, verb, context))

    command.invoke = invoke


def find_target(remote: str | None, site: str | None, *, verb: str) -> Target | None:
    """Find where the command runs; None: on this machine.

    ``remote`` was typed, or is HPCJOBS_REMOTE: a site, or a host of ssh. Else the command's site says, when it has a
    login host and this machine has no sbatch.

    Raises HpcJobsError: the site of ``--remote`` has no login host.
    """
    where = remote or os.environ.get(VARIABLE) or None
    if where == HERE or (remote is None and verb in _OF_THIS_MACHINE):
        return None
    if where is not None:
        return _named_target(where, site)
    if shutil.which("sbatch") is not None:
        return None
    return _target_of_site(site)


def _named_target(where: str, site: str | None) -> Target:
    from hpcjobs.remote.laptop import Target
    from hpcjobs.site.library import load_site
    from hpcjobs.site.models import Login
    from hpcjobs.site.search import list_sites

    if where not in {entry.name for entry in list_sites()} and not _is_path(where):
        try:
            return Target(Login(host=where), None, _path_of(site))
        except ValueError as error:
            raise RequestError(f"--remote {where!r}: {error}") from error
    named = load_site(where)
    if named.login_host is None:
        raise RequestError(
            f"--remote {where}: the site ({named.path}) has no login host",
            hint="name it in the site file: login: user@host",
        )
    return Target(named.login_host, named.name, _path_of(site) or _path_of(where))


def _target_of_site(site: str | None) -> Target | None:
    from hpcjobs.site.library import find_default_site, load_site

    try:
        name = site or find_default_site()
        known = None if name in (None, "local") else load_site(str(name))
    except HpcJobsError:  # the verb itself reports it
        return None
    if known is None or not known.kind.has_nodes or known.login_host is None or known.rehearsal:
        return None
    from hpcjobs.remote.laptop import Target

    return Target(known.login_host, known.name, _path_of(str(name)))


def _is_path(site: str) -> bool:
    return "/" in site or site.endswith((".yaml", ".yml"))


def _path_of(site: str | None) -> Path | None:
    return Path(site) if site is not None and _is_path(site) else None


def _run_there(target: Target, verb: str, context: Any) -> int:
    from hpcjobs.remote.laptop import Laptop

    arguments = words_there(sys.argv[1:], context.params.get("site"))
    laptop = Laptop(target, say=note)
    name, params = context.info_name, context.params
    if verb == "jupyter" and name == "jupyter" and not (params["detach"] or params["no_wait"] or params["dry_run"]):
        return _start_session(laptop, arguments, params)
    if verb == "jupyter" and name == "open" and not params["as_json"]:
        from hpcjobs.jupyter.laptop import SharedRemote, follow

        laptop.connect(with_code=False)
        return follow(SharedRemote(laptop), [arg for arg in arguments if arg != "--browser"], say=note)
    return laptop.run(arguments, submits=verb in _SUBMIT or name == "jupyter")


def _start_session(laptop: Laptop, arguments: list[str], params: Mapping[str, Any]) -> int:
    """A session with its tunnel and browser, until Ctrl-C. A token file is read here, and sent by a pipe."""
    from hpcjobs.cli.interactive import words_of_session
    from hpcjobs.jupyter.laptop import SharedRemote, connect
    from hpcjobs.jupyter.session import private_token

    token_file = params["token_file"]
    token = None if token_file is None else private_token(token_file)
    laptop.connect(with_code=True)
    return connect(SharedRemote(laptop), words_of_session(arguments, token=token), token=token, say=note)


def words_there(arguments: list[str], site: str | None) -> list[str]:
    """The words of the command line for the login host: without ``--remote``, a site's file by its name."""
    rest = list(arguments)
    while rest and rest[0].startswith("--remote"):
        del rest[: 1 if "=" in rest[0] else 2]
    if rest[:1] == ["--debug"]:
        return ["--debug", *words_there(rest[1:], site)]
    if site is None or not _is_path(site):
        return rest
    name = Path(site).stem
    for number, arg in enumerate(rest):
        if arg in ("--site", "-s") and rest[number + 1 : number + 2] == [site]:
            return [*rest[: number + 1], name, *rest[number + 2 :]]
        if arg in (f"--site={site}", f"-s{site}"):
            return [*rest[:number], f"--site={name}", *rest[number + 1 :]]
    return rest


app = typer.Typer(rich_markup_mode=None, add_completion=False)
_LARGE = ("checkpoints", "code")


@app.command()
def fetch(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(help="Id or name of a job [newest].")] = None,
    files: Annotated[
        list[str] | None, typer.Argument(help="Files of its run folder [all but checkpoints and code].")
    ] = None,
    to: Annotated[Path | None, opt("--to", help="Folder to copy to [runs/NAME of the run folder].")] = None,
    site: JobSite = None,
) -> None:
    """On a laptop: copy a run folder, or FILES of it, from the login host. Unchanged files are not copied again."""
    from hpcjobs.jupyter.laptop import SharedRemote, read_word
    from hpcjobs.remote.laptop import Laptop, choose_place

    for name in files or ():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise RequestError(f"{name!r}: files are named from the run folder on, as in logs or metrics.jsonl")
    target = find_target(context.find_root().params.get("remote"), site, verb="fetch")
    if target is None:
        raise RequestError(
            "fetch copies from a login host; this command names none, and run folders of this machine need no copy",
            hint="use --remote SITE or --remote HOST before fetch, or --site with a site that has `login:`",
        )
    laptop = Laptop(target, say=note)
    laptop.connect(with_code=False)
    question = ["show", *([job] if job else []), *(["--site", site] if site else []), "--json"]
    shown = SharedRemote(laptop).ask(words_there(question, site))
    run_dir = read_word(shown, "entry", "run_dir")
    folder = to.resolve() if to else choose_place(Path("runs"), PurePosixPath(run_dir).name)
    if not files:
        laptop.fetch(run_dir, folder, without=_LARGE)
    for name in files or ():
        laptop.fetch(f"{run_dir}/{name}", choose_place(folder, name))
    print(folder)
