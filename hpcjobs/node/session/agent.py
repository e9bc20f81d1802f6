"""The session on its node: from the settings to a server that answers, and to an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from hpcjobs.files import write_beside
from hpcjobs.node.session import files, loopback, servers, tunnel
from hpcjobs.node.session.files import Connection, Settings
from hpcjobs.processes.start import start

MISSING = 20
"""Exit code: the node lacks something the session needs."""
_ANSWER_S = 300.0
_LOOK_S, _LOOK_AGAIN_S = 0.2, 15.0
_STOP_S = 15.0
_LONGEST_PARENT = 40
"""Bytes of the folder that the private one is in: a socket's path has at most 107, and that of a kernel's socket has 67
more: ``/hpcjobs-12345678/kernel-`` and the kernel's id, ``-ipc-1``."""
_LAST_WARNING_S = 60.0
_HEARD = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD}


def serve(run_dir: Path) -> int:
    """Run the session of this run folder to its end; the exit code."""
    settings = files.read_settings(run_dir)
    if problem := servers.missing(settings.kind):
        print(f"hpcjobs: {problem}", file=sys.stderr, flush=True)
        return MISSING
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    token = settings.token or secrets.token_urlsafe(32)
    with _private_folder() as private:
        return _Session(settings, run_dir, private, token).run()


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder of the node's own, for sockets."""
    parent = tempfile.gettempdir()
    fits = len(os.fsencode(parent)) <= _LONGEST_PARENT
    folder = tempfile.mkdtemp(prefix="hpcjobs-", dir=parent if fits else "/tmp")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Session:
    """A server, its files, and the clock."""

    def __init__(self, settings: Settings, run_dir: Path, private: Path, token: str) -> None:
        self._settings, self._run_dir, self._token = settings, run_dir, token
        self._request = servers.ServerRequest(settings, token, run_dir, private)
        self._socket = self._request.socket
        self._started = time.time()
        self._ends = _ends(settings, self._started)
        warnings = {settings.warn_s, min(settings.warn_s, _LAST_WARNING_S)}
        self._warnings = sorted(warnings if self._ends is not None else (), reverse=True)
        self._answering = False

    def run(self) -> int:
        home = self._run_dir / files.FOLDER
        home.mkdir(mode=0o700, exist_ok=True)
        self._clear(home)  # of an attempt that lost its node
        server = servers.build(self._request)
        process = start(
            server.command,
            cwd=self._settings.folder,
            env=_environment(self._settings) | server.environment,
            new_session=True,
            prepare=_hear_everything,
        )
        try:
            return self._watch(process, server.path)
        finally:
            _stop(process)
            self._clear(home)
            files.forget_token(self._run_dir)

    def _watch(self, process: Popen[bytes], path: str) -> int:
        """Until the server ends, or is to end."""
        while process.poll() is None:
            heard = signal.sigtimedwait(_HEARD, self._patience_s())
            if heard is not None and heard.si_signo in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                _say(f"stopped by a signal ({signal.Signals(heard.si_signo).name})")
                return 128 + heard.si_signo
            if heard is not None and heard.si_signo == signal.SIGUSR1:
                self._warn("The job is about to be ended. ")
            if not self._answering:
                self._announce(path)
                if not self._answering and time.time() - self._started > _ANSWER_S:
                    _say(f"the server has not answered for {_ANSWER_S:g} s")
                    return 1
            else:
                self._warn_when_due()
                if self._idle():
                    return 0
        code = process.returncode
        _say(f"the server ended with exit code {code}")
        return 128 - code if code < 0 else code

    def _patience_s(self) -> float:
        """Until something may be due."""
        if not self._answering:
            return _LOOK_S
        due = [_LOOK_AGAIN_S]
        if self._settings.idle_s is not None:
            due.append(self._settings.idle_s / 4)
        if self._ends is not None and self._warnings:
            due.append(self._ends - self._warnings[0] - time.time())
        return max(_LOOK_S, min(due))

    def _announce(self, path: str) -> None:
        """Once the server answers: say where.

        Its socket gets a new name then. Any user reads the first one in /proc/net/unix, and could listen at it after
        the session's end, where a laptop's tunnel may still lead; the second one is known to its owner alone.
        """
        self._answering = servers.answers(self._settings.kind, self._socket, self._token)
        if not self._answering:
            return
        first, self._socket = self._socket, f"{os.path.dirname(self._socket)}/{secrets.token_hex(16)}"
        os.rename(first, self._socket)
        connection = Connection(
            schema=files.SCHEMA,
            job_id=os.environ["HPCJOBS_JOB_ID"],
            kind=self._settings.kind,
            host=socket.gethostname(),
            socket=self._socket,
            port=loopback.listen(self._socket) if self._settings.srun is None else None,
            token=self._token,
            path=path,
            python="python3" if self._settings.in_image else sys.executable,
            started=self._started,
            ends=self._ends,
        )
        way = tunnel.tunnel(self._settings, connection, self._run_dir)
        if way is not None:
            arguments = way.command(tunnel.local_port(connection))
            write_beside(self._run_dir / files.COMMAND, shlex.join(arguments) + "\n")
        write_beside(self._run_dir / files.CONNECTION, json.dumps(connection._asdict(), indent=2))
        _say(f"{self._settings.kind} answers on {connection.host}")

    def _warn_when_due(self) -> None:
        while self._ends is not None and self._warnings and time.time() >= self._ends - self._warnings[0]:
            self._warnings.pop(0)
            self._warn("")

    def _idle(self) -> bool:
        """Whether no user and no kernel has done anything for as long as the limit says."""
        idle = self._settings.idle_s
        if idle is None:
            return False
        active = servers.last_activity(self._settings.kind, self._socket, self._token)
        if active is None or time.time() - max(active, self._started) < idle:
            return False
        _say(f"idle for {idle / 60:g} min: the session ends")
        return True

    def _warn(self, why: str) -> None:
        """A note for whoever has the page open; it saves every document that is open there."""
        until = f"Time limit at {time.strftime('%H:%M', time.localtime(self._ends))}. " if self._ends else ""
        text = f"{why}{until}Everything that is open here has been saved."
        write_beside(
            self._run_dir / files.FOLDER / "notice.json",
            json.dumps({"number": time.time_ns() // 1_000_000, "text": text}),
        )
        _say(f"{why}{until}Open documents are saved.")

    def _clear(self, home: Path) -> None:
        """What holds the token, or points at a server that is gone."""
        for path in (self._run_dir / files.CONNECTION, self._run_dir / files.COMMAND):
            path.unlink(missing_ok=True)
        (home / "code.yaml").unlink(missing_ok=True)
        shutil.rmtree(home / servers.CONFIG, ignore_errors=True)


def _ends(settings: Settings, started: float) -> float | None:
    """The time limit, as Slurm gave it to the job's script, or as requested."""
    ends = os.environ.get("HPCJOBS_ENDS", "")
    if ends.isdigit():
        return float(ends)
    return None if settings.limit_s is None else started + settings.limit_s


def _environment(settings: Settings) -> dict[str, str]:
    """What notebooks see: without the layout of the job's tasks, which an srun in a cell would take for its own, and a
    library for that of a training run."""
    prefixes, names, exceptions = (settings.hidden[key] for key in ("prefixes", "names", "exceptions"))
    return {
        name: value
        for name, value in os.environ.items()
        if name in exceptions or not (name in names or name.startswith(tuple(prefixes)))
    }


def _hear_everything() -> None:
    """The server and its kernels start with no signal blocked."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _stop(process: Popen[bytes]) -> None:
    """End the server, which ends its kernels; then whatever of its session is left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except TimeoutExpired:
            _say(f"the server does not end within {_STOP_S:g} s: killed")
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _say(text: str) -> None:
    print(f"hpcjobs: {text}", flush=True)
