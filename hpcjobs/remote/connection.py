"""One ssh connection to a login host, shared by everything that a command does there.

The user's own ~/.ssh/config applies: ProxyJump, keys, known hosts, a ControlPath where it names one. The connection is
opened in the terminal, where ssh asks for passwords and second factors, and stays open for some minutes for the next
command. The command on the login host says which files to fetch, and ends with the connection.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import selectors
import shlex
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread
from typing import IO, cast

from hpcjobs.errors import HpcJobsError
from hpcjobs.files import append_lines, cache_dir, make_folder, runtime_dir, state_dir, write_beside
from hpcjobs.processes import programs
from hpcjobs.processes.programs import Result, run_in_terminal
from hpcjobs.site.models import Login
from hpcjobs.units import human_bytes

KEEP_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=20")
"""A link that is silent for 45 s is lost; a host that does not answer is tried again after 20 s."""
LOST = 255
"""Exit code of an ssh that did not reach the other side, or lost it."""
_LINES, _LONGEST_LINE = 8, 200
"""Lines, and characters of a line, that a message quotes from a program's output."""
_LONGEST_ANSWER = 256 << 20
"""Bytes of what a command there prints; the answers are lists of jobs and paths."""
_PIECE = 1 << 16
_PERSIST = "10m"
_LONGEST_SOCKET = 104
"""Bytes of the path of a socket on macOS; Linux has four more."""
_NAME_OF_SOCKET = 40 + 1 + 17
"""Bytes that ssh adds to the folder: a hash, and random letters while it makes the socket."""
_AS_TYPED = ("-o", "LogLevel=ERROR", "-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none")

# The user's shell there may be any: it gets only words in single quotes, which csh and fish read as bash does. Output
# of a profile is dropped: standard output comes from the program alone.
_OUTER = 'exec 9>&1 1>/dev/null; exec bash -l -c "$0" "$1"'
_INNER = 'exec 1>&9 9>&-; eval "$(printf %s "$0" | base64 -d)"'


class NoConnectionError(HpcJobsError):
    """The login host is out of reach, for now."""


