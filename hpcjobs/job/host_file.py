"""A file of nodes, as ``sbatch --nodefile`` reads it."""

from __future__ import annotations

from pathlib import Path

from hpcjobs.errors import RequestError, reason_of
from hpcjobs.runtime.hostlist import hosts_of


def read_host_file(path: str, source: str) -> list[str]:
    """The names in the file, in its order: separated by newlines or commas, ``n1*4`` four times, ``#`` a comment.

    Args:
        source: the option that names the file, for messages.

    Raises:
        RequestError: it cannot be read, or names no node.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{source}: the file of nodes cannot be read: {reason_of(error)}") from error
    names = [name for number, line in enumerate(lines, 1) for name in _read_line(line, f"{source}: line {number}")]
    if not names:
        raise RequestError(f"{source}: the file names no node", hint="write one name in each line")
    return names


def _read_line(line: str, where: str) -> list[str]:
    names: list[str] = []
    try:
        for entry in hosts_of(line.partition("#")[0]):
            name, _, times = entry.strip().partition("*")
            names += [name] * int(times or 1) if name else []
    except ValueError as error:
        hint = "a line is such as n1, n[1-4] or n1*2"
        raise RequestError(f"{where}, {line!r}: no list of nodes", hint=hint) from error
    return names
