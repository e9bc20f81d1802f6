"""What another user of a node can try to get at a session: the standard library alone, as nobody.

stranger.py look RUN_DIR PID...    -> JSON: what could be read or reached; nothing: an empty list
stranger.py take SOCKET...         -> listens at each of these paths, says so, and in the end what came there
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534
PRIVATE = re.compile(r"/\S*/hpcjobs-(?!sandbox)\w+/\S+")


def ports_of(pids: list[str]) -> list[str]:
    """The TCP ports at which these processes listen: root finds them, another user would have to guess.

    A Python kernel has one for the output of its own child processes, which takes nothing without a random key.
    """
    pids = [pid for pid in pids if b"ipykernel" not in Path("/proc", pid, "cmdline").read_bytes()]
    links = [os.readlink(link) for pid in pids for link in Path("/proc", pid, "fd").iterdir()]
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return [f"port {row[1]}" for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


def look(run_dir: str, pids: list[str]) -> Iterator[str]:
    """What this user reads or reaches of the session."""
    sockets = sorted(set(PRIVATE.findall(Path("/proc/net/unix").read_text())))
    paths = [Path(run_dir), Path(run_dir, "connection.json"), Path(run_dir, "session.json")]
    paths += [Path(path).parent for path in sockets]
    paths += [Path("/proc", pid, name) for pid in pids for name in ("environ", "fd")]
    yield from (f"{path}: it can be read" for path in paths if os.access(path, os.R_OK))
    for path in sockets:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(path) == 0:
                yield f"{path}: a connection"


def take(paths: list[str]) -> None:
    """Listen in the place of each socket."""
    servers = []
    for path in paths:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        server = socket.socket(socket.AF_UNIX)
        server.bind(path)
        server.listen()
        server.setblocking(False)
        os.chmod(path, 0o777)
        servers.append(server)
    print("listening", flush=True)
    sys.stdin.read()  # whoever comes meanwhile waits in the queue
    for server in servers:
        try:
            server.accept()
        except BlockingIOError:
            continue
        print("somebody came to", server.getsockname())


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    ports = ports_of(arguments[1:]) if action == "look" else []
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    if action == "look":
        print(json.dumps([*ports, *look(arguments[0], arguments[1:])]))
    else:
        take(arguments)