class LoginConnection:
    """The ssh connection to a login host."""

    def __init__(self, login: Login) -> None:
        self.login = login
        self.destination = login.destination
        settings = _read_settings(self.destination)
        own = settings.get("controlpath", "none") == "none"
        self._control = ("-o", f'ControlPath="{_socket_folder()}/%C"') if own else ()
        lasting = settings.get("controlpersist", "no") not in ("no", "false")
        self._persist = () if lasting else ("-o", f"ControlPersist={_PERSIST}")

    def is_open(self) -> bool:
        """Whether the connection is there."""
        return programs.run(["ssh", *self._control, "-O", "check", self.destination]).code == 0

    def open(self) -> None:
        """Connect, unless the connection is open. ssh prints its messages and asks in the terminal.

        Raises NoConnectionError: ssh did not get through.
        """
        if self.is_open():
            return
        options = (*KEEP_ALIVE, *self._persist, "-o", "ControlMaster=auto", "-o", "ClearAllForwardings=yes")
        code = run_in_terminal(
            ["ssh", *self._control, *options, "-o", "RemoteCommand=none", "-T", "-f", "-N", self.destination]
        )
        if code != 0:
            raise NoConnectionError(
                f"{self.destination} cannot be reached by ssh; its message is above",
                hint=f"does `ssh {self.destination}` work?",
            )

    def close(self) -> None:
        """End the connection."""
        programs.run(["ssh", *self._control, "-O", "exit", self.destination])

    def cancel_forwarding(self, forwarding: str) -> None:
        """Stop listening for ``forwarding`` (``port:host:port``), which outlives the ssh that asked for it."""
        programs.run(["ssh", *self._control, "-O", "cancel", "-L", forwarding, self.destination])

    @property
    def options(self) -> tuple[str, ...]:
        """Options of an ssh that uses the connection."""
        return (*self._control, *KEEP_ALIVE, "-o", "ControlMaster=no")

    def command(self, script: str, *, terminal: bool = False) -> list[str]:
        """The ssh that runs ``script`` there, in bash with the profile of a login shell."""
        encoded = base64.b64encode(os.fsencode(script)).decode()
        remote = f"exec bash -c {shlex.quote(_OUTER)} {shlex.quote(_INNER)} {encoded}"
        return ["ssh", *self.options, *_AS_TYPED, "-t" if terminal else "-T", self.destination, remote]

    def run(self, script: str, *, given: bytes | None = None) -> Result:
        """Run ``script`` there; ``given`` is its standard input.

        Raises NoConnectionError: the connection was lost. HpcJobsError: the answer is too long to be one.
        """
        with tempfile.TemporaryFile() as file:
            file.write(given or b"")
            file.seek(0)
            with programs.start(self.command(script), stdin=file, stdout=PIPE, stderr=PIPE) as process:
                answer = read_answer(process, self.destination)
        out, err = (data.decode("utf-8", "surrogateescape") for data in answer)
        result = Result(process.returncode, out, err)
        if self.is_lost(result.code):
            raise NoConnectionError(f"the connection to {self.destination} is lost: {last_lines(result.err)}")
        return result

    def run_here(self, script: str) -> int:
        """Run ``script`` with this terminal; its exit code, or ssh's if the connection is lost (`is_lost`)."""
        if sys.stdin.isatty() and sys.stdout.isatty():
            return run_in_terminal(self.command(script, terminal=True))
        # A terminal would stop an ssh in the background.
        stdin = DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
        with programs.start(self.command(script), stdin=stdin) as process:
            try:
                return process.wait()
            except BaseException:  # the program there ends when its output has no reader
                process.kill()
                raise

    def is_lost(self, code: int) -> bool:
        """Whether ``code`` means that ssh lost the connection, and is not the exit code of the program."""
        return code < 0 or (code == LOST and not self.is_open())

    def copy(self, arguments: Sequence[str], *, given: str = "") -> None:
        """Run rsync; its ``arguments`` name a path there by `path_there`, ``given`` is its standard input.

        Raises HpcJobsError: it failed, or printed too much. NoConnectionError: the connection was lost.
        CommandMissingError: no rsync here.
        """
        ssh = ["ssh", *self.options, *_AS_TYPED]
        if self.login.port is not None:
            ssh += ["-p", str(self.login.port)]
        with tempfile.TemporaryFile() as file:
            file.write(os.fsencode(given))
            file.seek(0)
            argv = ["rsync", "-e", shlex.join(ssh), *arguments]
            with programs.start(argv, stdin=file, stdout=PIPE, stderr=PIPE) as process:
                _, err = read_answer(process, self.destination)
        if process.returncode == 0:
            return
        message = last_lines(err.decode("utf-8", "backslashreplace"))
        if self.is_lost(process.returncode):
            raise NoConnectionError(f"the connection to {self.destination} is lost: {message}")
        raise HpcJobsError(
            f"rsync with {self.destination}: exit code {process.returncode}: {message}",
            hint="rsync must be installed there too" if "rsync: command not found" in message else None,
        )

    def path_there(self, path: str) -> str:
        """``path`` in the notation of rsync, unquoted: option ``-s`` keeps the shell there from expanding it.

        Raises HpcJobsError: no path; a login host may send anything.
        """
        if "\0" in path:
            raise HpcJobsError(f"{self.destination} names a file {path[:_LONGEST_LINE]!r}, which is no path")
        host = self.login.host if self.login.user is None else f"{self.login.user}@{self.login.host}"
        return f"{host}:{path}"


