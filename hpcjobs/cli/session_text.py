"""Sessions as text: what `hpcjobs jupyter` prints for people and for scripts."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Any

from hpcjobs.cli.output import clock, note, print_output
from hpcjobs.cli.terminal import printable, raw

if TYPE_CHECKING:
    from hpcjobs.jupyter.session import Session
    from hpcjobs.scheduler.base import JobRecord


class LiveLine:
    """What the scheduler says of a job that has not started: one line that changes, or on a pipe a line per change."""

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
