"""Every error hpcjobs raises on purpose, and the exit code each one ends the CLI with.

    HpcJobsError                 3   base: all other errors
    ├── ConfigError              4   a site, spec or user file is wrong (names file, line, key)
    ├── RequestError             5   a value is not understood, or the request does not fit the site
    ├── UnknownJobError          6   no such job, run folder or name
    └── SchedulerError           7   the scheduler refused
        ├── SchedulerDownError   8   the scheduler could not be reached, after retries
        └── CommandMissingError  9   a program hpcjobs needs is not installed

Exit code 1 is the answer no of a verb that checks, 2 a usage error (unknown option), 70 an error that hpcjobs did
not foresee, 130 an interrupted command. ``hpcjobs wait`` and ``hpcjobs submit --wait`` end with the job's own exit code
instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib.util import find_spec

UNFORESEEN = 70
"""Exit code of the command line after any other error."""
_LINE_COLUMNS = 80
"""Longest line of names in a message."""
_MOST_NAMES = 100
"""Names listed in a message: enough for all options of sbatch, not for all jobs of a year."""


class HpcJobsError(Exception):
    """Another error that is explained: a missing package, a time that is over, a file that cannot be written."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class HpcJobsWarning(UserWarning):
    """Something that went wrong and did not keep the command from its work; the command line prints it once."""


def warn_without_locks(folder: object, what: str) -> None:
    """Warn once that ``folder`` has no locks, so two commands could do ``what`` in it at the same time."""
    warnings.warn(f"{folder} has no file locks: do not {what} at the same time", HpcJobsWarning, stacklevel=2)


class ConfigError(HpcJobsError):
    """A file that is read is wrong, or the site does not exist."""

    exit_code = 4


class RequestError(HpcJobsError):
    """The request is refused: a value is wrong, the site does not allow it, or a limit is reached."""

    exit_code = 5


class UnknownJobError(HpcJobsError):
    """No job, run folder, session or sweep has this name."""

    exit_code = 6


class SchedulerError(HpcJobsError):
    """The scheduler refused."""

    exit_code = 7


class SchedulerDownError(SchedulerError):
    """The scheduler did not answer; it may have accepted a submission (maybe_taken)."""

    exit_code = 8

    def __init__(self, message: str, *, hint: str | None = None, maybe_taken: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.maybe_taken = maybe_taken


class CommandMissingError(SchedulerError):
    """A program that is needed is not on PATH."""

    exit_code = 9


def list_exit_codes() -> dict[int, str]:
    """The exit codes of the command line and their meaning."""
    kinds = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, HpcJobsError)]
    return {
        0: "success",
        1: "the answer is no (`doctor`, `drill`, `sites check`, `sandbox status`, `report scaling --check`), or a run "
        "of a sweep or study failed",
        2: "usage error: an unknown option, or an option without its value",
        **{kind.exit_code: (kind.__doc__ or "").partition("\n")[0] for kind in kinds},
        UNFORESEEN: "an error that hpcjobs did not foresee; `hpcjobs --debug VERB ...` shows it",
        130: "interrupted",
    }


def require_packages(*names: str, purpose: str = "this report") -> None:
    """Raise HpcJobsError with the install command if packages are missing.

    numpy, which the packages of the extra `report` build on except polars, is looked for with them.
    """
    packages = (*names, "numpy") if {"pandas", "scipy", "matplotlib"} & {*names} else names
    if missing := [name for name in packages if find_spec(name) is None]:
        raise HpcJobsError(f"{purpose} needs {' and '.join(missing)}", hint="pip install 'hpcjobs[report]'")


def reason_of(error: Exception) -> str:
    """Why a file could not be used, without its name and the number of the error."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def nearest(name: str, known: Iterable[str], *, wraps: bool = True) -> str:
    """``did you mean 'nodes'?`` plus every known name, those like ``name`` first, for the end of an error message.

    Args:
        wraps: write the names below the first line if they do not fit on a line of 80 columns.
    """
    import difflib  # only errors need these
    import textwrap

    names = sorted(known)
    if not names:
        return "known: none"
    by_lower_case = {other.lower(): other for other in names}
    typed = name.lower()
    close = [by_lower_case[match] for match in difflib.get_close_matches(typed, by_lower_case, n=3, cutoff=0.6)]
    close = close or [other for lower, other in by_lower_case.items() if typed and lower.startswith(typed)]
    ordered = [*dict.fromkeys([*close, *names])]
    rest = f", and {len(ordered) - _MOST_NAMES} more" if len(ordered) > _MOST_NAMES else ""
    listed = ", ".join(ordered[:_MOST_NAMES]) + rest
    start = (f"did you mean {close[0]!r}? " if close else "") + "known:"
    if not wraps or len(f"hint: {start} {listed}") <= _LINE_COLUMNS:
        return f"{start} {listed}"
    lines = textwrap.wrap(listed, _LINE_COLUMNS - 2, break_long_words=False, break_on_hyphens=False)
    return "\n  ".join([start, *lines])