def read_answer(process: Popen[bytes], destination: str, *, longest: int | None = None) -> list[bytearray]:
    """What ``process`` prints into its pipes, output first, to the end; it is ended when this process is interrupted.

    Raises HpcJobsError: ``destination`` answers with more than ``longest`` bytes; the process is killed.
    """
    longest = _LONGEST_ANSWER if longest is None else longest
    answer = {stream: bytearray() for stream in (process.stdout, process.stderr) if stream is not None}
    try:
        with selectors.DefaultSelector() as ready:  # all at once: a full pipe stops the program there
            for stream in answer:
                ready.register(stream, selectors.EVENT_READ)
            while ready.get_map():
                for key, _ in ready.select():
                    part = os.read(key.fd, _PIECE)
                    if not part:
                        ready.unregister(key.fileobj)
                    data = answer[cast("IO[bytes]", key.fileobj)]
                    data += part
                    if len(data) > longest:
                        process.kill()  # what it started ends when its output has no reader
                        limit = human_bytes(longest)
                        raise HpcJobsError(f"{destination} answered with more than {limit}: not read")
    except BaseException:
        process.terminate()
        raise
    return list(answer.values())


def last_lines(text: str) -> str:
    """The last lines of a program's output, short enough for a message: banners of ssh and of hosts are long."""
    lines = text.strip().splitlines()[-_LINES:]
    return "\n".join(line if len(line) <= _LONGEST_LINE else f"…{line[-_LONGEST_LINE:]}" for line in lines)


def _read_settings(destination: str) -> dict[str, str]:
    """The settings of ssh for a host, from ~/.ssh/config and its defaults.

    Raises HpcJobsError: ssh refuses its configuration.
    """
    answer = programs.run(["ssh", "-G", destination])
    if answer.code != 0:
        raise HpcJobsError(f"ssh -G {destination}: {last_lines(answer.err)}", hint="is ~/.ssh/config right?")
    pairs = (line.partition(" ") for line in answer.out.splitlines())
    return {key: value for key, _, value in pairs}


def _socket_folder() -> str:
    """A private folder for the sockets of connections, its path short enough for them.

    Raises HpcJobsError: others may write to the folder.
    """
    runtime = runtime_dir()
    folders = [cache_dir() / "ssh", *([runtime / "ssh"] if runtime is not None else [])]
    short = [folder for folder in folders if len(os.fsencode(folder)) + 1 + _NAME_OF_SOCKET <= _LONGEST_SOCKET]
    folder = short[0] if short else _folder_in_tmp()
    make_folder(folder)
    if not _is_private(folder):
        raise HpcJobsError(f"{folder} is no private folder of yours: sockets of ssh are not safe there")
    return str(folder).replace("%", "%%")


def _folder_in_tmp() -> Path:
    """A folder below /tmp with a random name, so that it cannot be taken beforehand; recorded for the next command."""
    record = state_dir() / "ssh_sockets"
    with contextlib.suppress(OSError, ValueError):
        if _is_private(known := Path(record.read_text("utf-8"))):
            return known
    folder = Path(tempfile.mkdtemp(prefix="hpcjobs-ssh-", dir="/tmp"))
    make_folder(record.parent)
    write_beside(record, str(folder))
    return folder


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


OUTPUTS = "HPCJOBS_OUTPUTS"
"""Variable with the path of a list: the command adds each file that it was asked to write."""
_AGAIN_S = 1.0


def record_output(path: Path) -> None:
    """Have the laptop fetch ``path``, a file or folder that the user asked for."""
    record = os.environ.get(OUTPUTS)
    if record is not None:
        append_lines(record, [str(path.absolute())])


def end_with_connection() -> None:
    """Have this process end, as by a closed terminal, when its output has no reader any more.

    Without a terminal, sshd does not end the program when the connection ends. If one ssh of a shared connection ends,
    sshd only closes standard output. SIGHUP is sent every second, because a submission ignores it until it is recorded.
    """
    Thread(target=_watch, daemon=True).start()


def _watch() -> None:
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            poll.register(stream.fileno(), 0)
    while not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll()):
        pass
    while True:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(_AGAIN_S)
