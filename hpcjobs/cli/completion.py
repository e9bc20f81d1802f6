"""Values that the shell offers after options and verbs, and ``hpcjobs completion``.

Only files are read, and, if the site's file names no accounts or QOS, sacctmgr once a day.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, TimeoutExpired
from typing import TYPE_CHECKING, Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]  # of a private module

from hpcjobs.cli.arguments import CommandLineError
from hpcjobs.errors import CommandMissingError, HpcJobsError

if TYPE_CHECKING:
    from hpcjobs.site.models import Site

app = typer.Typer(rich_markup_mode=None, add_completion=False)


VARIABLE = "_HPCJOBS_COMPLETE"
"""Set by the shell's function when it asks for completions."""
SHELLS = ("bash", "zsh", "fish")
NEWEST_JOBS = 50
_SACCTMGR_S = 2.0
_CACHE_S = 86_400.0


def prepare() -> None:
    """Make ready to answer the shell: errors and warnings would be printed into the line that is being typed."""
    completion_init()
    if not os.environ.get("HPCJOBS_DEBUG"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if "COMP_WORDS" in os.environ and os.environ.get("COMP_CWORD", "").isdecimal():
        arguments, at = _without_equals(os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"]))
        os.environ |= {"COMP_WORDS": "\n".join(arguments), "COMP_CWORD": str(at)}


def _without_equals(arguments: Sequence[str], at: int) -> tuple[list[str], int]:
    """The words of a line without those ``=`` that bash takes for words of their own, as in ``--site=tu``."""
    equals = [n for n, arg in enumerate(arguments) if arg == "=" and arguments[n - 1].startswith("--") and n != at]
    return [arg for n, arg in enumerate(arguments) if n not in equals], at - sum(n < at for n in equals)


def script_for(shell: str) -> str:
    script: str = get_completion_script(prog_name="hpcjobs", complete_var=VARIABLE, shell=shell)
    if shell != "zsh":
        return script
    compinit = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }"
    return script.replace("#compdef hpcjobs\n", f"#compdef hpcjobs\n{compinit}\n", 1)


def complete_program(ctx: typer.Context, incomplete: str) -> list[str]:
    """Bundled trainers and programs of the current folder; behind a trainer its flags and their values."""
    from hpcjobs import trainers
    from hpcjobs.site.library import project_jobs

    first, *arguments = ctx.params.get("program") or [None]
    if first is None:
        files = [path.name for path in Path().glob("*.py")] + [path.name for path in Path().glob("*.sbatch")]
        return _filter_by_prefix(incomplete, [*project_jobs(Path.cwd()), *trainers.NAMES, *sorted(files)])
    if first not in trainers.NAMES:
        return []  # the shell then offers files
    from hpcjobs.trainers.config import flag_choices, flag_names

    if incomplete.startswith("-"):
        return _filter_by_prefix(incomplete, flag_names(first))
    return _filter_by_prefix(incomplete, flag_choices(first, arguments[-1]) if arguments else [])


def complete_sites(incomplete: str) -> list[str]:
    """Names of the known sites."""
    from hpcjobs.site.search import list_sites

    return _filter_by_prefix(incomplete, (site.name for site in list_sites()))


def _of_site(list_values: Callable[[Site], Iterable[str]]) -> Callable[[typer.Context, str], list[str]]:
    """Complete values of the site that was typed, or of the default one."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        site = _site(ctx)
        return [] if site is None else _filter_by_prefix(incomplete, list_values(site))

    return complete


def complete_partitions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Partitions of the site; behind a comma a further one."""
    first, comma, begin = incomplete.rpartition(",")
    return [first + comma + name for name in _of_site(lambda site: site.partitions)(ctx, begin)]


def _list_accounts(site: Site) -> Iterable[str]:
    """Accounts, from the site's file, or from the user's associations."""
    named = {name for partition in site.partitions.values() for name in partition.accounts or ()}
    return sorted(named) or _of_associations(site, "account")


def complete_launchers(ctx: typer.Context, incomplete: str) -> list[str]:
    from hpcjobs.job.launch import LAUNCHERS

    site = _site(ctx)
    if site is None:
        return _filter_by_prefix(incomplete, LAUNCHERS)
    known = [name for name, launcher in LAUNCHERS.items() if launcher.fits(site.kind)]
    return _filter_by_prefix(incomplete, [name for name in site.launchers or known if name in known])


def _list_images(site: Site) -> Iterable[str]:
    from hpcjobs.containers.images import known

    return sorted(known(site))


complete_images = _of_site(_list_images)


def complete_recipes(incomplete: str) -> list[str]:
    from hpcjobs.containers.images import recipes

    return _filter_by_prefix(incomplete, recipes())


def complete_templates(incomplete: str) -> list[str]:
    """Templates of job scripts."""
    from hpcjobs.job.script import SUFFIX, template_folders

    files = {path.name.removesuffix(SUFFIX) for folder in template_folders() for path in folder.glob(f"*{SUFFIX}")}
    return _filter_by_prefix(incomplete, sorted(files))


def complete_jobs(incomplete: str) -> list[str]:
    """Ids of the newest jobs, the newest first, and their names."""
    from hpcjobs.run import index

    newest = index.entries()[: -NEWEST_JOBS - 1 : -1]
    return _filter_by_prefix(incomplete, [*(entry.job_id for entry in newest), *(entry.name for entry in newest)])


def complete_settings(incomplete: str) -> list[str]:
    """Complete the settings that ``hpcjobs update JOB NAME=VALUE`` can change."""
    from hpcjobs.site.resources import FIELDS

    return _filter_by_prefix(incomplete, [f"{option.name}=" for option in FIELDS.values() if option.update])


def complete_sweeps(incomplete: str) -> list[str]:
    """Names of sweeps, the newest first."""
    from hpcjobs.sweeps.folder import list_sweeps

    return _filter_by_prefix(incomplete, [sweep.name for sweep in list_sweeps()])


def complete_studies(incomplete: str) -> list[str]:
    """Names of the scaling studies in the current folder."""
    from hpcjobs.scaling.study import SUFFIX

    return _filter_by_prefix(incomplete, sorted(path.name.removesuffix(SUFFIX) for path in Path().glob(f"*{SUFFIX}")))


def complete_states(incomplete: str) -> list[str]:
    """States of jobs, in any case."""
    from hpcjobs.scheduler.base import State

    return _filter_by_prefix(incomplete.upper(), State.__members__)


OF_FIELDS: dict[str, Callable[..., list[str]]] = {
    "partition": complete_partitions,
    "qos": _of_site(lambda site: sorted(site.known_qos) or _of_associations(site, "qos")),
    "account": _of_site(_list_accounts),
    "launcher": complete_launchers,
    "container": complete_images,
    "template": complete_templates,
}
"""Field of `JobSpec` or `Resources` -> completion of its option."""


def complete_shells(incomplete: str) -> list[str]:
    """Shells that hpcjobs has lines for."""
    return _filter_by_prefix(incomplete, SHELLS)


def _filter_by_prefix(incomplete: str, arguments: Iterable[str]) -> list[str]:
    return [arg for arg in dict.fromkeys(arguments) if arg.startswith(incomplete)]


def _site(ctx: typer.Context) -> Site | None:
    """The site that was typed, or the default one; None: none, or its file cannot be read."""
    from hpcjobs.site.library import find_default_site, read_site
    from hpcjobs.site.search import find_file

    try:
        name = ctx.params.get("site") or find_default_site()
        return None if name is None else read_site(find_file(name))
    except HpcJobsError:  # no file, no values
        return None


def _of_associations(site: Site, column: str) -> list[str]:
    """Accounts or QOS of the user, as Slurm's accounting has them; asked for once a day."""
    from hpcjobs.files import cache_dir, make_folder, write_beside

    if not site.kind.has_accounting:
        return []
    path = cache_dir() / "completion" / f"{site.name}.{column}"
    if not path.is_file() or time.time() - path.stat().st_mtime > _CACHE_S:
        names = _ask_sacctmgr(site, column)
        if not names:
            return []
        make_folder(path.parent)
        write_beside(path, "\n".join(names))
    return path.read_text(encoding="utf-8").split()


def _ask_sacctmgr(site: Site, column: str) -> list[str]:
    from hpcjobs.files import user_name
    from hpcjobs.processes.programs import start
    from hpcjobs.slurm_commands import cluster_env, list_associations

    argv = list_associations([column], user=user_name())
    try:
        process = start(argv, env=cluster_env(site.slurm_conf), stdout=PIPE, stderr=DEVNULL)
    except CommandMissingError:
        return []
    try:
        out, _ = process.communicate(timeout=_SACCTMGR_S)
    except TimeoutExpired:  # somebody waits at the keyboard
        process.kill()
        process.communicate()
        return []
    return sorted({name for line in out.decode("utf-8", "replace").split() for name in line.split(",") if name})


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", autocompletion=complete_shells)],
) -> None:
    """Print the completion script of a shell: eval "$(hpcjobs completion bash)" in ~/.bashrc."""
    if shell not in SHELLS:
        raise CommandLineError(f"no completion for shell {shell!r}: use {', '.join(SHELLS)}")
    print(script_for(shell))
