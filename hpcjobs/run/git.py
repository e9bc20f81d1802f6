"""Asks git about a folder that may be anybody's: its configuration runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from hpcjobs.errors import RequestError
from hpcjobs.processes.programs import Result, Runner, run

_SUBMODULES = "--ignore-submodules=dirty"
_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "safe.bareRepository=explicit", "color.ui=false")


def ask_git(folder: Path, *arguments: str, runner: Runner = run) -> Result:
    """Run ``git ARGUMENTS`` in ``folder`` without its monitors and hooks, and without writing to the repository.

    Raises:
        CommandMissingError: there is no git.
    """
    return runner([*_command(folder, _SETTINGS), *arguments])


def read_status(folder: Path, *, runner: Runner = run) -> Result:
    """``git status`` for programs; what changed within submodules is left out, whose own configuration git would use.

    Raises:
        CommandMissingError: there is no git. RequestError: a filter of the repository cannot be switched off.
    """
    settings = (*_SETTINGS, *_filters_off(folder, runner))
    return runner([*_command(folder, settings), "status", "--porcelain=v2", "--branch", "-z", _SUBMODULES])


def read_difference(folder: Path, *, runner: Runner = run) -> str:
    """What differs from the commit, as `git apply` takes it: every byte, carriage returns too."""
    with TemporaryDirectory() as place:
        patch = Path(place, "patch")
        options = ("--no-ext-diff", "--no-textconv", "--no-color", "--binary", "--submodule=short", _SUBMODULES)
        settings = (*_SETTINGS, *_filters_off(folder, runner))
        runner([*_command(folder, settings), "diff", *options, f"--output={patch}", "HEAD"])
        return patch.read_bytes().decode("utf-8", "surrogateescape") if patch.exists() else ""


def _command(folder: Path, settings: Sequence[str]) -> list[str]:
    return ["git", "--no-optional-locks", "-C", str(folder), *(part for one in settings for part in ("-c", one))]


def _filters_off(folder: Path, runner: Runner) -> list[str]:
    """Settings without the filters (`clean`, `process`) that the repository itself configures; the user's stay."""
    options = ("-z", "--show-scope", "--name-only", "--get-regexp", r"^filter\.")
    fields = runner([*_command(folder, _SETTINGS), "config", *options]).out.split("\0")
    keys = {key for scope, key in zip(fields[::2], fields[1::2], strict=False) if scope in ("local", "worktree")}
    names = sorted({key.removeprefix("filter.").rpartition(".")[0] for key in keys})
    if strange := [name for name in names if "=" in name or "\n" in name]:
        raise RequestError(
            f"the repository of {folder} configures the filter {strange[0]!r}, which cannot be switched off",
            hint="git config --show-origin --get-regexp filter: remove it, or rename it without '='",
        )
    values = {"clean": "", "process": "", "required": "false"}
    return [f"filter.{name}.{key}={value}" for name in names for key, value in values.items()]
