"""Asks git about a folder that may be anybody's: its configuration runs nothing."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hpcjobs.processes.programs import Result, Runner, run

_SETTINGS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "safe.bareRepository=explicit", "color.ui=false")


def ask_git(folder: Path, *arguments: str, runner: Runner = run) -> Result:
    """Run ``git ARGUMENTS`` in ``folder`` without its monitors and hooks, and without writing to the repository.

    Raises:
        CommandMissingError: there is no git.
    """
    settings = (option for setting in _SETTINGS for option in ("-c", setting))
    return runner(["git", "--no-optional-locks", "-C", str(folder), *settings, *arguments])


def read_difference(folder: Path, *, runner: Runner = run) -> str:
    """What differs from the commit, as `git apply` takes it: every byte, carriage returns too."""
    with TemporaryDirectory() as place:
        patch = Path(place, "patch")
        options = ("--no-ext-diff", "--no-textconv", "--no-color", "--binary", f"--output={patch}")
        ask_git(folder, "diff", *options, "HEAD", runner=runner)
        return patch.read_bytes().decode("utf-8", "surrogateescape") if patch.exists() else ""
